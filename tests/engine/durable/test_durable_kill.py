"""SIGKILL at any moment loses no accepted request and no finished one, and the rest goes on with the same tokens."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import durable_child
import pytest
from durable_case import PROMPT, Collector, make_engine
from gloo_ranks import fork_server
from model_kinds import RECURRENT, make_model

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.durable.journal import journal_path
from megatron_infer.errors import DuplicateRequest, SnapshotError, UnknownRequest
from megatron_infer.testing.inspect import inspect

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def uninterrupted(model) -> Collector:
    engine = make_engine(model, seed=4)
    add_all(engine)
    return Collector().step(engine)


def add_all(engine) -> None:
    for index in range(durable_child.NUM_REQUESTS):
        engine.add_request(durable_child.prompt_of(index), durable_child.params_of(index))


class Victims:
    """The process that forks engines to be killed, itself a fork of the server that has done the imports."""

    def __init__(self) -> None:
        self.orders, theirs = multiprocessing.Pipe()
        self.process = fork_server().Process(target=durable_child.main, args=(theirs,))
        self.process.start()
        theirs.close()

    def close(self) -> None:
        self.orders.close()
        self.process.join(20)
        assert self.process.exitcode == 0

    def run(
        self,
        path: Path,
        *,
        kind: str = "attention",
        kill_at: int | None = None,
        after_s: float | None = None,
        save_after: int | None = None,
        drafts: bool = False,
    ) -> int:
        """One engine from begin to end -> its exit code, negative for a signal. Its notes are in `path`.log."""
        order = {"path": str(path), "log": f"{path}.log", "kind": kind}
        order |= {"kill_at": kill_at, "after_s": after_s, "save_after": save_after, "drafts": drafts}
        self.orders.send(order)
        return self.orders.recv()["code"]  # EOFError: the process that forks engines has died


@pytest.fixture(scope="module")
def victims():
    made = Victims()
    yield made
    made.close()


def notes(path: Path) -> list[list[str]]:
    log = Path(f"{path}.log")
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def assert_nothing_is_lost(model, path: Path, want: Collector) -> None:
    told: dict[str, set[str]] = {}
    for kind, request_id in notes(path):
        told.setdefault(kind, set()).add(request_id)
    if not path.exists():
        assert "kept" not in told
        make_engine(model).keep_snapshots(path)  # what the kill left is not in the way
        return
    accepted, finished = told.get("accepted", set()), told.get("finished", set())
    gone, maybe_gone = told.get("acknowledged", set()), told.get("acknowledging", set())
    engine = make_engine(model, seed=4)
    report = engine.load_requests(path)
    ended = {output.request_id for output in report.finished}
    found = {*report.loaded, *ended}
    assert len(found) == len(report.loaded) + len(ended)
    assert accepted - maybe_gone <= found <= accepted | {str(len(accepted))}  # one may not have returned
    assert finished - maybe_gone <= ended and not gone & found
    engine.keep_snapshots(path)  # and the next process can be killed as well
    done = Collector()
    done.take(report.finished)
    done.step(engine)
    assert set(done.finished) == found
    for key, tokens in done.tokens.items():
        if done.ends[key][0] == "abort":
            assert tokens == want.tokens[key][: len(tokens)]
        else:
            assert tokens == want.tokens[key] and done.ends[key] == want.ends[key]
    again = make_engine(model).load_requests(path)
    assert {output.request_id for output in again.finished} == found and not again.loaded


MORE = [("attention", 1), ("attention", 2), *((kind, 0) for kind in RECURRENT)]


@pytest.mark.parametrize(
    ("kind", "part"),
    [("attention", 0), *(pytest.param(*one, marks=pytest.mark.long) for one in MORE)],
    indirect=["kind"],
)
def test_a_kill_around_any_file_operation_loses_nothing(model, kind, uninterrupted, victims, tmp_path, part):
    assert victims.run(tmp_path / "whole", kind=kind) == 0
    assert_nothing_is_lost(model, tmp_path / "whole", uninterrupted)
    num_calls = int(next(value for name, value in notes(tmp_path / "whole") if name == "calls"))
    assert num_calls > 40
    chosen = {*range(1, 9), *random.Random(0).sample(range(9, num_calls + 1), 24)}
    for kill_at in sorted(chosen)[part::3]:
        path = tmp_path / f"at{kill_at}"
        assert victims.run(path, kind=kind, kill_at=kill_at) == -signal.SIGKILL
        assert_nothing_is_lost(model, path, uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
def test_a_kill_at_a_random_moment_loses_nothing(model, uninterrupted, victims, tmp_path, drafts):
    began = time.monotonic()
    assert victims.run(tmp_path / "whole", drafts=drafts) == 0
    took, chooser = time.monotonic() - began, random.Random()
    assert_nothing_is_lost(model, tmp_path / "whole", uninterrupted)
    kept = [int(value) for kind, value in notes(tmp_path / "whole") if kind == "accepted drafts"]
    assert len(kept) == drafts and all(kept)
    for number in range(6):
        path = tmp_path / str(number)
        victims.run(path, after_s=chooser.random() * took, drafts=drafts)
        assert_nothing_is_lost(model, path, uninterrupted)


@pytest.mark.parametrize("kind", RECURRENT, indirect=True)
@pytest.mark.parametrize("block_size", [16, 8, 32])
def test_what_another_process_saved_goes_on_here_from_its_states(
    kind, model, uninterrupted, victims, tmp_path, block_size
):
    path = tmp_path / "requests"
    assert victims.run(path, kind=kind, save_after=9) == 0
    engine = make_engine(model, block_size_tokens=block_size, prefix="lru")
    report = engine.load_requests(path)
    assert len(report.with_kv) >= 4 and not report.recomputed  # the others had ended there
    done = Collector().step(engine)
    assert set(done.finished) == set(report.loaded)
    for key, tokens in done.tokens.items():
        assert tokens == uninterrupted.tokens[key] and done.ends[key] == uninterrupted.ends[key]
    assert engine.stats().counters["prefill_tokens"] == 0, "something was computed twice"


@pytest.mark.parametrize("kind", RECURRENT, indirect=True)
def test_states_of_another_model_are_not_gone_on_from(kind, model, uninterrupted, tmp_path):
    """Same vocabulary: the requests are computed anew by the model at hand. Another vocabulary: the file is refused."""
    source = make_engine(model, seed=4)
    add_all(source)
    Collector().step(source, 6)
    path = tmp_path / "requests"
    source.save_requests(path, kv=True)
    greedy = {
        state.id: list(state.sequences[0].request.tokens)
        for state in source.output_processor.requests
        if state.params.temperature == 0 and len(state.sequences[0].request.tokens) > len(state.prompt_ids)
    }
    assert greedy
    others = {
        "the weights differ from those it was computed with": make_model(kind, seed=7),
        "the model's state.conv_shape is [": make_model(
            kind, **({"linear_key_head_dim": 32} if kind == "delta" else {"mamba_state_dim": 32})
        ),
        "the model's": make_model("attention"),
    }
    for reason, other in others.items():
        engine = make_engine(other)
        report = engine.load_requests(path)
        assert report.recomputed.keys() >= greedy.keys() and not report.with_kv
        assert all(why.startswith(reason) for why in report.recomputed.values())
        done = Collector().step(engine)
        for name, tokens in greedy.items():
            prompt, limit = durable_child.prompt_of(int(name)), durable_child.params_of(int(name)).max_tokens
            drawn = tokens[len(prompt) :]
            rest = SamplingParams(temperature=0.0, max_tokens=limit - len(drawn), ignore_eos=True)
            assert done.tokens[name, 0] == drawn + make_engine(other).generate(tokens, rest)[0].outputs[0].token_ids
    with pytest.raises(SnapshotError, match="saved with vocab_size 128, this engine's is 160"):
        make_engine(make_model(kind, vocab_size=160)).load_requests(path)


@pytest.mark.long
@pytest.mark.parametrize("every", [89, 29])
def test_a_torn_last_line_is_left_out_and_mentioned_and_other_damage_refused(model, tmp_path, every):
    path = tmp_path / "requests"
    engine = make_engine(model)
    engine.keep_snapshots(path)
    for _ in range(3):
        engine.add_request(PROMPT, GREEDY)
    journal = journal_path(path)
    good = journal.read_bytes()
    lines = good.splitlines(keepends=True)
    assert len(lines) == 4
    for length in range(len(good) - len(lines[-1]), len(good), 97):
        journal.write_bytes(good[:length])
        report = make_engine(model).load_requests(path)
        assert report.loaded == ["0", "1"]
        torn = length > len(good) - len(lines[-1])
        assert len(report.notes) == torn and (not torn or "line 4 is cut short" in report.notes[0])
    chooser = random.Random(0)
    for at in range(0, len(good), every):
        damaged = bytearray(good)
        damaged[at] ^= 1 << chooser.randrange(8)
        journal.write_bytes(damaged)
        number = good[:at].count(b"\n") + 1
        with pytest.raises(SnapshotError, match=f"damaged in line {number}"):
            make_engine(model).load_requests(path)
    damaged = good[:-1] + b"\x0b"
    for content, words in (
        (damaged, "damaged in line 4"),
        (lines[0] + lines[2] + lines[3], "damaged in line 2"),  # a line is missing
        (b"", "no beginning"),
    ):
        journal.write_bytes(content)
        with pytest.raises(SnapshotError, match=words):
            make_engine(model).load_requests(path)
    journal.unlink()
    with pytest.raises(SnapshotError, match="missing"):
        make_engine(model).load_requests(path)


def test_files_of_different_runs_are_not_mixed(model, tmp_path):
    for name in ("a", "b"):
        engine = make_engine(model)
        engine.keep_snapshots(tmp_path / name)
        engine.add_request(PROMPT, GREEDY)
    os.replace(tmp_path / "b.journal", tmp_path / "a.journal")
    with pytest.raises(SnapshotError, match="of generation 1"):
        make_engine(model).load_requests(tmp_path / "a")


def test_finished_outputs_are_kept_whole_until_they_are_acknowledged(model, tmp_path):
    path = tmp_path / "requests"
    want = make_engine(model).generate(PROMPT, GREEDY)[0].outputs[0]
    engine = make_engine(model)
    engine.keep_snapshots(path, every_steps=3)
    for name in ("x", "y"):
        engine.add_request(PROMPT, GREEDY, request_id=name, stream="delta")
    engine.add_request(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True), request_id="long")
    with pytest.raises(UnknownRequest, match="'x' has not finished"):
        engine.acknowledge(["x"])
    Collector().step(engine, 8)
    with pytest.raises(DuplicateRequest, match="acknowledge its output"):
        engine.add_request(PROMPT, GREEDY, request_id="x")
    for _ in range(2):  # a load takes nothing away
        report = make_engine(model).load_requests(path)
        assert {o.request_id: o.outputs[0].token_ids for o in report.finished} == dict.fromkeys("xy", want.token_ids)
        assert report.loaded == ["long"]
    assert engine.acknowledge(["x", "x", "unheard of"]) == 1
    other = make_engine(model)
    assert [output.request_id for output in other.load_requests(path).finished] == ["y"]
    with pytest.raises(SnapshotError, match="'long' is in the engine already"):
        other.load_requests(path)
    assert engine.acknowledge() == 1
    engine.add_request(PROMPT, GREEDY, request_id="x")
    report = make_engine(model).load_requests(path)
    assert (report.finished, sorted(report.loaded)) == ([], ["long", "x"])


def test_files_in_the_way_are_not_overwritten_and_an_ended_keeping_leaves_a_plain_file(model, tmp_path):
    path = tmp_path / "requests"
    engine = make_engine(model)
    engine.keep_snapshots(path)
    engine.add_request(PROMPT, GREEDY)
    with pytest.raises(SnapshotError, match="load_requests it first"):
        make_engine(model).keep_snapshots(path)
    with pytest.raises(SnapshotError, match="keep_snapshots keeps it"):
        engine.save_requests(path)
    Collector().step(engine, 2)
    engine.keep_snapshots(None)
    engine.add_request(PROMPT, GREEDY)
    assert sorted(os.listdir(tmp_path)) == ["requests"]
    assert make_engine(model).load_requests(path).loaded == ["0"]
    path.unlink()
    lone = make_engine(model)
    lone.keep_snapshots(tmp_path / "lone")
    lone.add_request(PROMPT, GREEDY)
    (tmp_path / "lone").unlink()
    with pytest.raises(SnapshotError, match="without its snapshot"):
        make_engine(model).keep_snapshots(tmp_path / "lone")


def test_a_request_that_cannot_be_written_down_is_not_accepted(model, tmp_path, monkeypatch):
    path = tmp_path / "requests"
    engine = make_engine(model)
    engine.keep_snapshots(path)
    engine.add_request(PROMPT, GREEDY)
    real = os.pwrite

    def half(fd: int, content: memoryview, at: int) -> int:
        real(fd, content[: len(content) // 2], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match="No space left"):
        engine.add_request(PROMPT, GREEDY, request_id="refused")
    assert engine.stats().num_requests == engine.stats().num_waiting == 1
    collected = []
    with pytest.raises(OSError, match="No space left"):
        while True:
            collected += engine.step()
    assert not any(output.finished for output in collected)
    monkeypatch.undo()
    collected += engine.step()  # the output that could not be written down comes now
    assert [output.request_id for output in collected if output.finished] == ["0"]
    report = make_engine(model).load_requests(path)
    assert ([output.request_id for output in report.finished], report.loaded, report.notes) == (["0"], [], [])


def test_loading_while_keeping_keeps_what_was_loaded(model, tmp_path):
    source = make_engine(model)
    source.add_request(PROMPT, GREEDY, request_id="moved")
    source.save_requests(tmp_path / "moved")
    engine = make_engine(model)
    engine.keep_snapshots(tmp_path / "kept", fsync=True)
    engine.load_requests(tmp_path / "moved")
    assert make_engine(model).load_requests(tmp_path / "kept").loaded == ["moved"]


def test_without_keeping_a_step_asks_nobody(model, tmp_path, monkeypatch):
    engine = make_engine(model)
    engine.keep_snapshots(tmp_path / "requests")
    engine.keep_snapshots(None)
    monkeypatch.setattr(inspect(engine).snapshots, "stepped", lambda outputs: pytest.fail("asked"))
    engine.generate(PROMPT, GREEDY)
    assert engine.output_processor.on_close is None and not inspect(engine).snapshots.owed
