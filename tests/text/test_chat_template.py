"""Chat templates render as in training, in a sandbox, and errors name what is wrong."""

from __future__ import annotations

import copy
import time
import tracemalloc

import jinja2
import pytest
from vocabularies import byte_level

from megatron_infer.errors import InvalidPrompt, ModelError
from megatron_infer.text import chat_template, template_limits
from megatron_infer.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi <b> & é"}]


def render(template, messages=USER, **options):
    return chat_template.render(template, messages, add_generation_prompt=True, **options)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content }}\n"
            "{% endfor %}\nend",
            "hi <b> & é\nend",
        ),
        ("{{ tools | tojson }}", '[{"name": "<é & \'x\'>"}]'),
        ("{% generation %}x{{ messages[0].role }}{% endgeneration %}y", "xusery"),
    ],
    ids=["trimmed blocks and loop controls", "tojson keeps text", "generation blocks"],
)
def test_templates_have_what_those_of_hugging_face_expect(template, text):
    assert render(template, USER * 3, tools=[{"name": "<é & 'x'>"}]) == text


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
LIMITS_OF_TIME = chat_template.RenderLimits(max_chars=1000, cpu_s=30.0)


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


LISTS = (
    "{% set a = [1] * 900 %}{% set b = [a] * 900 %}{% set c = [b] * 900 %}{% set d = [[[1] * 900] * 900] * 900 %}{{ "
)
GROW = [
    "'%1000000000d' | format(1)",
    "'%1000000000d' % 1",
    "'%*d' % (n, 1)",
    "'%.*f' | format(n, 1.5)",
    "'{:1000000000}'.format(1)",
    "'{:{}}'.format(1, n)",
    "'{a:>1000000000}'.format_map({'a': 1})",
    "messages | tojson(indent=n)",
    "messages | tojson(indent='x' * 900)",
    "'a' | center(n)",
    "'a'.center(n)",
    "'a'.ljust(n)",
    "'a'.rjust(n)",
    "'a'.zfill(n)",
    "'\t'.expandtabs(n)",
    "'a\nb' | indent(n)",
    "'a\nb' | indent('x' * 900)",
    "('a ' * 400) | wordwrap(1, wrapstring='x' * 900)",
    "('a' * 900) | replace('a', 'b' * 900)",
    "('a' * 900).replace('', 'b' * 900)",
    "range(900) | join('x' * 900)",
    "('x' * 900).join(['a'] * 900)",
    "messages | batch(n, 0) | list",
    "messages | slice(n) | list",
    "1.5 | round(n, 'ceil')",
    "(1).to_bytes(n, 'big')",
    "'a'.encode() * n",
    "('a' * 900).translate({97: 'x' * 900})",
    "7 ** 99999999 // 3",
    "range(99999) | map('center', 900) | list",
    "range(99999) | map('string') | map('center', 900) | join",
]
NESTED = [
    "c",
    "c | string",
    "c | tojson",
    "c | pprint",
    "c ~ ''",
    "c == d",
    "c < d",
    "c is eq d",
    "d is in c",
    "5 in c",
    "[c, d] | sort",
    "[c, d] | max",
    "c | unique | list",
    "c | join",
    "c | upper",
    "c | replace('1', '')",
    "'%s' | format(c)",
    "'{}'.format(c)",
    "'%(a)s' | format(a=c)",
    "'%s' % [c]",
    "[c] | map('string') | list",
    "b | sum(start=[])",
    "{'a': c} | xmlattr",
    "c | groupby(0)",
]


@pytest.mark.security
@pytest.mark.parametrize("expression", [*GROW, *(f"{LISTS}{one}" for one in NESTED)])
def test_no_filter_method_or_operator_makes_more_than_the_limit(expression):
    """Nor does it take long: what would be made is known before."""
    template = (expression if expression.startswith("{%") else "{{ " + expression) + " }}"
    began = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidPrompt, match=r"makes [0-9,]+ characters, items or bits"):
            render(template, USER * 99, variables={"n": 10**9}, limits=LIMITS_OF_TIME)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - began < 2.0


def test_every_filter_and_method_of_a_text_that_jinja_has_is_bounded():
    """A new one is a line of this test, after a thought about what it makes."""
    filters = set(jinja2.filters.FILTERS)
    methods = {name for name in dir(str) if not name.startswith("_")}
    grows = set(template_limits.GROWS)
    as_long = "abs capitalize e escape filesizeformat float forceescape groupby int lower max min pprint sort string "
    as_long += "striptags title trim truncate unique upper urlencode urlize wordcount xmlattr"
    assert filters - grows - template_limits.KEEPS_VALUES == set(as_long.split())
    tests = {f"is {name}" for name in jinja2.tests.TESTS}
    compared = "!= < <= == > >= divisibleby eq equalto even ge greaterthan gt in le lessthan lower lt ne odd upper"
    assert tests - template_limits.KEEPS_VALUES == {f"is {name}" for name in compared.split()}
    assert methods - grows - {"join"} == {
        "capitalize", "casefold", "count", "encode", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
        "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
        "lower", "lstrip", "maketrans", "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition",
        "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    }  # fmt: skip


def test_a_long_conversation_with_many_tools_takes_little_time():
    """Mistral's templates ask at every turn whether there are tools, which walks through none of them."""
    turn = "{% if tools is not none and m == messages[-1] %}{{ m.content }}{% endif %}"
    template = "{% for m in messages %}" + turn + "{% endfor %}"
    fields = {f"field{index}": {"type": "string", "description": "text"} for index in range(30)}
    tool = {"type": "function", "function": {"name": "call", "parameters": {"type": "object", "properties": fields}}}
    conversation = [*USER * 500, {"role": "user", "content": "last"}]
    limits = chat_template.RenderLimits(max_chars=10**6, cpu_s=1.0)
    tools = [copy.deepcopy(tool) for _ in range(100)]
    assert render(template, conversation, tools=tools, limits=limits) == "last"


def test_limits_that_hold_change_nothing():
    shown = [
        "loop.index * 2", "m['role']", "'ab' * 3 + m.content ~ 1 ~ none", "[1, none]", "m | tojson(indent=2)",
        "'%-5s|%05d' | format(m.role, 7)", "'{:>9}'.format(m.role)", "['a', 'b'] | join(', ')", "7 // 2 - 1 % 3",
        "'a-b'.split('-') | map('upper') | join", "m.content is in ['hi']", "1.25 | round(1)", "range(3) | join('-')",
        "m.items() | list | length", "2000000000 | string | replace('0', 'o')", "m == messages[0]", "none | default(3)",
    ]  # fmt: skip
    template = "{% for m in messages %}" + "".join(f"{{{{ {one} }}}}" for one in shown) + "{% endfor %}"
    assert render(template, USER * 3, limits=LIMITS) == render(template, USER * 3)
