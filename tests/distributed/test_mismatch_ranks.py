"""The mismatch meter over ranks: one process's figures on all of them, and one place, or a reason why there is none."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import mismatch_case as case
import pytest
import torch
from engine_ranks import weights_of
from gloo_ranks import new_groups, run_on_ranks, stage_ends
from session_case import make_session

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.models.adopt import adopt
from megatron_infer.rl.mismatch_layers import MismatchCause
from megatron_infer.rl.mismatch_meter import MismatchMeter
from megatron_infer.rl.tool_rollouts import run_conversations
from megatron_infer.rl.updates import apply
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.inspect import run_one_by_one
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

MODEL: dict[str, Any] = {"num_layers": 2, "init_method_std": 0.2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2, sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "EP2": {"expert_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
}
SHIMMED = ("TP2, sequence parallel", "EP2")


def on_layouts(rank: int, size: int, folder: Path, names: list[str]) -> None:
    weights, want = torch.load(folder / "one.pt")
    for name in names:
        sizes = LAYOUTS[name]
        new_groups(**{key: value for key, value in sizes.items() if key.endswith("_size")})
        stages = stage_ends(rank, size) if name == "PP2" else {}
        model = tiny_gpt(**MODEL, **sizes, **stages, **(EXPERTS if name == "EP2" else {}))
        if name == "EP2":
            share_what_is_not_expert(model)
        else:
            apply(model, weights)
        settings = {"collective_timeout_s": 60, "check_invariants": False}
        session = make_session(model, settings=settings, meter={"share": 0.5})
        # megatron-core spreads tokens over ranks with torch.cuda, whose place a CPU has to take
        with cpu_shim(1) if name in SHIMMED else contextlib.nullcontext():
            check(name, rank, session, want)
        session.engine.rank_group.lockstep.close()


def share_what_is_not_expert(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" not in name:
                torch.distributed.broadcast(parameter, 0)


def check(name: str, rank: int, session: Any, want: int) -> None:
    quiet = case.rollout(session, MismatchMeter(session, share=0.5))
    assert not quiet.is_alarm and quiet.figures.num_tokens == want, (name, str(quiet))
    check_session_meter(session, rank, want)
    meter = MismatchMeter(session, share=1.0)
    if name == "PP2":
        if rank == 1:
            attend = session.model.decoder.layers[0].self_attention.fused.attend
            attend.spec = case.dataclasses.replace(attend.spec, scale=2 * attend.spec.scale)
            run_one_by_one(session.engine)
        report = case.rollout(session, meter)
        assert report.is_alarm and report.place.cause is MismatchCause.UNKNOWN and "pipeline" in report.place.note
        return
    if name == "EP2":
        case.router_order(None, session)
        place = case.rollout(session, meter).place
        assert (place.cause, place.kind, place.layer) == (MismatchCause.LAYER, "moe", 1), str(place)
        return
    if rank == 1:  # the others see it in what comes back from this one, or in its part of the vocabulary
        case.stale_copy(None, session, weight="output_layer.weight")
    place = case.rollout(session, meter).place
    assert (place.cause, place.kind) == (MismatchCause.LAYER, "output"), (name, str(place))
    assert place.stale_copies
    session.engine.refresh_weights()
    assert not case.rollout(session, meter).is_alarm
    attend = session.model.decoder.layers[1].self_attention.fused.attend
    if rank == 0:
        attend.spec = case.dataclasses.replace(attend.spec, scale=2 * attend.spec.scale)
        run_one_by_one(session.engine)
    place = case.rollout(session, meter).place
    assert (place.cause, place.kind, place.layer) == (MismatchCause.LAYER, "attention", 1), (name, str(place))


def check_session_meter(session: Any, rank: int, want: int) -> None:
    """The session's own meter: the leader's groups count, also where the leader alone has any; no rank waits."""
    assert session.meter.last.figures.num_tokens == want and not session.meter.last.is_alarm
    one = SamplingParams(n=2, max_tokens=3, seed=1, ignore_eos=True)
    with session.generating() as roll:
        if rank == 0:
            groups = run_conversations(roll, case.prompts(), one, lambda conversation, turn: [9])
            session.engine.dismiss()
        else:
            session.engine.follow()
    assert session.meter.num_windows == 2 and not session.meter.last.is_alarm
    assert session.meter.last.figures.num_tokens > 0 and (rank or len(groups) == 3)
    with pytest.raises(ZeroDivisionError) if rank == 1 else contextlib.nullcontext(), session.generating():
        1 / (1 - rank)  # on one rank alone
    assert session.meter.num_windows == 2


@pytest.mark.timeout(200)
@pytest.mark.long
@pytest.mark.parametrize("part", [0, 1])
def test_all_ranks_have_the_figures_and_the_place_of_one_process(tmp_path: Path, part: int) -> None:
    torch.set_num_threads(1)
    model = tiny_gpt(**MODEL)
    adopt(model)
    weights = weights_of(model)
    session = make_session(model, settings={"check_invariants": False})
    want = case.rollout(session, MismatchMeter(session, share=0.5)).figures.num_tokens
    assert 0 < want < 144
    torch.save((weights, want), tmp_path / "one.pt")
    run_on_ranks(on_layouts, 2, tmp_path, [*LAYOUTS][part::2])


def on_drifted_copies(rank: int, size: int, folder: Path) -> None:
    new_groups(**LAYOUTS["EP2"])
    model = tiny_gpt(**MODEL, **LAYOUTS["EP2"], **EXPERTS)
    share_what_is_not_expert(model)
    with torch.no_grad():
        if rank == 1:
            model.output_layer.weight[5:9] += 1.0
    settings = {"collective_timeout_s": 20, "check_invariants": False}
    session = make_session(model, settings=settings, meter={"share": 1.0})
    how = SamplingParams(n=2, max_tokens=8, seed=1, ignore_eos=True)
    with cpu_shim(1):
        for _ in range(2):
            with session.generating() as roll:
                roll.generate(case.prompts(), how)
            assert session.meter.last.is_alarm and session.meter.last.place is not None
    session.engine.rank_group.lockstep.close()


@pytest.mark.timeout(100)
def test_copies_that_have_drifted_apart_are_an_alarm_on_all_ranks(tmp_path: Path) -> None:
    """Each rank has figures of its own then; all search the leader's worst sequence, or none does."""
    run_on_ranks(on_drifted_copies, 2, tmp_path)
