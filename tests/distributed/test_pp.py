"""Pipeline stages on gloo processes give the tokens and logprobs of one process, whatever their layers are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import gloo_ranks as ranks
import pytest
import stage_case
import torch

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.models.adopt import adopt
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.outputs.request_output import GenerationError
from megatron_infer.scheduler.draft_depth import Proposal
from megatron_infer.testing.inspect import inspect

STAGES = {
    "tied": [[2, 0], [2, 0]],
    "softcapped": [[2, 0], [2, 0]],
    "untied, uneven": [[3, 0], [2, 0]],
    "learned positions": [[1, 0], [1, 0]],
    "first stage without attention": [[0, 3], [2, 1]],
    "last stage without Mamba": [[1, 2], [1, 0]],
    "last stage without either": [[1, 1], [0, 0]],
    "Mamba alone": [[0, 2], [0, 1]],
}
"""Model -> attention and Mamba layers of each of two stages."""
TIGHT = {"buffer_size_gb": 64 * 2**10 / 2**30, "swap_buffer_size_gb": 2**20 / 2**30, "preemption_mode": "swap"}
"""32 blocks of the tied model's stages: its requests want twice as many."""


QUICK = ("tied", "first stage without attention")
"""Models of the first part: both kinds of outputs, and a stage with states alone."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[..., Path]:
    """Saves models (all of them) as checkpoints of one process, with their answers there -> the folder."""
    folder, expected = tmp_path_factory.mktemp("pipeline"), {}

    def save(*names: str) -> Path:
        for name in names or stage_case.MODELS:
            if name not in expected:
                stage_case.save_model(folder, name)
                expected[name] = stage_case.generate(stage_case.make_engine(stage_case.load_model(folder, name)))
                drawn = {tuple(sample[0]) for answer in expected[name] for sample in answer[2:]}
                assert len(drawn) > 5, "too alike to compare"
        stage_case.write_json(folder / "expected.json", expected)
        return folder

    return save


def expected_of(folder: Path) -> dict:
    return json.loads((folder / "expected.json").read_text())


def run_stages(rank: int, size: int, folder: Path, part: int) -> None:
    """part: 0: some models with every other set of features, and failures; 1: all else."""
    expected = expected_of(folder)
    for number, name in enumerate(stage_case.MODELS):
        if part == 0 and name not in QUICK:
            continue
        model = stage_case.load_model(folder, name, pipeline_parallel=size)
        adopted = adopt(model)
        assert (adopted.is_first_stage, adopted.is_last_stage) == (rank == 0, rank == size - 1)
        assert [adopted.shape.num_attention_layers, len(adopted.ssm_specs)] == STAGES[name][rank], name
        features_of_part = [*stage_case.FEATURES][(number + part) % 2 :: 2]
        for features in features_of_part if name in QUICK else stage_case.FEATURES:
            engine = stage_case.make_engine(model, features)
            assert inspect(engine).scheduler.num_micro_batches == size + engine.config.overlap
            where = f"{name}, {features}"
            stage_case.assert_same(stage_case.generate(engine), expected[name], where)
            stage_case.assert_same(stage_case.generate_over_suspends(engine), expected[name], f"{where}, suspended")
            if name == "tied" and features != "plain":
                assert engine.stats().counters["prefix_hits"] > 5
        if name == ("tied" if part == 0 else "last stage without Mamba"):
            check_drafts(model, expected[name])
        if name == "tied" and part == 0:
            check_swaps(model, expected[name])
            check_failures(model, expected[name], rank, victims=(1,))
            check_out_of_memory(model, expected[name], [rank == 0])
        if name == "tied" and part == 1:
            check_failures(model, expected[name], rank, victims=(0,))
            check_out_of_memory(model, expected[name], [rank == 1])
        save_checkpoint(model, folder / f"{name} of {size} stages")


class Known:
    """Drafts what requests are about to draw; every other time the second draft is wrong."""

    def __init__(self, expected) -> None:
        asked = zip(stage_case.requests(), expected, strict=True)
        self._sequences = [ids + sample[0] for (ids, _), answer in asked for sample in answer[2:]]

    def propose(self, request, most):
        length = len(request.tokens)
        known = next((one for one in self._sequences if one[:length] == request.tokens), [])[length : length + most]
        return Proposal(known[:1] + [(token + 1) % 128 for token in known[1:]] if length % 2 else known)


def check_drafts(model, expected, *, overlaps=(False, True)) -> None:
    """Every stage verifies the same drafts, and keeps the same of them and of the states behind them."""
    for overlap in overlaps:
        drafts = {"num_speculative_tokens": 3, "adaptive": False}
        engine = stage_case.make_engine(model, speculative=drafts, overlap=overlap, enable_prefix_caching=not overlap)
        inspect(engine).drafts.proposer = Known(expected)
        stage_case.assert_same(stage_case.generate(engine), expected, f"drafts, overlap={overlap}")
        stage_case.assert_same(stage_case.generate_over_suspends(engine), expected, "drafts, suspended")
        found = engine.spec_decode_metrics()
        assert found is not None and 10 < found.num_accepted < found.num_drafted, found


def check_swaps(model, expected) -> None:
    """Requests give way, to the host and back, on all stages alike."""
    engine = stage_case.make_engine(model, **TIGHT)
    assert engine.sizes.num_usable_blocks == 31
    stage_case.assert_same(stage_case.generate(engine), expected, "swapped")
    counters = engine.stats().counters
    assert counters["swapped_out"] > 2 and counters["swapped_in"] > 2, counters


def failing(function, *, call):
    """`function`, which raises when it is called for the `call`-th time."""
    calls = itertools.count(1)

    def wrapped(*arguments, **options):
        if next(calls) == call:
            raise RuntimeError("out of order")
        return function(*arguments, **options)

    return wrapped


def check_failures(model, expected, rank, victims) -> None:
    """A forward that raises on any stage ends the requests of its step on all of them, and no other."""
    for victim in victims:
        engine = stage_case.make_engine(model)
        if rank == victim:
            inspect(engine).adopted.hidden = failing(inspect(engine).adopted.hidden, call=6)
        answers = stage_case.generate(engine)
        failed = [bool(answer[0]) for answer in answers]
        assert 0 < sum(failed) < len(answers), f"stage {victim}: {failed}"
        assert all(f"raised on pipeline stage {victim}" in answer[0] for answer in answers if answer[0])
        for answer, want in zip(answers, expected, strict=True):
            if not answer[0]:
                stage_case.assert_same(answer, want, f"beside a failure on stage {victim}")
        gathered = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, failed)
        assert all(one == failed for one in gathered)


def check_out_of_memory(model, expected, victims, *, most=11) -> None:
    """A step for which a stage has no memory is tried again by all stages with fewer tokens; answers are the same.

    victims: whether this rank is the one without memory, for each engine. A step that fails with one token ends.
    """
    for is_victim in victims:
        engine, room = stage_case.make_engine(model, "chunks, prefix cache, overlap"), [most]
        hidden = inspect(engine).adopted.hidden

        def limited(step, *arguments, room=room, hidden=hidden):
            if step.num_tokens > room[0]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return hidden(step, *arguments)

        if is_victim:
            inspect(engine).adopted.hidden = limited
        stage_case.assert_same(stage_case.generate(engine), expected, "with less memory")
        figures = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(figures, (engine.figures().retracted_steps, engine.num_steps))
        assert figures[0][0] > 0 and len(set(figures)) == 1, figures
        room[0] = 0
        params = SamplingParams(max_tokens=2)
        [output] = engine.generate([[5, 6, 7]], params, on_error="return")
        assert "ran out of memory on pipeline stage" in str(output.error) and output.outputs[0].finish_reason == "error"
        with pytest.raises(GenerationError, match="ran out of memory on pipeline stage"):
            engine.generate([[5, 6, 7]], params)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_two_stages_give_the_tokens_and_logprobs_of_one_process(saved, part: int):
    """Checkpoints of one process, loaded by two; micro-batches in flight, groups, suspends in every mode, failures.

    And back: what two stages saved is what one process loads.
    """
    folder = saved(*QUICK) if part == 0 else saved()
    ranks.run_on_ranks(run_stages, 2, folder, part)
    for name in QUICK if part == 0 else stage_case.MODELS:
        whole, back = (stage_case.load_model(folder, name + end) for end in ("", " of 2 stages"))
        for (key, one), (_, other) in zip(whole.named_parameters(), back.named_parameters(), strict=True):
            assert torch.equal(one, other), f"{name}: {key}"


def run_four(rank: int, size: int, folder: Path, part: int) -> None:
    expected = expected_of(folder)
    cases = (
        ("untied, uneven", {"pipeline_parallel": 4}),
        ("tied", {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("untied, uneven", {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("first stage without attention", {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("last stage without Mamba", {"pipeline_parallel": 4}),
    )
    for name, parallel in cases[:2] if part == 0 else cases[2:]:
        ranks.new_groups(**{key.replace("_", "_model_") + "_size": size for key, size in parallel.items()})
        model = stage_case.load_model(folder, name, **parallel)
        engine = stage_case.make_engine(model, "chunks, prefix cache, overlap")
        stage_case.assert_same(stage_case.generate(engine), expected[name], f"{name}, {parallel}")
        if name == "untied, uneven" and "tensor_parallel" not in parallel:
            check_failures(model, expected[name], rank, victims=(1,))
        if name == "tied":  # both ranks of the last stage
            check_out_of_memory(model, expected[name], [inspect(engine).adopted.is_last_stage])


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize("part", [0, 1])
def test_four_ranks_as_two_by_two_or_as_four_stages_give_the_tokens_of_one_process(saved, part: int):
    ranks.run_on_ranks(run_four, 4, saved(), part)
