"""Over sixty malformed calls: each gets a 4xx with the reason while another client's stream flows."""

from __future__ import annotations

import json
import threading

import pytest
from server_case import serving, stream

from megatron_infer.testing.echo import EchoEngine

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
F = {"type": "function", "function": {"name": "f"}}


def turn(**fields):
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


WRONG = [
    # (path, body, part of the message)
    (COMPLETION, {}, "prompt: it must be given"),
    (COMPLETION, {"prompt": None}, "prompt: Expected"),
    (COMPLETION, {"prompt": ""}, "length >= 1"),
    (COMPLETION, {"prompt": []}, "length >= 1"),
    (COMPLETION, {"prompt": [""]}, "length >= 1"),
    (COMPLETION, {"prompt": [[]]}, "length >= 1"),
    (COMPLETION, {"prompt": 5}, "Expected"),
    (COMPLETION, {"prompt": {"a": 1}}, "Expected"),
    (COMPLETION, {"prompt": ["a", [1]]}, "not a mixture"),
    (COMPLETION, {"prompt": ["a", 1]}, "not a mixture"),
    (COMPLETION, {"prompt": [-1]}, ">= 0"),
    (COMPLETION, {"prompt": [1.5]}, "Expected"),
    (COMPLETION, {"prompt": [True]}, "Expected"),
    (COMPLETION, {"prompt": [5000]}, "token id 5000 is outside the vocabulary (0 to 999)"),
    (COMPLETION, {"prompt": [2**40]}, "<= 2147483647"),
    (COMPLETION, {"prompt": ["a"] * 9}, "holds 9 prompts, the limit is 8 (max_prompts)"),
    (COMPLETION, {"prompt": [1] * 3000}, "This model's maximum context length is 2,048 tokens"),
    (COMPLETION, {"prompt": "a", "max_tokens": 4000}, "4,001 tokens (1 in the prompt, 4,000 to generate)"),
    (COMPLETION, {"prompt": "a", "max_tokens": -1}, "max_tokens: Expected"),
    (COMPLETION, {"prompt": "a", "max_tokens": 0}, "echo: true"),
    (COMPLETION, {"prompt": "a", "max_tokens": "5"}, "max_tokens: Expected `int`, got `str`"),
    (COMPLETION, {"prompt": "a", "max_tokens": 2.5}, "max_tokens: Expected"),
    (COMPLETION, {"prompt": "a", "max_tokens": True}, "max_tokens: Expected"),
    (COMPLETION, {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
    (COMPLETION, {"prompt": "a", "n": 0}, "n: Expected"),
    (COMPLETION, {"prompt": "a", "n": 9}, "n is 9, the limit here is 8 (max_n)"),
    (COMPLETION, {"prompt": "a", "n": 3, "best_of": 2}, "best_of is 2, less than n"),
    (COMPLETION, {"prompt": "a", "n": 1, "best_of": 2, "stream": True}, "best_of needs whole samples"),
    (COMPLETION, {"prompt": "a", "best_of": 20}, "best_of is 20, the limit here is 8"),
    (COMPLETION, {"prompt": "a", "temperature": -1}, "temperature: Expected"),
    (COMPLETION, {"prompt": "a", "temperature": "hot"}, "temperature: Expected"),
    (COMPLETION, {"prompt": "a", "top_p": 0}, "top_p: Expected"),
    (COMPLETION, {"prompt": "a", "top_p": 1.5}, "top_p: Expected"),
    (COMPLETION, {"prompt": "a", "top_k": -2}, "top_k: Expected"),
    (COMPLETION, {"prompt": "a", "min_p": 2}, "min_p: Expected"),
    (COMPLETION, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty: Expected"),
    (COMPLETION, {"prompt": "a", "presence_penalty": 3}, "presence_penalty: Expected"),
    (COMPLETION, {"prompt": "a", "frequency_penalty": -3}, "frequency_penalty: Expected"),
    (COMPLETION, {"prompt": "a", "logprobs": 6}, "logprobs is 6, the limit here is 5 (max_logprobs)"),
    (COMPLETION, {"prompt": "a", "logprobs": True}, "logprobs: Expected"),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": 6}, "prompt_logprobs is 6"),
    (COMPLETION, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs comes with whole replies"),
    (COMPLETION, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo with logprobs"),
    (COMPLETION, {"prompt": "a", "stop": ""}, "length >= 1"),
    (COMPLETION, {"prompt": "a", "stop": [1]}, "Expected `str`"),
    (COMPLETION, {"prompt": "a", "stop": ["x"] * 5}, "stop has 5 entries, the limit is 4 (max_stop)"),
    (COMPLETION, {"prompt": "a", "stop": "x" * 2000}, "2,000 characters, the limit is 1,024"),
    (COMPLETION, {"prompt": "a", "stop_token_ids": [-1]}, "Expected"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"5": 1000}}, "logit_bias"),
    (COMPLETION, {"prompt": "a", "logit_bias": [5]}, "logit_bias: Expected"),
    (COMPLETION, {"prompt": "a", "allowed_token_ids": []}, "length >= 1"),
    (COMPLETION, {"prompt": "a", "min_tokens": 20}, "min_tokens is 20, more than max_tokens, which is 16"),
    (COMPLETION, {"prompt": "a", "seed": 2**64}, "seed"),
    (COMPLETION, {"prompt": "a", "seed": "x"}, "seed: Expected"),
    (COMPLETION, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETION, {"prompt": "a", "priority": 1.5}, "priority"),
    (COMPLETION, {"prompt": "a", "priority": 2**31}, "priority"),
    (COMPLETION, {"prompt": "a", "cache_salt": ""}, "cache_salt"),
    (COMPLETION, {"prompt": "a", "cache_salt": "x" * 300}, "cache_salt"),
    (COMPLETION, {"prompt": "a", "stream": "yes"}, "stream: Expected `bool`"),
    (COMPLETION, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options is given without stream"),
    (COMPLETION, {"prompt": "a", "stream": True, "stream_options": {"usage": True}}, "unknown field `usage`"),
    (COMPLETION, {"prompt": "a", "maxtokens": 5}, "unknown field 'maxtokens'; did you mean 'max_tokens'?"),
    (COMPLETION, {"prompt": "a", "use_beam_search": True}, "use best_of"),
    (COMPLETION, {"prompt": "a", "model": "gpt"}, "the model 'gpt' is not served here"),
    (COMPLETION, {"prompt": "a", "model": 5}, "model: Expected"),
    (COMPLETION, [], "Expected `object`"),
    (COMPLETION, "text", "Expected `object`"),
    (COMPLETION, b"", "not valid JSON"),
    (COMPLETION, b"{", "not valid JSON"),
    (COMPLETION, b'{"prompt": "\xff"}', "not valid JSON"),
    (COMPLETION, b'{"prompt": NaN}', "not valid JSON"),
    (COMPLETION, b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    (COMPLETION, b'{"prompt": ' + b"[" * 50_000, "prompt"),
    (CHAT, b'{"messages": [], "chat_template_kwargs": {"a": ' + b"[" * 50_000, ""),
    (COMPLETION, b'{"prompt": "' + b"x" * 70_000 + b'"}', "the limit is 65,536 (max_body_bytes)"),
    (COMPLETION, b'{"prompt": "' + b"x" * 3_000_000 + b'"}', "the limit is 65,536 (max_body_bytes)"),
    (CHAT, {}, "messages: it must be given"),
    (CHAT, {"messages": []}, "length >= 1"),
    (CHAT, {"messages": "Hi"}, "messages: Expected `array`"),
    (CHAT, {"messages": ["Hi"]}, "Expected `object`"),
    (CHAT, {"messages": [{"content": "Hi"}]}, "missing required field `role`"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0]: content must be given"),
    (CHAT, turn(role="wizard"), "Invalid enum value 'wizard'"),
    (CHAT, turn(content=5), "Expected"),
    (CHAT, turn(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "image_url"),
    (CHAT, turn(content=[{"text": "a"}]), "missing required field `type`"),
    (CHAT, turn(content=[{"type": "text"}]), "missing required field `text`"),
    (CHAT, turn(mood="good"), "unknown field `mood`"),
    (CHAT, turn(generation_token_ids=[1]), "only assistant turns were drawn"),
    (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens: Expected"),
    (CHAT, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}, "give one"),
    (CHAT, {"messages": HI, "logprobs": 1}, "logprobs: Expected `bool`"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs is given without logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs is 21, the limit here is 5"),
    (CHAT, {"messages": HI, "tools": [], "tool_choice": "required"}, "tool_choice goes with tools"),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "missing required field `function`"),
    (CHAT, {"messages": HI, "tools": [{"type": 5}]}, "tools[0].type"),
    (CHAT, {"messages": HI, "tools": [F, F]}, "stands there twice"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice goes with tools"),
    (CHAT, {"messages": HI, "tools": [F], "tool_choice": "any"}, "Invalid enum value 'any'"),
    (CHAT, {"messages": HI, "tools": [F], "tool_choice": {"type": "function"}}, "missing required field `function`"),
    (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, "xml"),
    (CHAT, {"messages": HI, "functions": [{"name": "f"}]}, "use tools"),
    (CHAT, {"messages": HI, "modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "has a field of its own"),
    (CHAT, {"messages": HI, "chat_template_kwargs": []}, "chat_template_kwargs: Expected"),
    (CHAT, {"messages": HI, "continue_final_message": True, "add_generation_prompt": True}, "prompt: false"),
    (CHAT, {"messages": HI, "prompt": "Hi"}, "unknown field 'prompt'"),
    ("/tokenize", {}, "give prompt (a text) or messages"),
    ("/tokenize", {"prompt": "a", "messages": HI}, "and not both"),
    ("/tokenize", {"messages": HI, "add_special_tokens": True}, "goes with prompt"),
    ("/detokenize", {"tokens": ["a"]}, "Expected `int`"),
    ("/detokenize", {"tokens": [-5]}, ">= 0"),
    ("/v1/completion", {"prompt": "a"}, "there is no POST /v1/completion;"),
    ("/health", {}, "POST /health is not served"),
]  # fmt: skip


@pytest.fixture(scope="module")
def case():
    limits = {"max_prompts": 8, "max_n": 8, "max_logprobs": 5, "max_stop": 4, "max_body_bytes": 65_536}
    with serving(EchoEngine(num_blocks=128, step_s=0.002), **limits) as one:
        yield one


@pytest.mark.security
def test_malformed_calls_get_the_reason_while_a_stream_flows(case):
    assert len(WRONG) >= 60
    flowing, chunks = threading.Event(), []

    def read():
        while not flowing.is_set():
            chunks.append(stream(case, COMPLETION, prompt=[1, 2, 3], max_tokens=300, temperature=0))

    reader = threading.Thread(target=read)
    reader.start()
    failures = []
    try:
        for path, body, message in WRONG:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = case.http.post(path, content=data, headers={"Content-Type": "application/json"})
            shown = f"{path} {data[:80]!r}: {reply.status_code} {reply.text[:300]}"
            if not 400 <= reply.status_code < 500:
                failures.append(shown)
                continue
            error = reply.json()["error"]
            if message not in error["message"] or set(error) != {"message", "type", "param", "code"}:
                failures.append(f"{shown}\n   expected: {message}")
    finally:
        flowing.set()
        reader.join(30)
    assert not failures, "\n".join(failures)
    texts = {"".join(c["choices"][0]["text"] for c in one) for one in chunks}
    assert len(texts) == 1 and len(next(iter(texts)).split()) == 300
    assert case.http.get("/health").json()["status"] == "ok"


@pytest.mark.security
def test_wrong_content_types_methods_and_headers_are_refused(case):
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {} if kind is None else {"Content-Type": kind}
        reply = case.http.post(COMPLETION, content=b'{"prompt": "a"}', headers=headers)
        assert reply.status_code == 415 and "application/json" in reply.json()["error"]["message"]
    reply = case.http.get(COMPLETION)
    assert reply.status_code == 405 and reply.headers["allow"] == "POST"
    reply = case.http.get("/../../etc/passwd")
    assert reply.status_code == 404
    reply = case.http.get("/version", headers={"X-Request-Id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    reply = case.http.get("/version", headers={"X-Request-Id": "a b" * 100})
    assert len(reply.headers["x-request-id"]) == 32
    assert "access-control-allow-origin" not in case.http.get("/version", headers={"Origin": "http://evil"}).headers
