"""Padded and captured steps of an engine over two ranks: stages capture their part, tensor-parallel ranks all of it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gloo_ranks as ranks
import pytest
import stage_case
import torch
from engine_ranks import take_part, weights_of
from replay_recorder import REPLAY, ReplayRecorder, _NoReading
from static_kernels import STATIC

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import RankFailure
from megatron_infer.memory.regions.choose import MappedRegion
from megatron_infer.runner.parallel.tensor_parallel_sampler import RowSpread
from megatron_infer.runner.warm_up import launch_kernels
from megatron_infer.testing.eager_recorder import EAGER
from megatron_infer.testing.inspect import inspect, run_one_by_one
from megatron_infer.testing.tiny import tiny_gpt

GRAPHS = {
    "num_cuda_graphs": -1,
    "cuda_graph_max_tokens": 32,
    "use_cuda_graphs_for_non_decode_steps": True,
    "enable_chunked_prefill": True,
}
NAMES = ("tied", "last stage without Mamba")
PROMPTS = [[5, 6, 7, 8, 9], [11], [12, 13, 14], [15] * 20]
PLAIN = {"max_tokens": 12, "ignore_eos": True}
DRAWS = [
    SamplingParams(temperature=0.0, **PLAIN),
    SamplingParams(temperature=1.2, seed=5, return_sampled_logprobs=True, **PLAIN),
    SamplingParams(temperature=0.9, seed=6, top_k=9, top_p=0.9, return_sampled_logprobs=True, **PLAIN),
    SamplingParams(temperature=1.0, seed=7, min_p=0.05, **PLAIN),
]
"""What a captured step draws by itself."""


def take_static_kernels(graphs: str) -> None:
    os.environ |= {"MEGATRON_INFER_BACKEND": STATIC, "MEGATRON_INFER_GRAPHS": graphs}


def pool_of(engine: Any) -> Any:
    return inspect(engine).runner.graphs.pool


def check_used(engine: Any) -> None:
    counts = pool_of(engine).counts
    assert counts.replays > 10 and counts.uncaptured == 0 and not pool_of(engine).refused, counts


def draws_of(engine: Any) -> list[Any]:
    return stage_case.answers(engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], DRAWS))


@contextmanager
def no_waits_for_the_stage_before(engine: Any) -> Iterator[None]:
    """Nothing of what is received is looked at on the host; of all, the last stage reads its steps' results."""
    link, syncs = inspect(engine).runner.link, engine.device.syncs
    receive, before = link.receive, dict(syncs)

    def watched(*args: Any, **options: Any) -> Any:
        with _NoReading():
            return receive(*args, **options)

    link.receive = watched
    yield
    waits = {name: count - before.get(name, 0) for name, count in syncs.items() if count > before.get(name, 0)}
    assert set(waits) == ({"read"} if link.is_last else set()), waits


@contextmanager
def exchanges_counted() -> Iterator[list[int]]:
    """Rows that tensor-parallel ranks exchange behind a step."""
    seen: list[int] = []
    exchange = RowSpread.exchange

    def counted(self: RowSpread, *args: Any) -> Any:
        seen.append(args[1])
        return exchange(self, *args)

    RowSpread.exchange = counted  # type: ignore[method-assign]
    yield seen
    RowSpread.exchange = exchange  # type: ignore[method-assign]


def run_ranks(rank: int, size: int, folder: Path) -> None:
    take_static_kernels(REPLAY)
    expected = stage_case.json.loads((folder / "expected.json").read_text())
    for name in NAMES:
        model = stage_case.load_model(folder, name, pipeline_parallel=size)
        engine = stage_case.make_engine(model, overlap=True, **GRAPHS)
        launch_kernels(inspect(engine).runner, 64)
        with no_waits_for_the_stage_before(engine):
            answers = stage_case.generate(engine)
        stage_case.assert_same(answers, expected[name], name, tolerance=1e-4)
        check_used(engine)
        stage_case.assert_same(stage_case.generate_over_suspends(engine), expected[name], name, tolerance=1e-4)

    ranks.new_groups(tensor_model_parallel_size=size)
    model = stage_case.load_model(folder, "tied", tensor_parallel=size)
    engine = stage_case.make_engine(model, **GRAPHS)
    launch_kernels(inspect(engine).runner, 64)  # all of them together, as when an engine on GPUs is built
    stage_case.assert_same(stage_case.generate(engine), expected["tied"], "two tensor-parallel ranks", tolerance=1e-4)
    check_used(engine)
    with exchanges_counted() as exchanged:
        stage_case.assert_same(draws_of(engine), expected["draws"], "drawn within the step", tolerance=1e-4)
        assert not exchanged, "rows were exchanged behind a step"
        inspect(engine).runner.graphs._step._max_drawn_rows = 1
        pool_of(engine).drop("drawn outside")
        stage_case.assert_same(draws_of(engine), expected["draws"], "drawn behind the step", tolerance=1e-4)
        assert exchanged
    lacks_memory(rank, model, expected["draws"])
    held, ReplayRecorder.collectives = ReplayRecorder.collectives, ()
    with pytest.warns(ConfigWarning, match="holds no collectives of gloo; every step runs eagerly"):
        engine = stage_case.make_engine(model, **GRAPHS)
    assert inspect(engine).runner.graphs is None
    ReplayRecorder.collectives = held
    breaks_off(rank, model)  # the last: its group is of no use behind it


def lacks_memory(rank: int, model: Any, expected: list[Any]) -> None:
    """Before its warm-up or in its capture, on one rank: no rank has the graph, and nothing else is different."""
    for where in ("prepare", "capture"):
        engine = stage_case.make_engine(model, **GRAPHS)
        pool = pool_of(engine)
        owner = pool._step if where == "prepare" else pool.recorder
        if rank == 1:
            setattr(owner, where, out_of_memory_behind(getattr(owner, where)))
        stage_case.assert_same(draws_of(engine), expected, where, tolerance=1e-4)
        reasons = " ".join(pool.refused.values())
        assert not pool.captured and ("no room" if rank == 1 else "another rank") in reasons, (where, reasons)


def on_other_addresses(rank: int, size: int, folder: Path) -> None:
    """The cache is freed and allocated again: on rank 0 at its old address, on rank 1 at another one."""
    take_static_kernels(EAGER)
    ranks.new_groups(tensor_model_parallel_size=size)
    release, kept = MappedRegion.release, []

    def released(region: MappedRegion) -> None:
        kept.append(region.tensor)  # its addresses are not given out again
        region.tensor.zero_()
        if rank == 1:
            release(region)

    MappedRegion.release = released  # type: ignore[method-assign]
    expected = stage_case.json.loads((folder / "expected.json").read_text())
    model = stage_case.load_model(folder, "tied", tensor_parallel=size)
    engine = stage_case.make_engine(model, collective_timeout_s=20, **GRAPHS)
    stage_case.assert_same(draws_of(engine), expected, tolerance=1e-4)
    modes = itertools.cycle(("recompute", "offload"))
    for tags, mode in zip((None, {"kv_cache"}, {"kv_cache", "weights"}, {"kv_cache"}), modes, strict=False):
        before = pool_of(engine)._step.addresses(), pool_of(engine).counts.captures
        engine.suspend(mode, tags)
        engine.resume()
        assert (pool_of(engine)._step.addresses() == before[0]) == (rank == 0)
        stage_case.assert_same(draws_of(engine), expected, f"{mode} {tags}", tolerance=1e-4)
        assert pool_of(engine).counts.captures > before[1], "not captured again"
    check_used(engine)
    engine.rank_group.lockstep.close()


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "max_sequence_length": 128}


def on_own_requests(rank: int, size: int, folder: Path) -> None:
    """Ranks with requests of their own replay a decode step together: padded to the most rows, or with none of its
    own. A step in which a rank prefills runs eagerly on both."""
    expected = stage_case.json.loads((folder / "expected.json").read_text())
    take_static_kernels(REPLAY)
    ranks.new_groups(expert_model_parallel_size=size)
    model = tiny_gpt(**EXPERTS, randomize=False, expert_model_parallel_size=size)
    take_part(model, torch.load(folder / "weights.pt"))
    for settings in ({"cuda_graph_capture": "start"}, {"overlap": True}):
        engine = stage_case.make_engine(model, dp_attention=True, **GRAPHS | settings)
        for mine in (slice(0, 1) if rank else slice(1, 4), slice(0, 4) if rank else slice(0, 0)):
            before = pool_of(engine).counts.replays
            found = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS[mine]], DRAWS[mine])
            assert pool_of(engine).counts.replays > before + 5, "with requests or without"
            stage_case.assert_same(stage_case.answers(found), expected[mine], f"{mine}", tolerance=1e-4)
        check_used(engine)
        assert all(shape.is_decode_only for shape in pool_of(engine).captured)


@pytest.mark.long
def test_ranks_with_requests_of_their_own_replay_steps_together(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_INFER_BACKEND", STATIC)
        model = tiny_gpt(**EXPERTS, randomize=False)
        torch.save(weights_of(model), tmp_path / "weights.pt")
        stage_case.write_json(tmp_path / "expected.json", draws_of(stage_case.make_engine(model)))
    ranks.run_on_ranks(on_own_requests, 2, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_cache_that_comes_back_elsewhere_on_one_rank_is_captured_again_on_all(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_INFER_BACKEND", STATIC)
        model = stage_case.MODELS["tied"]()
        stage_case.save_checkpoint(model, tmp_path / "tied")
        expected = draws_of(stage_case.make_engine(model))
    stage_case.write_json(tmp_path / "expected.json", expected)
    ranks.run_on_ranks(on_other_addresses, 2, tmp_path)


def out_of_memory_behind(function: Any) -> Any:
    def wrapped(*args: Any) -> Any:
        function(*args)
        raise torch.OutOfMemoryError("no room")

    return wrapped


def breaks_off(rank: int, model: Any) -> None:
    """In the warm-up, where the other is in a collective: both end with the rank and the cause, that one at once."""
    engine = stage_case.make_engine(model, collective_timeout_s=20, **GRAPHS)
    if rank == 1:
        run_one_by_one(engine, {1: Breaking()})
    if rank == 0:
        engine.add_request({"prompt_token_ids": PROMPTS[0]}, DRAWS[0])
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 of the engine failed in .*together with other ranks.*no room"):
        engine.step()
    assert time.monotonic() - started < (15.0 if rank == 1 else 40.0)
    engine.rank_group.lockstep.close()


class Breaking:
    """A layer for which there is no memory."""

    def run(self, *args: Any) -> Any:
        raise torch.OutOfMemoryError("no room")


@pytest.mark.long
@pytest.mark.timeout(200)
def test_two_ranks_pad_and_capture_alike_and_answer_as_one_process(tmp_path):
    expected = {}
    with pytest.MonkeyPatch.context() as patch:  # not while ranks are started: others' would have it, too
        patch.setenv("MEGATRON_INFER_BACKEND", STATIC)
        for name in NAMES:
            model = stage_case.MODELS[name]()
            stage_case.save_checkpoint(model, tmp_path / name)
            engine = stage_case.make_engine(model)
            expected[name] = stage_case.generate(engine)
            if name == "tied":
                expected["draws"] = draws_of(engine)
    stage_case.write_json(tmp_path / "expected.json", expected)
    ranks.run_on_ranks(run_ranks, 2, tmp_path)
