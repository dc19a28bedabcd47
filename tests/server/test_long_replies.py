"""A long reply is made in a thread, in pieces, and is the reply that a short way gives."""

from __future__ import annotations

import threading

import msgspec
import pytest
from echo import EchoEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from server_case import post, serving

from megatron_infer.server import generation
from megatron_infer.server.completions import CompletionReply
from megatron_infer.server.output_detokenizer import INLINE_TOKENS

BODY = {"prompt": [5, 6, 7], "n": 2, "temperature": 0, "logprobs": 2, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def case():
    with serving(EchoEngine()) as one:
        yield one


def answered(case, **body):
    reply = post(case, "/v1/completions", **BODY, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"], reply.json()["usage"]


def test_long_replies_are_made_beside_the_event_loop_and_short_ones_within_it(case, monkeypatch):
    threads, whole = [], CompletionReply.whole
    monkeypatch.setattr(
        CompletionReply,
        "whole",
        lambda self, outputs: (threads.append(threading.current_thread()), whole(self, outputs))[1],
    )
    answered(case, max_tokens=INLINE_TOKENS // 2)
    long = answered(case, max_tokens=INLINE_TOKENS)
    assert threads[0] is case.thread and threads[1] is not case.thread
    monkeypatch.setattr(generation, "PIECE", 7)
    assert answered(case, max_tokens=INLINE_TOKENS) == long
    monkeypatch.setattr(generation, "INLINE_TOKENS", 10**6)
    assert answered(case, max_tokens=INLINE_TOKENS) == long


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=40,
)


@given(value=VALUES, size=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_pieces_are_the_json_of_the_whole(value, size):
    before, generation.PIECE = generation.PIECE, size
    try:
        assert msgspec.json.decode(msgspec.json.encode(generation.in_pieces(value))) == value
    finally:
        generation.PIECE = before
