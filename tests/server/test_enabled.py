"""enable_echo and its like: what a server turns off is a 400 that names the option; with it on, the call is taken."""

from __future__ import annotations

from unittest import mock

import pytest
from server_case import post, serving, tiny_engine

from megatron_infer.text.grammar import GrammarCache

OFF = {"enable_echo": False, "enable_structured_output": False, "enable_penalties": False, "enable_min_tokens": False}
PLAIN = {"model": "tiny", "prompt": "ab", "max_tokens": 2}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def case():
    with serving(**OFF, control=True) as one:
        yield one


@pytest.mark.parametrize(
    ("path", "body", "option"),
    [
        ("/v1/completions", {**PLAIN, "echo": True, "logprobs": 1}, "enable_echo"),
        ("/v1/completions", {**PLAIN, "prompt_logprobs": 1}, "enable_echo"),
        ("/v1/completions", {**PLAIN, "repetition_penalty": 1.2}, "enable_penalties"),
        ("/v1/completions", {**PLAIN, "frequency_penalty": 0.5}, "enable_penalties"),
        ("/v1/chat/completions", {**CHAT, "presence_penalty": -0.5}, "enable_penalties"),
        ("/v1/chat/completions", {**CHAT, "min_tokens": 1}, "enable_min_tokens"),
        ("/v1/chat/completions", {**CHAT, "response_format": SCHEMA}, "enable_structured_output"),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}, "enable_structured_output"),
        ("/generate", {"text": "ab", "sampling_params": {"regex": "a+"}}, "enable_structured_output"),
        ("/generate", {"text": "ab", "sampling_params": {"min_new_tokens": 1}}, "enable_min_tokens"),
        ("/generate", {"text": "ab", "return_logprob": True, "logprob_start_len": 0}, "enable_echo"),
        ("/generate/", {"prompts": ["ab"], "structured_outputs_regex": "a+"}, "enable_structured_output"),
        ("/generate/", {"prompts": ["ab"], "repetition_penalty": 1.2}, "enable_penalties"),
        ("/chat/", {"messages": [CHAT["messages"]], "generation_kwargs": {"min_tokens": 1}}, "enable_min_tokens"),
        ("/get_sequence_logprobs/", {"sequences": [[1, 2]], "prompt_lengths": [1], "top_logprobs": 1}, "enable_echo"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"prompt_logprobs": 0}}, "enable_echo"),
        ("/v1/score", {"model": "tiny", "query": "ab", "items": ["c"], "label_token_ids": [1]}, "enable_echo"),
        ("/v1/responses", {"model": "tiny", "input": "hi", "text": {"format": FORMAT}}, "enable_structured_output"),
    ],
)
def test_what_is_turned_off_is_refused_by_the_name_of_its_option(case, path, body, option):
    with mock.patch.object(GrammarCache, "compile", side_effect=AssertionError("it was compiled")):
        reply = post(case, path, **body)
    assert reply.status_code == 400, reply.text
    assert f"({option} is false)" in reply.json()["error"]["message"]


def test_other_calls_are_taken(case):
    for body in (PLAIN, {**PLAIN, "echo": True}, {**PLAIN, "logprobs": 1}, {**PLAIN, "presence_penalty": 0.0}):
        assert post(case, "/v1/completions", **body).status_code == 200


def test_a_server_whose_requests_need_metadata_refuses_calls_over_http_by_its_label():
    with serving(tiny_engine(request_metadata_types=[("target", "int64", True)])) as one:
        for path, body in (("/v1/completions", PLAIN), ("/v1/chat/completions", CHAT | {"metadata": {"target": "3"}})):
            reply = post(one, path, **body)
            assert reply.status_code == 400, reply.text
            assert "metadata lacks 'target', which request_metadata_types names" in reply.json()["error"]["message"]
        assert one.http.get("/health").status_code == 200
