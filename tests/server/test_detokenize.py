"""Detokenization in the server gives the same replies, byte for byte, as detokenization in the engine."""

from __future__ import annotations

import random

import pytest
import tokenizers
from echo import EchoEngine, echo_tokens
from server_case import END, START, events, post, serving, stream, tiny_engine, tokenizer
from tokenizers import decoders, models

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.requests.request_state import SequenceState
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from megatron_infer.scheduler.request import FinishReason, Request
from megatron_infer.server.output_detokenizer import INLINE_TOKENS, RequestDetokenizer
from megatron_infer.text.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMOJI = [
    tokenizer().token_id(character) for character in tokenizer().backend.pre_tokenizer.pre_tokenize_str("😀")[0][0]
]
BASE = {"prompt": "Once", "max_tokens": 24, "seed": 5, "temperature": 1.0}
MANY = {"logit_bias": {str(END): 5.0, str(START): 6.0}}
ASKS = {
    "whole and long": (COMPLETIONS, BASE | {"max_tokens": 2 * INLINE_TOKENS, "n": 2, "ignore_eos": True}),
    "end of sequence": (COMPLETIONS, BASE | {"n": 4, "logit_bias": {str(END): 6.0}}),
    "end of sequence shown": (COMPLETIONS, BASE | MANY | {"include_stop_str_in_output": True, "n": 3}),
    "special tokens shown": (COMPLETIONS, BASE | MANY | {"skip_special_tokens": False, "ignore_eos": True}),
    "special tokens": (COMPLETIONS, BASE | MANY | {"ignore_eos": True}),
    "halves of characters": (COMPLETIONS, BASE | {"allowed_token_ids": EMOJI, "n": 4, "ignore_eos": True}),
    "prompt ends in half a character": (COMPLETIONS, BASE | {"prompt": EMOJI[:2], "allowed_token_ids": EMOJI}),
    "stop ids": (COMPLETIONS, BASE | {"allowed_token_ids": EMOJI, "stop_token_ids": EMOJI[2:3], "n": 4}),
    "stop texts": (COMPLETIONS, BASE | {"allowed_token_ids": [0, 1, 2], "stop": ['""', "!#"], "n": 3}),
    "log probabilities": (COMPLETIONS, BASE | {"logprobs": 3, "return_token_ids": True}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30, "seed": 3, "logprobs": True}),
    "structured": (COMPLETIONS, BASE | {"guided_regex": "(ab|é)[c-d]{3}", "n": 3}),
    "sglang": ("/generate", {"text": "Once", "sampling_params": {"max_new_tokens": 90, "sampling_seed": 4}}),
}


def comparable(reply):
    """A reply without its ids and times, which differ in every reply."""
    meta = {key: value for key, value in reply.get("meta_info", {}).items() if key not in ("id", "e2e_latency")}
    return {key: value for key, value in reply.items() if key not in ("id", "created", "meta_info")} | {"meta": meta}


def streamed(chunks):
    """The text of each sample."""
    texts = {}
    for chunk in chunks:
        for choice in chunk.get("choices", [{"index": 0, "text": chunk.get("text")}]):
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            before = "" if "meta_info" in chunk else texts.get(choice["index"], "")
            texts[choice["index"]] = before + piece
    return texts


def replies_of(decodes):
    found = {}
    with serving(tiny_engine(), decodes=decodes, control=True) as case:
        for name, (path, ask) in ASKS.items():
            reply = post(case, path, **ask)
            assert reply.status_code == 200, f"{name}: {reply.text}"
            found[name] = comparable(reply.json()), streamed(stream(case, path, **ask))
        asked = BASE | {"prompt_logprobs": 2, "logprobs": 1}
        ids = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "seed": 1, "prompt_logprobs": 2}}
        found["of the prompt"] = [comparable(post(case, COMPLETIONS, **asked).json())]
        if decodes:
            for entry in post(case, "/inference/v1/generate", **ids).json()["prompt_logprobs"][1:]:
                assert {one["decoded_token"] for one in entry.values()} == {
                    tokenizer().token_str(int(id)) for id in entry
                }
    return found


@pytest.fixture(scope="module")
def replies():
    return {decodes: replies_of(decodes) for decodes in (False, True)}


def test_replies_are_those_of_an_engine_that_detokenizes_itself(replies):
    for name, wanted in replies[False].items():
        assert replies[True][name] == wanted, name
    whole = {name: found[0]["choices"] for name, found in replies[True].items() if "choices" in found[0]}
    assert "\ufffd" in "".join(one["text"] for one in whole["halves of characters"])
    assert {"stop", "length"} == {one["finish_reason"] for one in whole["stop ids"] + whole["whole and long"]}
    assert any(one["finish_reason"] == "stop" for one in whole["end of sequence shown"])
    assert "<|im_start|>" in whole["special tokens shown"][0]["text"]


def test_stream_has_the_text_of_the_whole_reply(replies):
    for name, (whole, chunks) in ((name, replies[True][name]) for name in ASKS):
        choices = whole.get("choices", [whole | {"index": 0}])
        texts = {one["index"]: one["text"] if "text" in one else one["message"]["content"] for one in choices}
        assert chunks == texts, name


def test_engine_detokenizes_only_requests_with_stop_texts_or_grammars():
    seen = []

    class Recording(EchoEngine):
        def _queue(self, request_id, prompt, params, drawn, salt):
            seen.append(params.detokenize)
            super()._queue(request_id, prompt, params, drawn, salt)

    with serving(Recording(), decodes=True) as case:
        for extra in ({}, {"stop": "x"}, {"guided_choice": ["ab"]}):
            assert post(case, COMPLETIONS, prompt=[1], max_tokens=2, **extra).status_code == 200
    assert seen == [False, True, True]


def test_text_continues_where_it_was_when_another_replica_takes_over():
    with serving(EchoEngine(step_s=0.02), EchoEngine(step_s=0.02), decodes=True) as case:
        ask = {"prompt": [9, 4], "max_tokens": 60, "return_token_ids": True, "temperature": 0, "stream": True}
        with case.http.stream("POST", COMPLETIONS, json=ask) as reply:
            lines = reply.iter_lines()
            kept = [next(lines) for _ in range(9)]
            busy = next(i for i, engine in enumerate(case.engines) if engine.has_unfinished())
            case.replicas[busy].stop()
            kept += list(lines)
        assert case.coordinator.core.stats()["resent"] == 1
    chunks = events(kept)
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert tokens == echo_tokens([9, 4], 60)
    assert streamed(chunks)[0] == tokenizer().decode(tokens)


def pieces():
    """A tokenizer that is not byte-level, with bytes for unknown characters."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁a": 257, "b": 258, "▁": 259}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(backend, eos_ids=[260])


def windowed():
    """A tokenizer whose text is what its decoder makes of several tokens."""
    backend = pieces().backend
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, eos_ids=[260])


@pytest.mark.parametrize("made", [tokenizer, pieces, windowed])
def test_any_split_of_any_tokens_gives_the_text_of_the_engine(made):
    codec, rng = made(), random.Random(7)
    num_ids = codec.vocab_size + 3
    likely = [*codec.encode("a😀é b"), num_ids - 1]
    for round in range(150):
        prompt = [rng.choice(likely) for _ in range(rng.randint(1, 9))]
        tokens = [
            rng.choice(likely) if rng.random() < 0.7 else rng.randrange(num_ids) for _ in range(rng.randint(1, 25))
        ]
        reason = rng.choice(["stop", "length", "abort"])
        params = SamplingParams(
            include_stop_str_in_output=rng.random() < 0.3, skip_special_tokens=rng.random() < 0.6, logprobs=0
        )
        request = Request(
            id="0", tokens=list(prompt), prompt_len=len(prompt), params=params, max_total=99, seed=0,
            stop_ids=frozenset(tokens[-1:] if reason == "stop" else ()),
        )  # fmt: skip
        engine, here = SequenceState(request, 0, params, codec), RequestDetokenizer(codec, prompt, params)
        at = 0
        while at < len(tokens):
            step = rng.randint(1, 6)
            request.tokens += tokens[at : at + step]
            at += step
            if at >= len(tokens):
                request.finish_reason = FinishReason(reason)
            engine.advance()
            if request.finish_reason is not None:
                engine.end_text()
            wanted = engine.output("cumulative")
            if rng.random() < 0.5 and wanted.finish_reason is None:
                continue  # an update that was replaced before it was read
            entries = [{token: Logprob(-1.0)} for token in wanted.token_ids]
            one = CompletionOutput(0, "", wanted.token_ids, logprobs=entries, finish_reason=wanted.finish_reason)
            output = RequestOutput("0", None, prompt, None, [one], False, RequestMetrics(0.0))
            here.fill(output)
            assert one.text == wanted.text, (round, prompt, tokens, reason)
