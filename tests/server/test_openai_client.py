"""The official client against a real, tiny engine gets what the engine generates offline."""

from __future__ import annotations

import math

import httpx
import openai
import pytest
from server_case import END, TEMPLATE, client_of, serving, tiny_engine, tokenizer, wait_for

from megatron_infer.config.sampling_params import SamplingParams

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(prefix="lru")


@pytest.fixture(scope="module")
def offline(engine):
    """Outputs generated before the engine serves."""
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    drawn = SamplingParams(max_tokens=12, seed=5, n=2, ignore_eos=True)
    chat_ids = tokenizer().encode(tokenizer().apply_chat_template(CHAT, variables={"opening": ""}), add_special=False)
    text_ids = tokenizer().encode(TEXT)
    outputs = engine.generate([text_ids, chat_ids], greedy) + engine.generate([text_ids], drawn)
    engine.reset_prefix_cache()
    return outputs


@pytest.fixture(scope="module")
def case(offline, engine):
    with serving(engine, api_key="a key", show_cached_tokens=True, served_model_name=("tiny", "alias")) as one:
        yield one


GREEDY = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_drafts_asked_of_an_engine_without_them_are_a_400(client, case, offline):
    for route, body in (("completions", {"prompt": TEXT}), ("chat/completions", {"messages": CHAT})):
        asked = {"model": "tiny", "speculate": True, "max_tokens": 3, **body}
        for streams in (False, True):
            url, key = f"{case.url}/v1/{route}", {"Authorization": "Bearer a key"}
            reply = httpx.post(url, json=asked | {"stream": streams}, headers=key)
            assert reply.status_code == 400 and "this engine drafts no tokens" in reply.json()["error"]["message"]
    one_by_one = {**GREEDY, "extra_body": {"ignore_eos": True, "speculate": False}}
    assert client.completions.create(prompt=TEXT, **one_by_one).choices[0].text == offline[0].outputs[0].text


def test_completion_is_the_engines_text_whole_and_streamed(client, offline):
    wanted = offline[0].outputs[0]
    whole = client.completions.create(prompt=TEXT, **GREEDY)
    assert whole.choices[0].text == wanted.text and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(TEXT), 12)
    chunks = list(client.completions.create(prompt=TEXT, stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == wanted.text
    assert chunks[-1].usage.total_tokens == len(TEXT) + 12 and not chunks[-1].choices
    assert chunks[-2].choices[0].finish_reason == "length"


def test_chat_is_the_templates_prompt_and_its_logprobs_are_the_engines(client, offline):
    wanted = offline[1].outputs[0]
    reply = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **GREEDY)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", wanted.text)
    assert len(choice.logprobs.content) == 12
    for shown, entry in zip(choice.logprobs.content, wanted.logprobs, strict=True):
        assert shown.logprob == pytest.approx(next(iter(entry.values())).logprob, abs=1e-5)
        assert [top.logprob for top in shown.top_logprobs] == sorted(
            (top.logprob for top in shown.top_logprobs), reverse=True
        )
        assert shown.top_logprobs[0].logprob == pytest.approx(shown.logprob)  # greedy: the likeliest token
    joined = b"".join(bytes(shown.bytes) for shown in choice.logprobs.content)
    assert joined.decode("utf-8", "replace") == wanted.text
    chunks = list(client.chat.completions.create(messages=CHAT, stream=True, logprobs=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    logprobs = [
        one.logprob for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content
    ]
    assert logprobs == pytest.approx([next(iter(entry.values())).logprob for entry in wanted.logprobs], abs=1e-5)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_seeded_samples_are_the_engines_and_several_prompts_keep_their_order(client, offline):
    extra = {"extra_body": {"ignore_eos": True}}
    reply = client.completions.create(model="alias", prompt=TEXT, n=2, seed=5, max_tokens=12, **extra)
    assert [choice.text for choice in reply.choices] == [one.text for one in offline[2].outputs]
    prompts = [tokenizer().encode(text) for text in (TEXT, "Other words", TEXT)]
    reply = client.completions.create(prompt=prompts, n=2, **GREEDY)
    texts = [choice.text for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert texts[0] == texts[1] == texts[4] == texts[5] == offline[0].outputs[0].text != texts[2] == texts[3]
    chunks = list(client.completions.create(prompt=prompts, n=2, stream=True, **GREEDY))
    for index, text in enumerate(texts):
        assert "".join(c.choices[0].text for c in chunks if c.choices[0].index == index) == text


def test_echo_with_logprobs_scores_the_prompt_as_evaluation_harnesses_ask(client, offline):
    wanted = offline[0]
    ids = tokenizer().encode(TEXT)
    asked = {"model": "tiny", "prompt": [ids, ids[:5]], "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    for max_tokens in (0, 1):
        reply = client.completions.create(max_tokens=max_tokens, **asked)
        found = reply.choices[0].logprobs
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(ids) + max_tokens
        assert found.token_logprobs[0] is None and "".join(found.tokens[: len(ids)]) == TEXT
        expected = [entry[token].logprob for token, entry in zip(ids[1:], wanted.prompt_logprobs[1:], strict=True)]
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-5)
        likeliest = [max(entry.values(), key=lambda one: one.logprob) for entry in wanted.prompt_logprobs[1:]]
        assert [max(top.values()) for top in found.top_logprobs[1 : len(ids)]] == pytest.approx(
            [one.logprob for one in likeliest], abs=1e-5
        )
        assert found.text_offset == [i if i < len(ids) else len(ids) for i in range(len(ids) + max_tokens)]
        assert reply.choices[0].text.startswith(TEXT) and reply.usage.completion_tokens == 2 * max_tokens
        assert reply.choices[1].logprobs.token_logprobs[1:5] == pytest.approx(expected[:4], abs=1e-5)


def test_best_of_gives_the_likeliest_samples(client):
    extra = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 8, "seed": 3, **extra}
    every = client.completions.create(n=5, logprobs=0, **asked).choices
    ranked = sorted(every, key=lambda choice: -sum(choice.generation_log_probs))
    best = client.completions.create(n=2, best_of=5, **asked)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage.completion_tokens == 40


def test_reply_has_what_a_trainer_needs_and_turns_keep_their_sampled_tokens(client, case):
    extra = {"return_token_ids": True, "ignore_eos": True}
    first = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=10, seed=2, logprobs=True, extra_body=extra
    )
    message = first.choices[0].message.model_dump()
    drawn = message["generation_token_ids"]
    assert len(drawn) == 10 == len(message["generation_log_probs"])
    assert message["version_spans"][0]["policy_version"] == first.model_dump()["choices"][0]["weight_version"] == 0
    assert message["prompt_token_ids"] == first.model_dump()["prompt_token_ids"]
    turns = [*CHAT, {k: v for k, v in message.items() if v is not None}, {"role": "user", "content": "Another."}]
    second = client.chat.completions.create(model="tiny", messages=turns, max_tokens=1, extra_body=extra)
    ids = second.choices[0].message.model_dump()["prompt_token_ids"]
    assert ids[: len(message["prompt_token_ids"]) + 10] == message["prompt_token_ids"] + drawn
    assert ids[len(message["prompt_token_ids"]) + 10] == END
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    again = client.chat.completions.create(
        model="tiny", messages=turns, max_tokens=1, extra_body=extra | {"prevent_retokenization": False}
    )
    other = again.choices[0].message.model_dump()["prompt_token_ids"]
    assert other == tokenizer().encode(
        tokenizer().apply_chat_template([{"role": t["role"], "content": t["content"]} for t in turns]),
        add_special=False,
    )


def test_stop_texts_bias_and_penalties_act(client, offline):
    text = offline[0].outputs[0].text
    stop = text[5:7]
    reply = client.completions.create(prompt=TEXT, stop=[stop], **GREEDY)
    assert reply.choices[0].text == text[: text.find(stop)] and reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].model_dump()["stop_reason"] == stop
    reply = client.completions.create(model="tiny", prompt=TEXT, max_tokens=5, logit_bias={"65": 100}, temperature=0)
    assert reply.choices[0].text == "AAAAA"


def test_models_health_version_and_tokens(client, case):
    models = client.models.list()
    assert [model.id for model in models] == ["tiny", "alias"]
    assert client.models.retrieve("alias").model_dump()["max_model_len"] == 256
    assert httpx.get(f"{case.url}/health").json()["status"] == "ok"
    assert httpx.get(f"{case.url}/version").json()["version"]
    key = {"Authorization": "Bearer a key"}
    assert httpx.get(f"{case.url}/health_generate", headers=key).json() == {"status": "ok"}
    body = {"messages": CHAT, "return_token_strs": True}
    reply = httpx.post(f"{case.url}/tokenize", json=body, headers=key).json()
    assert reply["count"] == len(reply["tokens"]) and reply["token_strs"][0] == "<|im_start|>"
    text = httpx.post(f"{case.url}/detokenize", json={"tokens": reply["tokens"]}, headers=key).json()["prompt"]
    assert text == tokenizer().apply_chat_template(CHAT)
    assert (
        httpx.get(f"{case.url}/v1/models/", headers=key).json()
        == httpx.get(f"{case.url}/v1/models", headers=key).json()
    )
    for ids in ([65, 320], [2**31 - 1]):
        refused = httpx.post(f"{case.url}/detokenize", json={"tokens": ids}, headers=key)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"
        assert f"token id {ids[-1]} is outside the vocabulary (0 to 319)" in refused.json()["error"]["message"]
    assert httpx.post(f"{case.url}/detokenize", json={"tokens": []}, headers=key).json() == {"prompt": ""}


def test_tokenizer_info_is_what_a_remote_tokenizer_reads(case):
    """lm-eval's asks for eos_token before it uses the routes, and renders chat_template itself."""
    key = {"Authorization": "Bearer a key"}
    assert httpx.get(f"{case.url}/tokenizer_info").status_code == 401
    info = httpx.get(f"{case.url}/tokenizer_info", headers=key).json()
    assert (info["eos_token"], info["model_max_length"], info["chat_template"]) == ("<|im_end|>", 256, TEMPLATE)
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert httpx.post(f"{case.url}/tokenize", json=body, headers=key).json()["tokens"] == [END]


@pytest.mark.security
def test_errors_are_the_clients_own_classes(client, case):
    ask = client.completions.create
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; there is tiny, alias"):
        ask(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 256 tokens") as caught:
        ask(model="tiny", prompt="x" * 300)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match=r"temperatur.*did you mean 'temperature'") as caught:
        ask(model="tiny", prompt="x", extra_body={"temperatur": 1})
    assert caught.value.param == "temperatur"
    with client_of(case, api_key="wrong") as refused, pytest.raises(openai.AuthenticationError):
        refused.models.list()
    with pytest.raises(openai.BadRequestError, match="audio: this server makes text"):
        client.chat.completions.create(model="tiny", messages=CHAT, extra_body={"audio": {}})


@pytest.mark.asyncio
async def test_client_that_leaves_frees_its_blocks(case, engine):
    wait_for(lambda: case.coordinator.core.stats()["replicas"][0]["stats"].get("num_running") == 0)
    before = engine.stats().num_free_blocks
    async with openai.AsyncOpenAI(base_url=f"{case.url}/v1", api_key="a key", max_retries=0) as client:
        asked = {"model": "tiny", "prompt": "The long story", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        one = await client.completions.create(stream=True, **asked)
        await anext(aiter(one))
        assert engine.stats().num_running == 1
        await one.close()
        steps = engine.num_steps
        wait_for(lambda: engine.stats().num_running == 0)
        assert engine.num_steps - steps < 100
    assert math.isclose(engine.stats().num_free_blocks, before, abs_tol=1)


def test_megatrons_put_api_gives_the_tokens_texts_and_log_probabilities_of_the_engine(case, offline):
    def put(expected=200, **body):
        reply = httpx.put(f"{case.url}/api", json=body, headers={"Authorization": "Bearer a key"}, timeout=60)
        assert reply.status_code == expected, reply.text
        return reply.json()

    wanted, most = offline[0], {"tokens_to_generate": 12, "top_k": 1}
    reply = put(prompts=[TEXT, "Red"], logprobs=True, **most)
    assert reply["text"][0] == TEXT + wanted.outputs[0].text and reply["text"][1].startswith("Red")
    ids = [*wanted.prompt_token_ids, *wanted.outputs[0].token_ids]
    assert reply["tokens"][0] == ids and len(reply["segments"][0]) == len(reply["logprobs"][0]) + 1 == len(ids)
    of_prompt = [entry[token].logprob for token, entry in zip(ids[1:], wanted.prompt_logprobs[1:], strict=False)]
    assert reply["logprobs"][0][: len(of_prompt)] == pytest.approx(of_prompt, abs=1e-4)
    scored = put(prompts=[TEXT], tokens_to_generate=0, logprobs=True)
    assert scored["text"] == [TEXT] and scored["tokens"] == [list(wanted.prompt_token_ids)]
    assert scored["logprobs"] == [pytest.approx(of_prompt, abs=1e-4)]
    assert "logprobs" not in put(prompts=[TEXT], random_seed=5, top_p=0.0, **{**most, "top_k": 0})
    for body, words in (
        ({"prompts": [TEXT], "tokens_to_generate": 0}, "tokens_to_generate is 0"),
        ({"prompts": []}, "prompts"),
        ({"prompts": [TEXT], "sentences": [TEXT]}, "unknown field 'sentences'"),
        ({"prompts": [TEXT], "top_p": 0.5, "top_p_decay": 0.1}, "top_p is the same for all tokens"),
        ({"prompts": [TEXT], "tokens_to_generate": 1 << 20}, "maximum context length is 256"),
    ):
        assert words in put(400, **body)["error"]["message"]
