"""A model that drafts on the last pipeline stage: the answers of one process, and drafts that are kept as there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gloo_ranks as ranks
import pytest
import stage_case
import torch
from drafters import check_all_kept, noisy
from model_kinds import make_model
from test_pp import failing
from test_same_answer import FEATURES, VOCAB, make_engine, run, workload

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine import draft_model
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import InferenceError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import CheckpointSource, save_checkpoint
from megatron_infer.runner.speculative.model_drafter import ModelDrafter
from megatron_infer.testing.inspect import inspect

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked, prefix, overlap": {"prefix": "lru", "overlap": True, **FEATURES["chunked"]},
    "swaps": {
        "buffer_size_gb": 15.25 * 12 * 2**10 / 2**30,
        "preemption_mode": "swap",
        "swap_buffer_size_gb": 0.01,
        "overlap": True,
    },
}
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints of a model of attention layers, of one like it with other weights and of a hybrid, and the answers of
    the first and the last in one process."""
    found = tmp_path_factory.mktemp("drafting")
    want = {}
    for kind in ("attention", "hybrid"):
        model = make_model(kind, vocab_size=VOCAB)
        save_checkpoint(model, found / kind)
        want[kind] = {drawing: run(make_engine(model), drawing) for drawing in ("greedy", "sampled")}
        want[f"{kind}, all that a request returns"] = stage_case.generate(stage_case.make_engine(model))
    save_checkpoint(noisy(), found / "guesser")
    (found / "want.json").write_text(json.dumps(want))
    return found


def on_stages(rank: int, size: int, folder: Path, names: list[str]) -> None:
    want = json.loads((folder / "want.json").read_text())
    ranks.new_groups(pipeline_model_parallel_size=size)
    model = build_model(CheckpointSource(folder / "attention"), pipeline_parallel=size)
    for name in names:
        engine = drafting(model, folder / "attention", **SETTINGS[name])
        assert run(engine, "sampled") == want["attention"]["sampled"], name
        check_all_kept(engine)
        check_sizes(engine, is_last=rank == size - 1)
        if name == "swaps":
            assert engine.stats().counters["swapped_in"] > 0
        else:
            check_suspends(engine, want["attention"]["sampled"])


def on_wrong_drafts(rank: int, size: int, folder: Path) -> None:
    want = json.loads((folder / "want.json").read_text())
    ranks.new_groups(pipeline_model_parallel_size=size)
    model = build_model(CheckpointSource(folder / "attention"), pipeline_parallel=size)
    check_guesses(model, folder, want)


def on_stages_beside(rank: int, size: int, folder: Path) -> None:
    want = json.loads((folder / "want.json").read_text())
    ranks.new_groups(pipeline_model_parallel_size=size)
    model = build_model(CheckpointSource(folder / "attention"), pipeline_parallel=size)
    check_saved(model, folder)
    check_failures(model, folder, is_last=rank == size - 1)
    check_no_memory(model, folder, is_last=rank == size - 1)
    check_live(model, want["attention"]["greedy"], is_last=rank == size - 1)
    with pytest.raises(InferenceError, match="draft_model is one of several pipeline stages"):
        make_engine(model, draft=model, collective_timeout_s=60)


def drafting(model: torch.nn.Module, draft: Path, kind: str = "attention", **settings: Any) -> DynamicInferenceEngine:
    return make_engine(model, draft=str(draft), collective_timeout_s=60, **settings)


def check_sizes(engine: DynamicInferenceEngine, *, is_last: bool) -> None:
    """All stages have as many blocks; the last one alone has the draft model's part of them."""
    store = inspect(engine).store
    assert (engine.sizes.draft_block_bytes > 0) == (store.layout.draft_kv_shape is not None) == is_last
    counts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(counts, engine.sizes.num_blocks)
    assert len(set(counts)) == 1, counts


def finish(engine: DynamicInferenceEngine, *, modes: list[str] | None = None) -> dict[str, Any]:
    """Step until all requests have ended, with a suspend in each of these modes on the way; on every rank."""
    done: dict[str, Any] = {}
    while len(done) < len(workload("sampled")[0]):
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if modes and engine.num_steps % 3 == 0:
            engine.suspend(modes.pop())
            engine.resume()
    assert not modes
    return done


def tokens_of(done: dict[str, Any]) -> list[list[int]]:
    return [done[str(index)].outputs[0].token_ids for index in range(len(done))]


def add_all(engine: DynamicInferenceEngine, params: list[SamplingParams]) -> None:
    if engine.rank_group.groups.is_leader:
        for index, prompt in enumerate(workload("sampled")[0]):
            engine.add_request(prompt, params[index], request_id=str(index), stream="final")


def check_suspends(engine: DynamicInferenceEngine, want: list[list[int]]) -> None:
    add_all(engine, workload("sampled")[1])
    assert tokens_of(finish(engine, modes=["persist", "offload", "recompute"])) == want
    check_all_kept(engine)


def check_saved(model: torch.nn.Module, folder: Path) -> None:
    """The last stage's part of a file has the draft model's keys and values."""
    prompts, _ = workload("sampled")
    first = drafting(model, folder / "attention")
    want = [output.outputs[0].token_ids for output in first.generate(prompts, SAMPLED)]
    add_all(first, [SAMPLED] * len(prompts))
    for _ in range(6):
        assert not first.step()
    first.save_requests(folder / "saved", kv=True)
    second = drafting(model, folder / "attention", block_size_tokens=32)
    second.load_requests(folder / "saved")
    assert tokens_of(finish(second)) == want
    assert second.stats().counters["prefill_tokens"] == 0
    check_all_kept(second)


def check_failures(model: torch.nn.Module, folder: Path, *, is_last: bool) -> None:
    """A draft step that raises ends the requests of its step on all stages, and no other."""
    prompts, params = workload("sampled")
    engine = drafting(model, folder / "attention")
    want = [output.outputs[0].token_ids for output in engine.generate(prompts, params)]
    with pytest.MonkeyPatch.context() as patch:
        if is_last:
            patch.setattr(ModelDrafter, "_by_chunk", failing(ModelDrafter._by_chunk, call=3))
        outputs = engine.generate(prompts, params, on_error="return")
    failed = [bool(output.error) for output in outputs]
    assert 0 < sum(failed) < len(failed), failed
    assert all(output.error is None or "raised on pipeline stage 1" in str(output.error) for output in outputs)
    assert [output.outputs[0].token_ids for output in engine.generate(prompts, params)] == want


def check_no_memory(model: torch.nn.Module, folder: Path, *, is_last: bool) -> None:
    """A draft model that cannot be made on the last stage is refused on all of them, which wait for none to read it."""

    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for the draft model")

    with pytest.MonkeyPatch.context() as patch:
        if is_last:
            patch.setattr(draft_model, "build_model", no_memory)
        with pytest.raises(MemoryError if is_last else InferenceError, match="no room for the draft model"):
            drafting(model, folder / "attention")
    assert drafting(model, folder / "attention").generate([[5, 6, 7]], SAMPLED)


def check_guesses(model: torch.nn.Module, folder: Path, want: dict[str, Any]) -> None:
    """Drafts that are wrong change nothing of what requests return, with n-grams before them, adaptive and a hybrid."""
    speculative = {"method": ("ngram", "draft"), "draft_model": str(folder / "guesser"), "num_speculative_tokens": 3}
    for adaptive in (False, True):
        engine = stage_case.make_engine(model, speculative=speculative | {"adaptive": adaptive}, overlap=adaptive)
        stage_case.assert_same(stage_case.generate(engine), want["attention, all that a request returns"], "guesses")
        found = engine.spec_decode_metrics()
        assert found is not None and found.num_accepted < found.num_drafted, found  # adaptive: as measured times decide
        assert adaptive or found.num_accepted > 0
    hybrid = build_model(CheckpointSource(folder / "hybrid"), pipeline_parallel=2)
    engine = drafting(hybrid, folder / "guesser", "hybrid", prefix="lru", overlap=True, **FEATURES["chunked"])
    assert run(engine, "sampled") == want["hybrid"]["sampled"]


def check_live(model: torch.nn.Module, want: list[list[int]], *, is_last: bool) -> None:
    """A live model on the last stage, whose drafts are verified by rejection; the first stage's is not looked at."""
    live = make_model("attention", vocab_size=VOCAB) if is_last else model
    speculative = {"method": "draft", "draft_model": live, "verification": "residual", "adaptive": False}
    engine = make_engine(model, speculative=speculative, overlap=True, collective_timeout_s=60)
    assert run(engine, "greedy") == want
    check_all_kept(engine)
    assert run(engine, "sampled") and engine.spec_decode_metrics().num_accepted > 0


QUICK = ["chunked, prefix, overlap", "swaps"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [QUICK, ["plain"]], ids=["quick", "plain"])
def test_two_stages_keep_all_drafts_of_a_model_like_theirs(folder, names):
    ranks.run_on_ranks(on_stages, 2, folder, names)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_stages_with_saved_requests_failed_steps_and_a_live_model(folder):
    ranks.run_on_ranks(on_stages_beside, 2, folder)


@pytest.mark.timeout(300)
@pytest.mark.long
def test_two_stages_whose_drafts_are_wrong_give_the_answers_of_one_process(folder):
    ranks.run_on_ranks(on_wrong_drafts, 2, folder)


def on_two_by_two(rank: int, size: int, folder: Path) -> None:
    want = json.loads((folder / "want.json").read_text())
    ranks.new_groups(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    model = build_model(CheckpointSource(folder / "attention"), tensor_parallel=2, pipeline_parallel=2)
    engine = drafting(model, folder / "attention", overlap=True, prefix="lru")
    assert run(engine, "sampled") == want["attention"]["sampled"]
    check_all_kept(engine)
    check_sizes(engine, is_last=rank >= size // 2)


@pytest.mark.timeout(300)
@pytest.mark.long
def test_two_by_two_ranks_keep_all_drafts_of_a_model_like_theirs(folder):
    ranks.run_on_ranks(on_two_by_two, 4, folder)
