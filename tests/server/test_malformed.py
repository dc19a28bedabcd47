"""Malformed calls of every dialect: each gets a 4xx with the reason while another client's stream flows."""

from __future__ import annotations

import json
import threading

import pytest
from control_case import serving_with_control, state_of
from echo import EchoEngine
from server_case import stream

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, EMBEDDINGS, SCORE = "/v1/responses", "/v1/embeddings", "/v1/score"
VLLM, LOGPROBS = "/inference/v1/generate", "/get_sequence_logprobs/"
HI = [{"role": "user", "content": "Hi"}]
INVALID = "invalid_request_error"
F = {"type": "function", "function": {"name": "f"}}


def turn(**fields):
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


def last_turn(content):
    return {"messages": [*HI, {"role": "assistant", "content": content}]}


MEDIA = (
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "file", "file": {"file_id": "f"}},
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OPENAI = [
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
    (COMPLETION, {"prompt": [1000]}, "token id 1000 is outside the vocabulary (0 to 999)"),
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
    *((CHAT, turn(content=[part]), "there are no images, audio or video here") for part in MEDIA),
    (CHAT, turn(content=[{"text": "a"}]), "missing required field `type`"),
    (CHAT, turn(content=[{"type": "text"}]), "missing required field `text`"),
    (CHAT, turn(mood="good"), "unknown field `mood`"),
    (CHAT, turn(generation_token_ids=[1]), "only assistant turns were drawn"),
    (CHAT, turn(role="assistant", prompt_token_ids=[1]), "comes with generation_token_ids"),
    (CHAT, turn(role="assistant", tool_calls=[{"id": "1"}]), "a call has a function"),
    (CHAT, {**turn(role="assistant", content=""), "continue_final_message": True}, "the last message is empty"),
    (CHAT, {**turn(role="assistant", tool_calls=[CALL]), "continue_final_message": True}, "has tool_calls"),
    (CHAT, {"messages": HI, "return_raw_text": True, "stream": True}, "return_raw_text"),
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


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


STRUCTURED = [
    # (fields of chats and of completions, param or None, part of the message)
    ({"response_format": schema_format({"type": "thing"})}, "response_format", "Invalid type: thing"),
    ({"response_format": schema_format({"uniqueItems": True, "type": "array"})}, "response_format", "uniqueItems"),
    ({"response_format": schema_format(nested(12))}, "response_format", "deeper than 8 levels"),
    ({"response_format": schema_format({"description": "x" * 5000})}, "response_format", "the limit is 4,096"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing"),
    ({"response_format": {"type": "text", "regex": "a"}}, "response_format", "regex is given"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, None, "name"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_regex": "a" * 5000}, "guided_regex", "the limit is 4,096"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "nothing can begin with it"),
    ({"guided_choice": []}, "guided_choice", "length"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, None, "give one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, None, "structural_tag"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "llguidance"),
]
CONTROL = [
    ("/pause?mode=kep", None, "abort, wait, keep"),
    ("/pause?mod=keep", None, "did you mean 'mode'"),
    ("/pause?mode=keep&mode=abort", None, "mode is given 2 times"),
    ("/pause?clear_cache=maybe", None, "clear_cache is 'maybe'"),
    ("/sleep?level=3", None, "level is '3'; one of 0, 1, 2"),
    ("/sleep?tags=cuda_graph", None, "any of weights, kv_cache"),
    ("/sleep?level=0&tags=weights", None, "level 0 stops the scheduling alone"),
    ("/wake_up?tags=cuda", None, "any of weights, kv_cache"),
    ("/resume?now=1", None, "unknown parameter 'now'"),
    ("/pause_generation", {"mode": "keep"}, "abort, in_place, retract"),
    ("/pause_generation", {"mod": "abort"}, "did you mean 'mode'"),
    ("/release_memory_occupation", {"tags": ["kv"]}, "any of weights, kv_cache, cuda_graph"),
    ("/release_memory_occupation", {"tags": []}, "tags is empty"),
    ("/abort_request", {}, "rid or abort_all"),
    ("/weights_checker", {"action": "look"}, "checksum, snapshot, compare, reset"),
    ("/weight_checker", {"action": "snapshot"}, "checksum, compare, reset"),
    ("/weight_checker", {"action": "compare"}, "baseline: compare needs"),
    ("/begin_weight_update", {"selector": "draft"}, "there is one model"),
    ("/weights_checker", {"action": "compare"}, "there is no snapshot"),
    ("/update_weight_version", {}, "new_version must be given"),
    ("/update_weight_version", {"weight_version": ""}, "a text of 1 to 256 characters"),
    ("/update_weight_version", {"new_version": "v" * 300}, "a text of 1 to 256 characters"),
    ("/update_weight_version", {"weight_version": -1}, "a whole number"),
    ("/generate", {"text": "a", "input_ids": [1]}, "give text or input_ids"),
    ("/generate", {"input_ids": [1], "sampling_params": {"max_tokens": 4}}, "sampling_params"),
    ("/generate", {"input_ids": [1], "sampling_params": {"json_schema": "{"}}, "json_schema: "),
    ("/generate", {"input_ids": [1], "sampling_params": {"regex": "("}}, "regex: "),
    ("/generate", {"input_ids": [1], "sampling_params": {"ebnf": "root ::= other"}}, "ebnf: "),
    ("/generate", {"input_ids": [1], "sampling_params": {"ebnf": 'root ::= "a"', "regex": "a"}}, "give one"),
    ("/generate", {"input_ids": [1], "priority": 1}, "priority"),
    ("/generate", {"input_ids": [1], "top_logprobs_num": 2}, "return_logprob"),
    ("/generate", {"input_ids": [10**6]}, "outside the vocabulary"),
    (VLLM, {"token_ids": []}, "token_ids"),
    (VLLM, {"token_ids": [1], "sampling_params": {"max_new_tokens": 4}}, "max_new_tokens"),
    (VLLM, {"token_ids": [1], "sampling_params": {"structured": {"regex": "a"}}}, "structured"),
    (VLLM, {"token_ids": [1], "sampling_params": {"stop": ["a"] * 99}}, "max_stop"),
    (VLLM, {"token_ids": [1], "sampling_params": {"priority": 1}}, "priority"),
    (VLLM, {"token_ids": [1], "sampling_params": {"structured_outputs": 5}}, "structured_outputs"),
    (VLLM, {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "("}}}, "structured_outputs: "),
    (VLLM, {"token_ids": [1], "sampling_params": {"structured_outputs": {"regx": "a"}}}, "structured_outputs: "),
    (VLLM, {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "exactly"),
    (VLLM, {"token_ids": [1], "sampling_params": {"stop": 5}}, "sampling_params.stop"),
    (VLLM, {"token_ids": [1], "sampling_params": {"max_tokens": "4"}}, "max_tokens"),
    (VLLM, {"token_ids": [1], "model": "other"}, "is not served here"),
    ("/generate/", {"prompts": []}, "prompts"),
    ("/generate/", {"prompts": ["a", [5]]}, "prompts"),
    ("/generate/", {"prompts": ["a"], "images": [["AAAA"]]}, "images"),
    ("/generate/", {"prompts": ["a"], "generation_kwargs": {"seeed": 1}}, "generation_kwargs"),
    ("/generate/", {"prompts": ["a"], "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ("/chat/", {"messages": [[]]}, "messages"),
    (LOGPROBS, {"sequences": [[5]], "prompt_lengths": []}, "prompt_lengths"),
    (LOGPROBS, {"sequences": [[5]], "prompt_lengths": [2]}, "prompt_lengths"),
    (LOGPROBS, {"sequences": [[5]], "prompt_lengths": [1], "top_logprobs": 50}, "top_logprobs"),
    (LOGPROBS, {"sequences": [[5]], "prompt_lengths": [1], "top_logprobs": 1, "temperature": 2.0}, "temperature"),
    ("/generate", {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 2}, "start within it"),
    ("/generate", {"input_ids": [1], "image_data": ["AAAA"]}, "image_data: there are no images"),
]
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
MESSAGES = [
    # (changes of a body of /v1/messages, part of the message, and where it matters the param)
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "length >= 1"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "there are no images"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0]: a block has no text"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "wizard"),
    ({"tools": [{"type": 5, "name": "bash"}]}, "tools[0].type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format: json"),
    ({"stop_sequences": ["a"] * 100}, "stop_sequences has 100 entries"),
    ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"max_token": 5}, "did you mean 'max_tokens'"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: nothing is called here"),
    ({"tools": [SEARCH, {"name": "f"}], "tool_choice": {**SEARCH, "type": "tool"}}, "tool_choice", "tool_choice"),
    ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice", "tool_choice"),
]
LAST_TURNS = [
    # (content of a last turn of the assistant, part of the message)
    ("", "messages[1]: the answer goes on with the last turn"),
    ([], "that turn has no text"),
    ([{"type": "thinking", "thinking": "Hm"}], "that turn has no text"),
    ([{"type": "text", "text": "a"}, {"type": "tool_use", "id": "1", "name": "f"}], "without its tool_result"),
]
INPUT_IMAGE = {"type": "input_image", "image_url": "x"}
OTHERS = [
    (RESPONSES, {}, "input: it must be given"),
    (RESPONSES, {"input": "Hi", "store": True}, "store: this server stores nothing"),
    (RESPONSES, {"input": "Hi", "previous_response_id": "resp_1"}, "send the conversation as input"),
    (RESPONSES, {"input": "Hi", "tools": [{"type": 5}]}, "tools[0].type"),
    (RESPONSES, {"input": "Hi", "text": {"format": {"type": "grammar", "grammar": "x"}}}, "text.format: grammar: "),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: Invalid enum"),
    (RESPONSES, {"input": [{"role": "user", "content": [INPUT_IMAGE]}]}, "there are no images"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "content is a text, or"),
    (RESPONSES, {"input": [{"role": "wizard", "content": "Hi"}]}, "wizard"),
    (RESPONSES, {"input": [{"role": "user"}]}, "content is a text, or"),
    (RESPONSES, {"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"input": "Hi", "max_tokens": 5}, "did you mean"),
    (RESPONSES, {"input": "Hi", "text": {"format": {"type": "xml"}}}, "xml"),
    (RESPONSES, {"input": "Hi", "tools": [SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    (EMBEDDINGS, {}, "input: it must be given", "input"),
    (EMBEDDINGS, {"input": ""}, "length >= 1", "input"),
    (EMBEDDINGS, {"input": []}, "length >= 1", "input"),
    (EMBEDDINGS, {"input": ["a", 5]}, "input mixes texts and token ids", "input"),
    (EMBEDDINGS, {"input": [[1], 5]}, "input mixes texts and token ids", "input"),
    (EMBEDDINGS, {"input": [5, [1]]}, "input mixes texts and token ids", "input"),
    (EMBEDDINGS, {"input": [4000]}, "outside the vocabulary", "input"),
    (EMBEDDINGS, {"input": "a" * 3000}, "maximum context length is 2,048", "input"),
    (EMBEDDINGS, {"input": "a", "dimensions": 10_000}, "dimensions is 10000, the model", "dimensions"),
    (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "Invalid enum value 'int8'", "encoding_format"),
    (EMBEDDINGS, {"input": "a", "pooling": "cls"}, "Invalid enum value 'cls'", "pooling"),
    (EMBEDDINGS, {"input": [1, 2], "add_special_tokens": True}, "goes with texts", "add_special_tokens"),
    (EMBEDDINGS, {"input": "a", "truncate": True}, "unknown field 'truncate'", "truncate"),
    (SCORE, {}, "give query, items and label_token_ids"),
    (SCORE, {"label_token_ids": [1]}, "goes with query and items"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts, text_2 has 3"),
    (SCORE, {"query": "a", "items": ["b"] * 7, "label_token_ids": [1, 2]}, "7 items with 2 labels are more"),
    (SCORE, {"query": "a", "items": ["b"], "label_token_ids": [100000]}, "outside the vocabulary"),
]  # fmt: skip
BEGUN = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
WRONG = [
    # (path, body, part of the message, and where it matters the param)
    *OPENAI,
    *((CHAT, {"messages": HI, **fields}, text, param) for fields, param, text in STRUCTURED),
    *((COMPLETION, {"prompt": "x", **fields}, text, param) for fields, param, text in STRUCTURED),
    *CONTROL,
    *OTHERS,
    *(("/v1/messages", {"messages": HI, "max_tokens": 1, **changes}, *rest) for changes, *rest in MESSAGES),
    *(("/v1/messages", {**last_turn(content), "max_tokens": 1}, text) for content, text in LAST_TURNS),
    *(("/v1/messages/count_tokens", last_turn(content), text) for content, text in LAST_TURNS),
    ("/v1/messages", {**last_turn("{"), "max_tokens": 9, **BEGUN}, "the last turn has begun one"),
]


@pytest.fixture(scope="module")
def case():
    limits = {"max_prompts": 8, "max_n": 8, "max_logprobs": 5, "max_stop": 4, "max_body_bytes": 65_536}
    limits |= {"max_schema_bytes": 4096, "max_schema_depth": 8}
    with serving_with_control(EchoEngine(num_blocks=128, step_s=0.002), **limits) as one:
        yield one


@pytest.mark.security
def test_malformed_calls_get_the_reason_while_a_stream_flows(case):
    assert len(WRONG) >= 240
    flowing, chunks = threading.Event(), []

    def read():
        while not flowing.is_set():
            chunks.append(stream(case, COMPLETION, prompt=[1, 2, 3], max_tokens=300, temperature=0))

    reader = threading.Thread(target=read)
    reader.start()
    failures = []
    try:
        for path, body, message, *param in WRONG:
            data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = case.http.post(path, content=data, headers={"Content-Type": "application/json"})
            shown = f"{path} {data[:80]!r}: {reply.status_code} {reply.text[:300]}"
            if not 400 <= reply.status_code < 500 or reply.status_code == 409:
                failures.append(shown)
                continue
            error = reply.json()["error"]
            if message not in error["message"] or not {"message", "type", "param", "code"} <= set(error):
                failures.append(f"{shown}\n   expected: {message}")
            if param not in ([], [None], [error["param"]]):
                failures.append(f"{shown}\n   expected param: {param[0]}")
            if reply.json().get("type", "error") != "error" or (reply.status_code == 400 and error["type"] != INVALID):
                failures.append(f"{shown}\n   its type is {error['type']}")
    finally:
        flowing.set()
        reader.join(30)
    assert not failures, "\n".join(failures)
    texts = {"".join(c["choices"][0]["text"] for c in one) for one in chunks}
    assert len(texts) == 1 and len(next(iter(texts)).split()) == 300
    assert case.http.get("/health").json()["status"] == "ok" and state_of(case) == "SERVING"


@pytest.mark.security
def test_wrong_content_types_methods_and_headers_are_refused(case):
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {} if kind is None else {"Content-Type": kind}
        reply = case.http.post(COMPLETION, content=b'{"prompt": "a"}', headers=headers)
        assert reply.status_code == 415 and "application/json" in reply.json()["error"]["message"]
    reply = case.http.get(COMPLETION)
    assert reply.status_code == 405 and reply.headers["allow"] == "POST"
    assert case.http.post("/health", json={}).headers["allow"] == "GET, HEAD"
    reply = case.http.get("/../../etc/passwd")
    assert reply.status_code == 404
    reply = case.http.get("/version", headers={"X-Request-Id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    reply = case.http.get("/version", headers={"X-Request-Id": "a b" * 100})
    assert len(reply.headers["x-request-id"]) == 32
    assert "access-control-allow-origin" not in case.http.get("/version", headers={"Origin": "http://evil"}).headers
