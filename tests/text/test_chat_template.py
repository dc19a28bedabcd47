"""Chat templates render as in training, in a sandbox, and errors name what is wrong."""

from __future__ import annotations

import time

import pytest
from vocabularies import byte_level

from megatron_infer.errors import InvalidPrompt, ModelError
from megatron_infer.text import chat_template
from megatron_infer.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi <b> & é"}]


def render(template, messages=USER, **options):
    return chat_template.render(template, messages, add_generation_prompt=True, **options)


def test_blocks_are_trimmed_and_loop_controls_work():
    template = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}\nend"
    )
    assert render(template, USER * 3) == "hi <b> & é\nend"


def test_tojson_keeps_text_as_it_is():
    assert render("{{ tools | tojson }}", tools=[{"name": "<é & 'x'>"}]) == '[{"name": "<é & \'x\'>"}]'


def test_generation_blocks_render_their_body():
    assert render("{% generation %}x{{ messages[0].role }}{% endgeneration %}y") == "xusery"


def test_strftime_now_is_there():
    assert len(render("{{ strftime_now('%Y') }}")) == 4


def test_a_template_may_refuse_messages():
    with pytest.raises(InvalidPrompt, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "attack", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.mro() }}"]
)
def test_templates_cannot_reach_python(attack):
    with pytest.raises(InvalidPrompt):
        render(attack + "{% if messages|length > 1 %}{{ raise_exception('changed') }}{% endif %}{{ undefined_name.x }}")


def test_broken_template_names_the_line():
    with pytest.raises(ModelError, match="line 2"):
        render("a\n{% if %}")


@pytest.mark.parametrize("messages", [[], "text", ["text"], [{"content": "no role"}]])
def test_wrong_messages_are_refused(messages):
    with pytest.raises(InvalidPrompt, match="messages"):
        render("{{ messages }}", messages)


def test_model_without_template_says_so():
    with pytest.raises(ModelError, match="byte level has no chat template"):
        byte_level().apply_chat_template(USER)


def test_named_templates_choose_tool_use_when_tools_are_given():
    templates = {"default": "plain {{ eos_token }}", "tool_use": "tools"}
    backend = byte_level()
    tokenizer = Tokenizer(backend.backend, special_tokens={"eos_token": "<|end|>"}, template=templates)
    assert tokenizer.apply_chat_template(USER) == "plain <|end|>"
    assert tokenizer.apply_chat_template(USER, tools=[{"name": "f"}]) == "tools"


LIMITS = chat_template.RenderLimits(max_chars=1000, cpu_s=0.1)


@pytest.mark.security
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in messages %}{% for b in messages %}{% for c in messages %}{% if a.role == c.role %}{% endif %}"
         "{% endfor %}{% endfor %}{% endfor %}", "takes more than 0.1 s"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than 0.1 s"),
        ("{% for a in messages %}{% for b in messages %}{% for c in messages %}{{ '' }}{% endfor %}{% endfor %}"
         "{% endfor %}", "takes more than 0.1 s"),
        ("{% set text = 'x' * 900 %}" + "{% for i in text %}" * 3 + "{% endfor %}" * 3, "takes more than 0.1 s"),
        ("{% set ns = namespace(t='x') %}{% for m in messages %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}", "1,024 "),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "makes 1,0.. characters, .* the limit is 1,000"),
        ("{% set ns = namespace(t='x') %}{% for m in messages %}{% set ns.t = ns.t + ns.t %}{% endfor %}", "1,024 "),
        ("{{ 'x' * n }}{{ n * 'x' }}", "1,000,000,000 characters"),
        ("{{ [1, 2] * n }}", "2,000,000,000 characters, items"),
        ("{{ 10 ** n }}", "4,000,000,000 characters, items or bits"),
        ("{% set ns = namespace(i=n) %}{% for m in messages %}{% set ns.i = ns.i * ns.i %}{% endfor %}", "bits"),
    ],
)  # fmt: skip
def test_a_template_is_bounded_in_time_and_size(template, said):
    began = time.thread_time()
    with pytest.raises(InvalidPrompt, match=said):
        render(template, USER * 1000, variables={"n": 10**9}, limits=LIMITS)
    assert time.thread_time() - began < 1.0


def test_limits_that_hold_change_nothing():
    template = "{% for m in messages %}{{ loop.index * 2 }}{{ m['role'] }}{{ 'ab' * 3 + m.content ~ 1 }}{% endfor %}"
    assert render(template, USER * 3, limits=LIMITS) == render(template, USER * 3)
