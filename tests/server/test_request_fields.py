"""One policy for the fields of all routes: what acts, what has no effect and is listed, what is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from control_case import put_weights, serving_with_control
from echo import EchoEngine, echo_tokens
from server_case import post, serving, stream, tokenizer

from megatron_infer.coordinator.commands import PROFILE_VARIABLE

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import field_docs  # noqa: E402

TABLES = field_docs.tables()
HI = [{"role": "user", "content": "Hi"}]
SHORT = {"max_tokens": 1, "temperature": 0}
LEAST = {
    CHAT: {"messages": HI, **SHORT},
    COMPLETION: {"prompt": [1], **SHORT},
    "/v1/embeddings": {"input": [1]},
    "/tokenize": {"messages": HI},
    "/generate": {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
    "/generate/": {"prompts": [[1]], "max_tokens": 1},
    "/get_sequence_logprobs/": {"sequences": [[1]], "prompt_lengths": [1], "top_logprobs": 1},
    "/update_weights_from_disk": {"model_path": "step1"},
    "/continue_generation": {},
    "/abort_request": {"rid": "nobody"},
    "/start_profile": {},
    "/weights_checker": {"action": "checksum"},
    "/begin_weight_update": {},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "tools": [{"type": "function", "name": "f"}],
        "max_output_tokens": 1,
    },
    "/v1/messages": {"messages": HI, "tools": [{"name": "f"}], "max_tokens": 1},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/api": {"prompts": ["a"], "tokens_to_generate": 1},
}
"""The smallest body of the first route of every table."""
ACTS = ("/generate", "lora_path")
"""A shared field that acts there."""
ASKS = "no value that asks for nothing"
FILLED = {
    "content": [{"type": "text", "text": "Hi"}],
    "messages": HI,
    "stream_options": {"include_usage": True},
    "system": [{"type": "text", "text": "Hi"}],
    "text": {},
    "reasoning": {},
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
"""Objects that are not in the smallest body -> one that can be filled."""


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    put_weights(folder)
    with serving_with_control(EchoEngine(num_blocks=1 << 12), weights_root=str(folder)) as one:
        yield one


@pytest.fixture(scope="module")
def strict_case():
    with serving_with_control(strict_fields=True) as one:
        yield one


def bodies(body, table, path=""):
    """Of a body and the objects within it: the path of its fields, its table, a function that puts a field into it."""

    def at_top(name, value):
        return {**body, name: value}

    yield path, table, at_top
    for key, inner in table.nested.items():
        held = body.get(key) if isinstance(body.get(key), dict | list) else FILLED.get(key)
        if held is None:
            continue
        extra = {"stream": True} if key == "stream_options" else {}
        first = held[0] if isinstance(held, list) else held
        mark = f"{path}{key}[]." if isinstance(held, list) else f"{path}{key}."
        for where, one, put_within in bodies(first, inner, mark):

            def within(name, value, put_within=put_within, held=held, key=key, extra=extra):
                filled = put_within(name, value)
                return {**body, **extra, key: [filled, *held[1:]] if isinstance(held, list) else filled}

            yield where, one, within


OF_A_TRAINER = (
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/collective_rpc",
    "/areal_set_update_weight_meta_lora",
    "/load_lora_adapter_from_distributed",
    "/load_lora_adapter_from_tensors",
)
"""Routes that answer 200 with a trainer's group or tensors alone: `test_weight_group_routes.py` and
`test_adapter_groups.py` hold their fields."""


def send(case, route, body):
    return case.http.request("PUT" if route == "/api" else "POST", route, json=body)


def every_rule():
    for routes, table in TABLES.items():
        route = routes.split(", ")[0]
        if route in OF_A_TRAINER:
            continue
        for where, inner, put_field in bodies(LEAST[route], table):
            for name, rule in inner.rules.items():
                if (route, f"{where}{name}") != ACTS:
                    yield route, f"{where}{name}", name, rule, put_field


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.long)])
def test_every_field_of_the_tables_is_taken_listed_or_refused_as_they_say(case, monkeypatch, tmp_path, every):
    monkeypatch.setenv(PROFILE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(EchoEngine, "profile", lambda self, path, steps: None, raising=False)
    wrong, rules = [], list(every_rule())
    for route, where, name, rule, put_field in rules[::every]:
        for value in (None, *rule.unset):
            reply = send(case, route, put_field(name, value))
            if reply.status_code != 200 or "x-ignored-fields" in reply.headers:
                wrong.append((route, where, value, reply.status_code, reply.text[:200]))
            if route == "/begin_weight_update":
                post(case, "/cancel_weight_update")
        reply = send(case, route, put_field(name, ASKS))
        if rule.is_refused:
            error = reply.json()["error"] if reply.status_code == 400 else {"message": reply.text, "code": None}
            if where not in error["message"] or error["code"] != "unsupported_field":
                wrong.append((route, where, reply.status_code, error))
        elif reply.status_code != 200 or reply.headers.get("x-ignored-fields") != where:
            wrong.append((route, where, reply.status_code, dict(reply.headers), reply.text[:200]))
    assert not wrong and len(rules) > 300, "\n".join(map(str, wrong[:20]))


def test_every_route_with_a_table_is_described_with_its_fields(case):
    document = case.http.get("/openapi.json").json()
    for routes, table in TABLES.items():
        for route in routes.split(", "):
            operation = document["paths"][route]["put" if route == "/api" else "post"]
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            component = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            shown = component["properties"].keys() | component["x-fields-without-action"].keys()
            assert set(table.rules) <= shown, route


def test_strict_server_refuses_what_has_no_effect(strict_case):
    reply = post(strict_case, COMPLETION, prompt=[1], user="me", **SHORT)
    assert reply.status_code == 400 and "user has no effect here" in reply.json()["error"]["message"]
    reply = post(strict_case, CHAT, messages=[{**HI[0], "cache_control": {"type": "ephemeral"}}], **SHORT)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages[].cache_control"
    assert strict_case.http.post("/pause?mode=keep&clear_cache=true").status_code == 400
    assert post(strict_case, COMPLETION, prompt=[1], user=None, use_beam_search=False, **SHORT).status_code == 200


def test_unknown_fields_are_refused_with_the_nearest_name_and_nulls_count_as_not_given(case):
    reply = post(case, COMPLETION, prompt=[1], usr="me")
    assert reply.json()["error"]["code"] == "unknown_field" and reply.status_code == 400
    assert post(case, COMPLETION, prompt=[1], usr=None, maxtokens=None, **SHORT).status_code == 200
    reply = post(case, COMPLETION, prompt=[1], metadata={"a": "b"}, maxtokens=1)
    assert reply.json()["error"]["message"].endswith("did you mean 'max_tokens'?")
    reply = post(case, COMPLETION, prompt=[1], metadata={"a": "b"}, max_tokens="1")
    assert reply.json()["error"]["message"].startswith("max_tokens: Expected `int`")


def test_documented_tables_are_those_of_the_code():
    for path, text in field_docs.pages().items():
        assert (ROOT / path).read_text() == text, "run python tools/field_docs.py"


def test_streams_list_ignored_fields_too(case):
    body = {"prompt": [1], "stream": True, "user": "me", "metadata": {"run": "7"}, **SHORT}
    with case.http.stream("POST", COMPLETION, json=body) as reply:
        assert reply.headers["x-ignored-fields"] == "user, metadata"
        assert reply.headers["content-type"].startswith("text/event-stream")


def test_template_variables_act_where_the_template_reads_them():
    template = "{{ messages[0].content }}{{ reasoning_effort }}{% if documents %}{{ documents[0].text }}{% endif %}"
    with serving_with_control(encoder=tokenizer(template)) as case:
        asked = {"messages": HI, "return_token_ids": True, **SHORT}
        reply = post(case, CHAT, **asked, reasoning_effort="low", documents=[{"text": "!"}])
        assert bytes(reply.json()["prompt_token_ids"]) == b"Hilow!" and "x-ignored-fields" not in reply.headers
    with serving_with_control() as case:
        reply = post(case, CHAT, **asked, reasoning_effort="low", documents=[{"text": "!"}])
        assert reply.headers["x-ignored-fields"] == "reasoning_effort, documents"


def test_messages_of_replies_and_of_older_clients_can_be_sent(case):
    history = [
        {"role": "function", "name": "f", "content": "4"},
        {"role": "assistant", "content": "a", "refusal": None, "audio": None, "reasoning": "because", "foo": None},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
    ]
    reply = post(case, "/tokenize", messages=history)
    assert reply.headers["x-ignored-fields"] == "messages[].content[].cache_control"
    text = tokenizer().decode(reply.json()["tokens"], skip_special=False)
    assert text.startswith("<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\na")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (
            CHAT,
            {
                "messages": [{**HI[0], "id": "1", "type": "message", "timestamp": 5}],
                "tools": [{"type": "custom", "custom": {"name": "c"}}, {"type": "function", "function": {"name": "f"}}],
                "tool_choice": "auto",
                "reasoning_effort": "high",
            },
            "messages[].id, messages[].timestamp, tools[0], reasoning_effort",
        ),
        (
            "/v1/responses",
            {
                "input": "Hi",
                "tools": [
                    {"type": "function", "name": "f", "strict": True, "defer_loading": True},
                    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
                    {"type": "web_search", "external_web_access": True},
                ],
                "reasoning": {"effort": "low"},
                "context_management": [{"type": "compaction", "compact_threshold": 1000}],
                "client_metadata": {"run": "7"},
                "include": ["reasoning.encrypted_content"],
            },
            "tools[].defer_loading, tools[1], tools[2], context_management, client_metadata, include, reasoning.effort",
        ),
        (
            "/v1/messages",
            {
                "messages": [{**HI[0], "id": "1"}],
                "tools": [{"name": "f", "strict": True}, {"type": "web_search_20250305", "name": "web_search"}],
                "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 9}},
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            },
            "messages[].id, tools[1], output_config.task_budget, context_management, output_config.effort",
        ),
    ],
)
def test_fields_of_other_servers_are_listed_as_the_caller_wrote_them(case, strict_case, path, body, named):
    limit = {"max_output_tokens": 1} if path == "/v1/responses" else {"max_tokens": 1}
    reply = post(case, path, **body, **limit)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-fields"] == named
    assert post(strict_case, path, **body, **limit).status_code == 400


def test_tokens_of_a_conversation_with_tools_are_those_of_the_chat(case):
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {}}}}}]
    tools.append({"type": "web_search"})
    chat = post(case, CHAT, messages=HI, tools=tools, return_token_ids=True, tool_choice="none", **SHORT)
    reply = post(case, "/tokenize", messages=HI, tools=tools)
    assert reply.json()["tokens"] == chat.json()["prompt_token_ids"]
    assert reply.json()["count"] > post(case, "/tokenize", messages=HI).json()["count"]
    assert reply.headers["x-ignored-fields"] == chat.headers["x-ignored-fields"] == "tools[1]"
    reply = post(case, "/tokenize", prompt="Hi", tools=tools)
    assert reply.status_code == 400 and "tools goes with messages" in reply.json()["error"]["message"]
    assert post(case, "/tokenize", messages=HI, tools=[]).status_code == 200


def test_a_refusal_in_the_history_is_the_text_of_its_turn(case):
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    said = {"role": "assistant", "content": "I will not."}
    ids = [post(case, "/tokenize", messages=[*HI, turn, *HI]).json()["tokens"] for turn in (refusal, said)]
    assert ids[0] == ids[1]
    reply = post(case, CHAT, messages=[*HI, {"role": "assistant", "content": [{"type": "refusal", "text": "a"}]}])
    assert reply.status_code == 400 and "messages[1].content[0]" in reply.text


def test_request_id_names_the_reply_and_aborts_it(case):
    reply = post(case, COMPLETION, prompt=[1], request_id="mine", **SHORT).json()
    assert reply["id"] == "cmpl-mine"
    assert post(case, CHAT, messages=HI, request_id="mine", **SHORT).json()["id"] == "chatcmpl-mine"


def test_tokens_of_logprobs_can_be_given_as_ids(case):
    asked = {"return_tokens_as_token_ids": True, "max_tokens": 3, "temperature": 0}
    names = [f"token_id:{token}" for token in echo_tokens([1], 3)]
    assert post(case, COMPLETION, prompt=[1], logprobs=0, **asked).json()["choices"][0]["logprobs"]["tokens"] == names
    content = post(case, CHAT, messages=HI, logprobs=True, **asked).json()["choices"][0]["logprobs"]["content"]
    assert all(one["token"].startswith("token_id:") for one in content)


def test_text_offsets_of_a_stream_are_those_of_the_whole_reply():
    """The name of a token is longer than its text, so a piece's first offset shows what the offsets count."""
    asked = {"prompt": [1], "return_tokens_as_token_ids": True, "max_tokens": 12, "temperature": 0, "logprobs": 0}
    with serving(EchoEngine(step_s=0.01)) as slow:
        whole = post(slow, COMPLETION, **asked).json()["choices"][0]["logprobs"]["text_offset"]
        pieces = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in stream(slow, COMPLETION, **asked)]
    assert len(pieces) > 1
    assert [offset for piece in pieces for offset in piece] == whole


def test_usage_of_a_stream_comes_at_its_end_or_in_every_chunk(case):
    for path, body in ((COMPLETION, {"prompt": [1, 2]}), (CHAT, {"messages": HI})):
        asked = {**body, "max_tokens": 4, "temperature": 0}
        plain = stream(case, path, **asked, stream_options={"include_usage": True})
        assert [chunk["usage"] for chunk in plain[:-1]] == [None] * (len(plain) - 1)
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = stream(case, path, **asked, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 4 and chunks[-1]["usage"] == plain[-1]["usage"]
        assert chunks[-2]["choices"] and chunks[-2]["usage"]["completion_tokens"] == 4


def test_tokens_that_an_echo_without_output_hides_count_in_no_chunk(case):
    asked = {"prompt": [1, 2], "max_tokens": 0, "echo": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(case, COMPLETION, **asked, stream_options=options)
    assert len(chunks) > 1 and {chunk["usage"]["completion_tokens"] for chunk in chunks} == {0}


def test_megatron_paths_have_megatron_values(case):
    asked = {"model": "", "messages": HI, "temperature": 1.0, "top_p": 0.0, "seed": 1, "max_tokens": 3}
    extra = {"skip_prompt_log_probs": True, "add_BOS": False, "return_tokenized_data": True, "return_raw_text": True}
    message = post(case, "/chat/completions", **asked, **extra).json()["choices"][0]["message"]
    prompt = tokenizer().decode(message["prompt_token_ids"], skip_special=False)
    assert message["raw_text"] == prompt + message["content"] and len(message["generation_token_ids"]) == 3
    assert post(case, CHAT, **{**asked, "top_p": 1.0}).json()["choices"][0]["message"]["content"] == message["content"]
    refused = post(case, CHAT, **asked)
    assert refused.status_code == 400 and "top_p" in refused.json()["error"]["message"], "OpenAI's 0 is another thing"
    assert post(case, CHAT, **{**asked, "top_p": 1.0}, add_BOS=True).json()["error"]["param"] == "add_BOS"


def test_no_shared_field_acts_within_the_sampling_parameters(case):
    schemas = case.http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("Sampling", "VllmSampling"):
        assert schemas[name]["properties"].keys().isdisjoint(field_docs.SHARED)
