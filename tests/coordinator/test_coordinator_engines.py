"""Real engines behind a coordinator give the tokens of one engine, also for requests moved halfway."""

from __future__ import annotations

import dataclasses
import signal

import numpy as np
import pytest
import replica_child
from carried_case import make_engine, make_model
from coordinator_case import Child, coordinator, replica, wait_for

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.served_engine import ServedRequest, params_of
from megatron_infer.errors import RequestError
from megatron_infer.outputs.request_output import CompletionOutput
from megatron_infer.outputs.schema import Piece, append, bytes_to_ids, ids_to_bytes, piece_of


@pytest.fixture(scope="module")
def engine():
    return replica_child.tiny()


@pytest.fixture(scope="module")
def experts():
    return make_engine(make_model("experts"), prefix="lru")


def prompt_of(i):
    return [*range(10, 50), *(3 + i * 5 % 90 for i in range(i, i + 5))]


def params_for(i):
    return SamplingParams(
        max_tokens=12 + i,
        temperature=0.0 if i % 2 else 1.0,
        seed=i,
        ignore_eos=True,
        logprobs=1 if i % 3 else None,
        top_k=0 if i % 3 else 9,
        return_sampled_logprobs=i % 4 < 2,
        return_support=i % 4 in (0, 3),
    )


def test_two_engines_behind_a_coordinator_give_the_tokens_and_logprobs_of_one_and_survive_a_loss(engine):
    prompts, params = [prompt_of(i) for i in range(16)], [params_for(i) for i in range(16)]
    longer = [dataclasses.replace(one, max_tokens=180) for one in params]
    expected, expected_longer = engine.generate(prompts, params), engine.generate(prompts, longer)
    engine.reset_prefix_cache()
    with coordinator(timeout_s=10.0, alpha=0.5) as one, InferenceClient(one.address) as client:
        child = Child(one.address, "tiny", "child")
        try:
            wait_for(lambda: client.stats()["replicas"], 120)
            with replica(one.address, engine, name="here"):
                wait_for(lambda: len(client.stats()["replicas"]) == 2)
                outputs = client.generate(prompts, params)
                same(outputs, expected)
                for output in outputs:  # the engine's own times, on the client's clock
                    times = output.metrics
                    assert times.arrival_time < times.first_scheduled_time < times.first_token_time
                    assert times.first_token_time < times.finished_time
                    assert [event.kind for event in output.events] == ["ASSIGN"]
                stats = client.stats()
                assert stats["cached_tokens"] > 0 and stats["policy"] == "longest_prefix"
                assert all(r["cached_blocks"] for r in stats["replicas"])
                futures = [client.submit(*pair) for pair in zip(prompts, longer, strict=True)]
                wait_for(lambda: all(r["running"] >= 4 for r in client.stats()["replicas"]))
                child.signal(signal.SIGKILL)
                same([future.result(60) for future in futures], expected_longer)
                one.core.check()
                stats = client.stats()
                assert stats["replicas_lost"] == 1 and stats["resent"] >= 1
                answers = client.set_weight_version(5)
                assert answers["here"].ok
                assert client.suspend(timeout_s=30)["here"].value["state"] == "suspended"
                later = client.submit(prompts[0], params[1])
                client.resume()
                output = later.result(30)
                assert output.outputs[0].spans[0].policy_version == 5
                with pytest.raises(protocol.ControlFailed, match=r"here: .*pause mode"):
                    client.pause("kep")
        finally:
            child.end()


def same(outputs, expected):
    for i, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert output.error is None, output.error
        for one, two in zip(output.outputs, wanted.outputs, strict=True):
            assert one.token_ids == two.token_ids, f"request {i}"
            assert (one.finish_reason, one.stop_reason) == (two.finish_reason, two.stop_reason)
            assert (one.logprobs is None) == (two.logprobs is None)
            if one.logprobs is not None:
                assert len(one.logprobs) == len(one.token_ids)
                for entry, other in zip(one.logprobs, two.logprobs, strict=True):
                    assert list(entry) == list(other)
                    assert [p.logprob for p in entry.values()] == pytest.approx(
                        [p.logprob for p in other.values()], abs=1e-5
                    )
                assert one.cumulative_logprob == pytest.approx(two.cumulative_logprob, abs=1e-4)
            same_token_details(one, two)


def same_token_details(one, two):
    for name in ("raw_logprobs", "processed_logprobs"):
        wanted = getattr(two, name)
        assert getattr(one, name) == (None if wanted is None else pytest.approx(wanted, abs=1e-5)), name
    assert one.support == two.support
    assert (one.routing is None) == (two.routing is None)
    assert one.routing is None or (one.routing.dtype == two.routing.dtype and (one.routing == two.routing).all())


TOKEN_DETAILS = {"return_sampled_logprobs": True, "return_support": True}
HARD = {
    "greedy": SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    "samples": SamplingParams(max_tokens=20, n=3, seed=3, ignore_eos=True, logprobs=2),
    "token_details": SamplingParams(max_tokens=20, n=2, seed=8, ignore_eos=True, top_p=0.7, **TOKEN_DETAILS),
    "routed": SamplingParams(max_tokens=20, n=2, seed=9, ignore_eos=True, return_routing=True, **TOKEN_DETAILS),
    "penalties": SamplingParams(
        max_tokens=20, seed=4, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3, ignore_eos=True
    ),
    "min_tokens": SamplingParams(max_tokens=20, seed=5, min_tokens=15, stop_token_ids=list(range(40))),
    "prompt_logprobs": SamplingParams(max_tokens=20, seed=6, prompt_logprobs=1, ignore_eos=True),
}


@pytest.mark.parametrize("cut", [1, 7, 19])
@pytest.mark.parametrize("name", HARD)
def test_request_moved_after_any_token_continues_unchanged(engine, experts, name, cut):
    """`cut` steps on one engine, then the rest on another: here the same engine after the request has ended."""
    params, ids = HARD[name], prompt_of(3)
    engine = experts if params.return_routing else engine
    whole = engine.generate([ids], [params])[0]
    assert any(len(one.token_ids) > 1 for one in whole.outputs)
    run = protocol.Run(1, 1, ids_to_bytes(ids), None, "", params.to_dict(), params.seed or 0, True, [])
    received: list[list[Piece]] = [[] for _ in range(params.n)]
    finished = drive(engine, ServedRequest(run, params_of(run)), received, steps=cut)
    if not finished:
        kept = [
            protocol.Kept(
                b"".join(piece.tokens for piece in pieces),
                0,
                pieces[-1].cumulative_logprob or 0.0 if pieces else 0.0,
                pieces[-1].finish_reason if pieces else None,
                pieces[-1].stop_reason if pieces else None,
            )
            for pieces in received
        ]
        moved = protocol.Run(2, 1, run.prompt, None, "", run.params, run.seed, True, kept)
        assert drive(engine, ServedRequest(moved, params_of(moved)), received, steps=1000)
    for pieces, one in zip(received, whole.outputs, strict=True):
        assert [piece.offset for piece in pieces] == offsets(pieces)
        assert sum((bytes_to_ids(piece.tokens) for piece in pieces), []) == one.token_ids
        assert pieces[-1].finish_reason == one.finish_reason
        if one.logprobs is not None:
            entries = [entry for piece in pieces for entry in piece.logprobs]
            assert [[token for token, *_ in entry] for entry in entries] == [list(entry) for entry in one.logprobs]
            assert pieces[-1].cumulative_logprob == pytest.approx(one.cumulative_logprob, abs=1e-4)
        at_the_client = CompletionOutput(index=0, text="", token_ids=[])
        for piece in pieces:
            append(at_the_client, protocol.decode(protocol.encode(protocol.Output(1, 1, [piece], False))).pieces[0])
        same_token_details(at_the_client, one)


def test_routing_of_a_sequence_that_was_never_computed_arrives_empty():
    """An abort in the queue ends it so."""
    routing = np.empty((0, 0, 0), dtype=np.uint8)
    ended = CompletionOutput(index=0, text="", token_ids=[], finish_reason="abort", routing=routing)
    at_the_client = CompletionOutput(index=0, text="", token_ids=[])
    message = protocol.encode(protocol.Output(1, 1, [piece_of(ended)], True))
    append(at_the_client, protocol.decode(message).pieces[0])
    assert at_the_client.routing.shape == (0, 0, 0) and at_the_client.finish_reason == "abort"


def drive(engine, request, received, *, steps):
    """Run a request for some steps, recording its messages -> whether it has finished; if not it is aborted."""
    request.begin(engine)
    for _ in range(steps):
        for output in engine.step():
            news = request.message(output)
            for piece in () if news is None else news.pieces:
                received[piece.index].append(piece)
            if output.finished:
                return True
    engine.abort(request.id)
    return False


def offsets(pieces):
    starts, count = [], 0
    for piece in pieces:
        starts.append(count)
        count += len(piece.tokens) // 4
    return starts


@pytest.mark.parametrize("name", ["greedy", "samples"])
def test_moved_request_continues_after_its_tokens_without_sampling_them_again(engine, name):
    """Counted by what the engine samples."""
    params, ids, cut = HARD[name], prompt_of(4), 7
    received: list[list[Piece]] = [[] for _ in range(params.n)]
    run = protocol.Run(1, 1, ids_to_bytes(ids), None, "", params.to_dict(), params.seed or 0, True, [])
    assert not drive(engine, ServedRequest(run, params_of(run)), received, steps=cut)
    kept = [protocol.Kept(b"".join(piece.tokens for piece in pieces)) for pieces in received]
    num_kept = sum(len(one.tokens) // 4 for one in kept)
    assert num_kept >= params.n * (cut - 1)
    before = engine.figures().output_tokens
    second = protocol.Run(2, 1, run.prompt, None, "", run.params, run.seed, True, kept)
    assert drive(engine, ServedRequest(second, params_of(second)), received, steps=1000)
    num_sampled = engine.figures().output_tokens - before
    assert num_sampled == params.n * params.max_tokens - num_kept
    whole = engine.generate([ids], [params])[0]
    for pieces, one in zip(received, whole.outputs, strict=True):
        assert bytes_to_ids(b"".join(piece.tokens for piece in pieces)) == one.token_ids


def test_request_that_asks_for_drafts_moves_to_an_engine_without_them_but_does_not_begin_there(engine):
    asked, ids = dataclasses.replace(HARD["greedy"], speculate=True), prompt_of(4)
    whole = engine.generate([ids], [HARD["greedy"]])[0].outputs[0]
    run = protocol.Run(1, 1, ids_to_bytes(ids), None, "", asked.to_dict(), 0, True, [])
    with pytest.raises(RequestError, match="speculate: this engine drafts no tokens"):
        ServedRequest(run, params_of(run)).begin(engine)
    kept = [protocol.Kept(ids_to_bytes(whole.token_ids[:5]))]
    moved = protocol.Run(2, 1, run.prompt, None, "", run.params, 0, True, kept)
    received: list[list[Piece]] = [[]]
    assert drive(engine, ServedRequest(moved, params_of(moved)), received, steps=1000)
    assert sum((bytes_to_ids(piece.tokens) for piece in received[0]), []) == whole.token_ids[5:]
