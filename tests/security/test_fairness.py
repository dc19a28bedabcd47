"""One caller who takes what it gets delays others by no more than its turn."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from control_case import serving_with_control
from echo import EchoEngine
from server_case import post, serving, tiny_engine, tokenizer, wait_for

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.server import structured_outputs
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt
from megatron_infer.text.grammar import GrammarCache
from megatron_infer.utils.turn_pool import TurnPool

pytestmark = pytest.mark.security
COMPLETIONS = "/v1/completions"


def post_from(case, address, *, timeout=60.0, **body):
    """A completion asked for by the caller of an address."""
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(base_url=case.url, transport=transport, timeout=timeout) as http:
        return http.post(COMPLETIONS, json={"prompt": [1, 2, 3], "max_tokens": 3, **body})


class Compiling:
    """Grammars that compile when they may, one of a caller's at a time, in the order `begun`."""

    def __init__(self, monkeypatch, *, holds):
        self.begun, self.go = [], threading.Event()
        whole = GrammarCache._compile

        def compile_held(cache, wanted):
            self.begun.append(wanted.regex)
            if holds(wanted.regex):
                assert self.go.wait(60)
            return whole(cache, wanted)

        monkeypatch.setattr(GrammarCache, "_compile", compile_held)


def test_callers_take_turns_to_have_grammars_compiled(monkeypatch):
    compiling = Compiling(monkeypatch, holds=lambda regex: regex == "a0")
    cache = GrammarCache(tokenizer(), 0)
    many = [cache.compile(StructuredOutput(regex=f"a{i}"), caller=1) for i in range(100)]
    wait_for(lambda: compiling.begun == ["a0"])
    cache.compile(StructuredOutput(regex="b"), caller=2).result(20)  # beside the first of another caller
    shared = cache.compile(StructuredOutput(regex="a99"), caller=3)  # which waits behind 98 others
    shared.result(20)
    assert compiling.begun == ["a0", "b", "a99"] and not many[1].done()
    compiling.go.set()
    for one in many:
        one.result(20)
    assert sorted(compiling.begun) == sorted({*compiling.begun})


@pytest.mark.parametrize("most_each", [1, 2])
def test_one_caller_has_as_many_threads_as_it_may_and_others_their_turn(most_each):
    go, begun = threading.Event(), []
    pool = TurnPool(2, "test", most_each=most_each, gives_way=False)

    def job(name):
        begun.append(name)
        assert go.wait(20)

    jobs = [pool.submit(1, partial(job, f"a{i}")) for i in range(4)]
    wait_for(lambda: len(begun) == most_each)
    jobs.append(pool.submit(2, partial(job, "b")))
    time.sleep(0.2)
    assert sorted(begun) == (["a0", "a1"] if most_each == 2 else ["a0", "b"])
    go.set()
    for one in jobs:
        one.result(20)
    assert begun.index("b") <= 3


@pytest.mark.skipif(sys.platform != "linux", reason="a thread of its own niceness")
def test_caller_of_long_jobs_gives_way_to_one_of_few():
    pool, go = TurnPool(2, "test", most_each=1), threading.Event()

    def niceness():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def work(seconds):
        begun = time.thread_time()
        while time.thread_time() - begun < seconds:
            pass
        return niceness()

    usual = niceness()
    assert pool.submit("hog", partial(work, 0.3)).result(20) == usual, "it has used nothing yet"
    assert pool.submit("hog", niceness).result(20) == 19
    held = pool.submit("hog", lambda: go.wait(20))
    assert pool.submit("other", niceness).result(20) == usual
    queued = pool.submit("hog", niceness)
    assert pool.submit("third", niceness).result(20) == usual and not queued.done()
    go.set()
    assert held.result(20) and queued.result(20) == 19
    pool.close()


def test_texts_of_one_caller_do_not_delay_those_of_another():
    """A caller asks for more tokenization than there are threads for it; another one's comes in its turn."""
    go, whole, order = threading.Event(), type(tokenizer()).encode, []

    def encode(self, text, *args, **kwargs):
        assert not text.startswith("held") or go.wait(60)
        order.append(text)
        return whole(self, text, *args, **kwargs)

    submitted, submit = [], TurnPool.submit

    def count(pool, caller, job, future=None):
        result = submit(pool, caller, job, future)
        submitted.append(caller)
        return result

    with pytest.MonkeyPatch.context() as patch, serving() as case, ThreadPoolExecutor(20) as threads:
        patch.setattr(type(tokenizer()), "encode", encode)
        patch.setattr(TurnPool, "submit", count)
        asked = [threads.submit(post_from, case, "127.0.0.2", prompt=f"held {i}") for i in range(2)]
        wait_for(lambda: len(submitted) == 2)
        later = [threads.submit(post_from, case, "127.0.0.2", prompt=f"{i}") for i in range(16)]
        wait_for(lambda: len(submitted) == 18)
        other = threads.submit(post_from, case, "127.0.0.3", prompt="other")
        wait_for(lambda: len(submitted) == 19)
        go.set()
        assert other.result(60).status_code == 200
        assert all(one.result(60).status_code == 200 for one in (*asked, *later))
    assert len(order) == 19 and order.index("other") <= 5, order


@pytest.mark.parametrize("gives_way", [False, True])
def test_text_of_a_job_that_failed_is_not_kept(gives_way):
    class Text(str):
        __slots__ = ("__weakref__",)

    def fail(text):
        raise ValueError("refused")

    pool, kept = TurnPool(2, "test", most_each=2, gives_way=gives_way), []
    gc.disable()
    try:
        for _ in range(20):
            text = Text("long")
            kept.append(weakref.ref(text))
            with pytest.raises(ValueError, match="refused"):
                pool.submit(1, partial(fail, text)).result(20)
            del text
        pool.close()
        assert sum(one() is not None for one in kept) <= 1
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/generate", {"text": "a", "sampling_params": {"regex": "[ab]+", "stop": ["x"] * 65}}, "max_stop"),
        ("/generate", {"input_ids": [1] * 99_999, "sampling_params": {"regex": "[ab]+"}}, "maximum context length"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "[ab]+"}, "stop": ["x"] * 65}},
            "max_stop",
        ),
    ],
)
def test_a_call_beyond_the_limits_has_no_grammar_compiled(monkeypatch, path, body, limit):
    compiled = []
    monkeypatch.setattr(GrammarCache, "compile", lambda cache, wanted, caller=0: compiled.append(wanted))
    with serving_with_control(EchoEngine()) as case:
        reply = httpx.post(f"{case.url}{path}", json=body, timeout=60)
    assert reply.status_code == 400 and limit in reply.text and not compiled


def test_schemas_of_one_caller_neither_delay_anothers_nor_blame_it(monkeypatch):
    compiling = Compiling(monkeypatch, holds=lambda regex: regex.startswith("held"))
    monkeypatch.setattr(structured_outputs, "COMPILE_TIMEOUT_S", 3.0)
    with serving() as case, ThreadPoolExecutor(40) as threads:
        asked = [threads.submit(post_from, case, "127.0.0.2", guided_regex=f"held{i}") for i in range(20)]
        wait_for(lambda: len(compiling.begun) == 1)
        assert post_from(case, "127.0.0.3", guided_regex="b").status_code == 200
        replies = [one.result(60) for one in asked]
        compiling.go.set()
    begun = [one for one in replies if one.status_code == 400]
    waited = [one for one in replies if one.status_code == 503]
    assert len(begun) == 1 and "make it smaller" in begun[0].json()["error"]["message"]
    assert len(waited) == 19 and all("retry-after" in one.headers for one in waited)
    assert all("smaller" not in one.json()["error"]["message"] for one in waited)


def test_grammar_of_a_caller_who_has_left_is_not_compiled(monkeypatch):
    compiling = Compiling(monkeypatch, holds=lambda regex: regex == "held")
    with serving() as case, ThreadPoolExecutor(2) as threads:
        held = threads.submit(post_from, case, "127.0.0.2", guided_regex="held")
        wait_for(lambda: compiling.begun == ["held"])
        with pytest.raises(httpx.ReadTimeout):
            post_from(case, "127.0.0.2", guided_regex="gone", timeout=0.5)
        time.sleep(0.5)
        compiling.go.set()
        held.result(60)
        assert post(case, COMPLETIONS, prompt=[1], guided_regex="next").status_code == 200
    assert compiling.begun == ["held", "next"]


def engine_of(**options):
    rows = {"buffer_size_gb": 0.01, "max_requests": 8, "max_tokens": 64, "enable_chunked_prefill": True}
    return tiny_engine(tiny_gpt(vocab_size=320, max_sequence_length=256), **rows, **options)


@pytest.mark.parametrize("options", [{}, {"overlap": True, "enable_prefix_caching": True, "check_invariants": True}])
def test_rows_of_all_callers_give_the_answers_of_one_alone(options):
    work = [
        ([10 + i, *range(30, 30 + 5 * i)], SamplingParams(max_tokens=40, n=1 + 3 * (i % 2), seed=i, ignore_eos=True))
        for i in range(8)
    ]
    engine = engine_of()
    alone = [engine.generate([ids], [params])[0].outputs for ids, params in work]
    engine, ended = engine_of(**options), {}
    for place, (ids, params) in enumerate(work):
        for _ in range(12 * (place // 4)):
            ended |= {one.request_id: one for one in engine.step()}
        engine.add_request(ids, params, request_id=str(place), stream="final", caller=1 + place // 4)
    while engine.has_unfinished():
        ended |= {one.request_id: one for one in engine.step()}
    assert engine.stats().counters["evicted"] > 0
    for place, expected in enumerate(alone):
        found = ended[str(place)].outputs
        assert [one.token_ids for one in found] == [one.token_ids for one in expected], place


def test_one_token_of_a_caller_comes_while_another_has_asked_for_all_rows():
    with serving(engine_of(overlap=True), max_n=64) as case, ThreadPoolExecutor(20) as threads:
        hog = {"n": 16, "max_tokens": 100, "ignore_eos": True}
        asked = [threads.submit(post_from, case, "127.0.0.2", **hog) for _ in range(20)]
        wait_for(lambda: inspect(case.engines[0]).context.num_free_rows == 0)
        for _ in range(3):
            assert post_from(case, "127.0.0.3", max_tokens=1).status_code == 200
        assert sum(one.done() for one in asked) < 10
        for _ in range(2):  # at once: what is left need not be computed
            case.server.shut_down()
        assert {one.result(60).status_code for one in asked} <= {200, 503}
