"""Chat templates render as in training, in a sandbox, and errors name what is wrong."""

from __future__ import annotations

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
    tokenizer = Tokenizer(backend.backend, eos_ids=backend.eos_ids, template=templates)
    assert tokenizer.apply_chat_template(USER) == "plain <|end|>"
    assert tokenizer.apply_chat_template(USER, tools=[{"name": "f"}]) == "tools"
