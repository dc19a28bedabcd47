"""Modules that add operations, request fields and reasoning parsers, all shown in the OpenAPI document."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from echo import echo_tokens
from server_case import END, post, serving, stream, tokenizer

from megatron_infer.server.body_types import Body, NumTokens, Temperature
from megatron_infer.server.endpoint import Reply
from megatron_infer.server.field_tables import SHARED
from megatron_infer.server.generation import Dialect, Generator
from megatron_infer.server.generation_request import ExtraField, GenerationRequest
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable
from megatron_infer.server.reply_format import ReplyFormat

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


class Shout(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class Halves:
    """The first half of the numbers is reasoning."""

    def __init__(self):
        self.seen = 0

    def feed(self, text, *, finished):
        parts = []
        for word in text.split():
            self.seen += 1
            parts.append({"reasoning_content" if self.seen <= 4 else "content": word + " "})
        return parts

    def finish_reason(self, reason):
        return "tool_calls" if reason == "length" else reason


async def apply_hints(value, asked):
    if not value:
        raise bad_request("hints is empty", "hints")
    asked.template["opening"] = value[0]["name"]
    asked.make_splitter = Halves


async def apply_length(value, asked):
    asked.sampling["min_tokens"] = value


class AskBody(Body, kw_only=True):
    question: str
    max_tokens: NumTokens = msgspec.field(default=4, name="length")
    temperature: Temperature | None = None
    stream: bool | None = None


class AskReply(ReplyFormat):
    def __init__(self, prepared):
        super().__init__(prepared, prepared.id)

    def whole(self, outputs):
        return {"answer": outputs[0].outputs[0].text, "by": self.model}

    def chunks(self, index, output, one, delta):
        yield {"more": delta.text}


def register_dialect(routes, client, settings):
    async def read(body, call):
        return GenerationRequest.of(body, call, prompt=body.question, field="question")

    dialect = Dialect(bodies={"/ask": AskBody}, summary="Answer", fields=FieldTable(SHARED), read=read, reply=AskReply)
    Generator(routes, client).register(routes.add, dialect)


def register(routes, client, settings):
    async def shout(call):
        return Reply({"said": call.body.text.upper(), "by": client.model_names[0], "id": call.id})

    routes.add("POST", "/shout", shout, "Say it louder", body=Shout)
    routes.add("POST", "/steer", shout, "Steer", body=Shout, control=True)
    routes.fields.add("chat", ExtraField(name="hints", type=list[dict], apply=apply_hints))
    routes.fields.add("chat", ExtraField(name="least", type=int, apply=apply_length))


@pytest.fixture(scope="module")
def case():
    with serving(modules=(SimpleNamespace(register=register),)) as one:
        yield one


def test_operation_of_a_module_is_served_with_its_body_checked(case):
    reply = case.http.post("/shout", json={"text": "hi"}, headers={"X-Request-Id": "7"})
    assert reply.json() == {"said": "HI", "by": "tiny", "id": "7"}
    assert "unknown field 'txt'; did you mean 'text'?" in post(case, "/shout", txt="hi").json()["error"]["message"]


def test_field_of_a_module_acts_on_its_routes_and_is_refused_elsewhere(case):
    asked = {"messages": HI, "max_tokens": 8, "temperature": 0, "return_token_ids": True, "hints": [{"name": "f"}]}
    reply = post(case, CHAT, **asked).json()
    ids = tokenizer().encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nf", add_special=False)
    assert reply["prompt_token_ids"] == ids and END in ids
    words = [f"{token} " for token in echo_tokens(ids, 8)]
    choice = reply["choices"][0]
    assert choice["message"]["reasoning_content"] == "".join(words[:4])
    assert choice["message"]["content"] == "".join(words[4:]) and choice["finish_reason"] == "tool_calls"
    chunks = stream(case, CHAT, **asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "".join(words[:4])
    assert "".join(delta.get("content", "") for delta in deltas) == "".join(words[4:])
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == echo_tokens(ids, 8)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    for body, message in (
        ({"hints": []}, "hints is empty"),
        ({"hints": 5}, "hints: Expected"),
        ({"least": 99}, "min_tokens"),
    ):
        assert message in post(case, CHAT, **asked | body).json()["error"]["message"]
    refused = post(case, "/v1/completions", prompt="a", tools=[{"name": "f"}])
    assert refused.status_code == 400 and "tool calls" in refused.json()["error"]["message"]


def test_dialect_of_a_module_is_a_body_a_read_and_a_reply():
    with serving(modules=(SimpleNamespace(register=register_dialect),)) as case:
        words = [f"{token} " for token in echo_tokens(tokenizer().encode("Hi", add_special=False), 6)]
        asked = {"question": "Hi", "temperature": 0, "length": 6}
        reply = post(case, "/ask", **asked, user="me")
        assert reply.json() == {"answer": "".join(words), "by": "tiny"} and reply.headers["x-ignored-fields"] == "user"
        assert "".join(chunk["more"] for chunk in stream(case, "/ask", **asked)) == "".join(words)
        assert len(post(case, "/ask", question="Hi", temperature=0).json()["answer"].split()) == 4
        assert post(case, "/ask", question="Hi", length=1 << 30).json()["error"]["param"] == "length"
        for body, message in (
            ({"length_": 5}, "unknown field 'length_'; did you mean 'length'?"),
            ({"length": 0}, "length: Expected `int` >= 1"),
            ({"question": ""}, "the prompt is empty"),
            ({"use_beam_search": True}, "use_beam_search: beam search is not served"),
        ):
            assert message in post(case, "/ask", **asked | body).json()["error"]["message"]


def test_openapi_document_has_every_operation_and_field_with_its_range(case):
    document = case.http.get("/openapi.json").json()
    assert {"/shout", CHAT, "/v1/completions", "/health", "/v1/models/{model}", "/openapi.json"} <= set(
        document["paths"]
    )
    schemas = document["components"]["schemas"]
    chat = schemas["ChatBody"]
    structured = {"response_format", "guided_json", "structured_outputs"}
    assert {"tools", "hints", "least", "messages"} | structured <= set(chat["properties"])
    assert chat["additionalProperties"] == {"type": "null"}
    other = schemas["CompletionBody"]["x-fields-without-action"]
    assert other["tools"]["effect"] == "refused" and other["tools"]["unset"] == [[], None], "not served there"
    other = chat["x-fields-without-action"]
    assert other["metadata"]["effect"] == "none" and "makes text" in other["audio"]["description"]
    assert "tools" not in other and "cache_control" in schemas["Message"]["x-fields-without-action"]
    top_p = schemas["CompletionBody"]["properties"]["top_p"]["anyOf"][0]
    assert top_p == {"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0}
    assert schemas["CompletionBody"]["properties"]["best_of"]["anyOf"][0]["maximum"] == case.config.max_n
    responses = document["paths"][CHAT]["post"]["responses"]
    assert {"200", "400", "404", "413", "415", "429", "503"} <= set(responses)
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    for name in ("CompletionBody", "ChatBody", "TokenizeBody"):
        kinds = document["components"]["schemas"][name]["properties"]["model"]["anyOf"]
        assert {"type": "string", "enum": ["tiny", ""]} in kinds, "the names that are served, not any text"


def test_model_without_a_tokenizer_takes_token_ids_and_refuses_text():
    with serving(text=False) as case:
        reply = post(case, "/v1/completions", prompt=[1, 2], max_tokens=4, temperature=0, return_token_ids=True)
        assert reply.json()["choices"][0]["token_ids"] == echo_tokens([1, 2], 4)
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/completions", {"prompt": [1, 2], "guided_regex": "a"}),
            (CHAT, {"messages": HI}),
            ("/tokenize", {"prompt": "a"}),
        ):
            reply = post(case, path, **body)
            named = "needs a tokenizer" if "guided_regex" in body else "no tokenizer"
            assert reply.status_code == 400 and named in reply.json()["error"]["message"]


def test_key_is_prompted_and_never_shown(caplog, capsys):
    caplog.set_level("INFO", logger="megatron_infer.server")
    with serving(api_key="sesame-sesame", log_requests=True) as case:
        for header in (None, "Bearer wrong", "sesame-sesame", "Basic sesame-sesame", "Bearer"):
            headers = {} if header is None else {"Authorization": header}
            reply = case.http.post("/v1/completions", json={"prompt": [1]}, headers=headers)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        reply = case.http.get("/v1/models?key=sesame-sesame", headers={"Authorization": "Bearer sesame-sesame"})
        assert reply.status_code == 200
        assert case.http.get("/health").status_code == 200
        shown = repr(case.config) + case.http.get("/health").text
    lines = caplog.text + "".join(capsys.readouterr())
    assert "/v1/models" in lines and "sesame" not in lines + shown


def test_control_routes_are_served_only_on_request(case):
    for path in ("/steer", "/pause", "/release_memory_occupation"):
        refused = post(case, path, text="a")
        assert refused.status_code == 404 and "with --control only" in refused.json()["error"]["message"]
    assert "/steer" not in case.http.get("/openapi.json").json()["paths"]
    key = {"Authorization": "Bearer k"}
    with serving(modules=(SimpleNamespace(register=register),), control=True, api_key="k") as other:
        assert post(other, "/steer", text="a").status_code == 401
        assert other.http.post("/steer", json={"text": "a"}, headers=key).json()["said"] == "A"
