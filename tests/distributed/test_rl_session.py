"""Sessions of several ranks: a trainer's layouts generate, score and switch as one process does, or fail as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import weights_of
from gloo_ranks import new_groups, run_on_ranks, stage_ends
from session_case import PARAMS, make_session, prompts
from trainers import MegatronTrainer

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import SwitchFailed
from megatron_infer.memory.device import Device
from megatron_infer.rl.scoring import VocabParallelLogprob
from megatron_infer.rl.session import RolloutSession
from megatron_infer.rl.updates import apply
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

pytestmark = pytest.mark.filterwarnings("ignore:.*leaf Tensor:UserWarning", "ignore:.*deprecated:FutureWarning")
STEPS = 2
SHORT = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
MODEL: dict[str, Any] = {"num_layers": 4, "init_method_std": 0.2, "qk_layernorm": True}
TP: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP, CP = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2, sequence parallel": TP,
    "PP2": PP,
    "DP2, parameters gathered late": {},
    "CP2": CP,
    "CP2 x EP2": CP | {"expert_model_parallel_size": 2},
    "TP2 x CP2": TP | CP,
    "PP2 x CP2": PP | CP,
}
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gpt": (MODEL, list(LAYOUTS)[:4]),
    "experts": (MODEL | EXPERTS | {"num_layers": 2}, ["CP2", "CP2 x EP2"]),
    "gpt, four ranks": (MODEL, ["TP2 x CP2", "PP2 x CP2"]),
}


def rounds(trainer: MegatronTrainer, session: Any, rows: slice = slice(None)) -> dict[str, list[Any]]:
    """Generate, score and train by turns."""
    model = session.model
    found: dict[str, list[Any]] = {"answers": [], "logprobs": [], "scores": [], "losses": []}
    trainer.model.train()
    for step in range(STEPS + 1):
        before = flags_of(trainer.model)
        with session.generating() as roll:
            groups = roll.generate(prompts(), PARAMS)
            sequences = [group.prompt_ids + group.samples[0].token_ids for group in groups]
            assert not model.training
            scores = score(session, sequences)
        assert flags_of(trainer.model) == before
        found["answers"].append([group.samples[0].token_ids for group in groups])
        found["logprobs"].append([group.samples[0].raw_logprobs for group in groups])
        found["scores"].append([own.tolist() for own in scores])
        if step < STEPS:
            with session.training():
                found["losses"].append(trainer.step(step, rows))
            assert session.update_weights().version == step + 1
    return found


def check_starts(session: Any) -> None:
    """Scores from a start on, and their gradients, are those of the end of all scores."""
    from megatron_infer.testing.cpu_shim import cpu_shim

    sequences, starts = [[*prompt, 1, 2, 3] for prompt in prompts()], [len(prompt) for prompt in prompts()]
    parameters = list(session.model.parameters())
    can_grad = session.engine.rank_group.groups.pp is None
    with cpu_shim(1), session.training():
        whole = session.score(sequences, grad=can_grad)
        ends = torch.cat([own[first - 1 :] for own, first in zip(whole, starts, strict=True)])
        got = torch.cat(session.score(sequences, start=starts, grad=can_grad))
        assert len(got) == 3 * len(sequences)
        torch.testing.assert_close(got, ends, atol=2e-6, rtol=0)
        if can_grad:
            want = torch.autograd.grad(ends.square().sum(), parameters)
            for mine, its in zip(torch.autograd.grad(got.square().sum(), parameters), want, strict=True):
                torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)


def score(session: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """megatron-core spreads tokens over ranks with torch.cuda, whose place a CPU has to take."""
    from megatron_infer.testing.cpu_shim import cpu_shim

    with cpu_shim(1):
        return session.score(sequences)


def flags_of(model: torch.nn.Module) -> list[Any]:
    named = [(module.training, getattr(module, "sequence_parallel", None)) for module in model.modules()]
    return [*named, sum(len(module._forward_pre_hooks) for module in model.modules())]


def on_layouts(rank: int, size: int, folder: Path, kind: str) -> None:
    from megatron.core import parallel_state

    if size == 2:
        check_split_logprobs(rank)
    weights, want = torch.load(folder / "one.pt")
    settings, names = KINDS[kind]
    for name in names:
        sizes = LAYOUTS[name]
        groups = {key: value for key, value in sizes.items() if key.endswith("_size")}
        new_groups(**groups)
        stages = stage_ends(parallel_state.get_pipeline_model_parallel_rank(), 2) if "PP2" in name else {}
        model = tiny_gpt(**settings, **sizes, **stages)
        apply(model, weights)
        late = "late" in name
        trainer = MegatronTrainer(model, distributed=True, overlap=late, smooth=True)
        session = make_session([trainer.model], trainer.optimizer, settings={"collective_timeout_s": 60})
        check_starts(session)
        replicated = late
        got = rounds(trainer, session, slice(rank, rank + 1) if replicated else slice(None))
        assert got["answers"] == want["answers"], name
        for key in ("logprobs", "scores"):
            for mine, its in zip(got[key], want[key], strict=True):
                for a, b in zip(mine, its, strict=True):
                    assert (torch.tensor(a) - torch.tensor(b)).abs().max() < 5e-4, (name, key)
        if not replicated and got["losses"][0] is not None:
            torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(want["losses"]), atol=1e-4, rtol=0)
        for group in {session.engine.rank_group, session.ranks}:
            group.lockstep.close()


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_of_a_trainer_generates_and_trains_like_one_process(tmp_path: Path, kind: str) -> None:
    torch.set_num_threads(1)
    model = tiny_gpt(**KINDS[kind][0])
    weights = weights_of(model)
    trainer = MegatronTrainer(model, distributed=True, smooth=True)
    want = rounds(trainer, make_session([trainer.model], trainer.optimizer))
    assert want["answers"][0] != want["answers"][-1], "the steps change nothing"
    torch.save((weights, want), tmp_path / "one.pt")
    run_on_ranks(on_layouts, 4 if "four" in kind else 2, tmp_path, kind)


FAULTS = {
    "step in flight": "suspend",
    "release the cache": "suspend",
    "rebuilding rotary": "update",
    "the weights' checksums": "update",
    "allocate the cache": "resume",
    "checking whether weights changed": "resume",
}


def no_room_at(what: str) -> Any:
    left = [1]

    def observe(happening: str) -> None:
        if what in happening and left[0]:
            left[0] = 0
            raise MemoryError("no room")

    return observe


def check_split_logprobs(rank: int) -> None:
    """Values and gradients of a vocabulary in two parts, of which the second ends in padding."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(2, 5, 16, generator=generator).mul_(4).requires_grad_()
    targets = torch.randint(0, 13, (2, 5), generator=generator)
    weights = torch.randn(2, 5, generator=generator)
    want = torch.log_softmax(whole[..., :13], -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    (want * weights).sum().backward()
    part = whole.detach().chunk(2, -1)[rank].clone().requires_grad_()
    got = VocabParallelLogprob.apply(part, targets - 8 * rank, 5 if rank else 8, torch.distributed.group.WORLD)
    (got * weights).sum().backward()
    torch.testing.assert_close(got, want.detach(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(part.grad, whole.grad.chunk(2, -1)[rank], atol=1e-6, rtol=1e-6)


def check_options_of_other_memory(rank: int, size: int) -> None:
    """Ranks with other free memory derive the same options."""
    new_groups(tensor_model_parallel_size=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "available_bytes", lambda self: (6 + 2 * rank) << 30)
        session = RolloutSession(tiny_gpt(**MODEL, tensor_model_parallel_size=size), None, meter=None)
    assert session.engine.config.buffer_size_gb == 0.75  # a quarter of this rank's half of the smaller figure
    session.engine.rank_group.lockstep.close()


def on_faults(rank: int, size: int, folder: Path, every: int) -> None:
    """every: of how many faults one is tried, of either rank another."""
    check_options_of_other_memory(rank, size)
    one, other = torch.load(folder / "pair.pt")
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        new_groups(**{name: size})
        in_stages = name.startswith("pipeline")
        stages = stage_ends(rank, size) if in_stages else {}
        model = tiny_gpt(**MODEL, **stages, **{name: size})
        apply(model, one)
        session = make_session(model, settings={"collective_timeout_s": 60}, suspend_mode="recompute")
        want = answers(session)
        for victim in range(size):
            for what in list(FAULTS)[victim % every :: 2 * every if in_stages else every]:
                fails_as_one(session, other, what, victim, rank)
                assert answers(session) == want, (name, what, victim)
            stream, broken = broken_stream(other, victim, rank == victim)
            with pytest.raises(SwitchFailed, match=f"rank {victim} failed in the update at {broken}") as caught:
                session.transition(stream)
            assert caught.value.tensor == broken
            assert answers(session) == want and session.weight_version == 0
        session.transition(dict(other))
        assert answers(session) != want and session.weight_version == 1
        session.engine.rank_group.lockstep.close()


def fails_as_one(session: Any, other: dict[str, torch.Tensor], what: str, victim: int, rank: int) -> None:
    """A transition with a fault on one rank raises on both, and both are as before."""
    observers, phase = session.engine.lifecycle.observers, FAULTS[what]
    if rank == victim:
        observers.append(no_room_at(what))
    with pytest.raises(SwitchFailed, match=f"rank {victim} failed in the {phase}.*no room") as caught:
        session.transition(dict(other))
    assert (caught.value.rank, caught.value.phase) == (victim, phase), what
    assert "the engine is RUNNING with weights of version 0" in str(caught.value), str(caught.value)
    session.engine.verify_weights()
    observers.clear()


def answers(session: Any) -> list[list[int]]:
    with session.generating() as roll:
        return [group.samples[0].token_ids for group in roll.generate(prompts(), SHORT)]


def broken_stream(state: dict[str, torch.Tensor], victim: int, breaks: bool) -> tuple[Any, str]:
    """Tensors of the whole model, one of which has another shape if `breaks`; the victim has its layer."""
    broken = f"decoder.layers.{3 * victim}.self_attention.linear_qkv.weight"

    def stream() -> Any:
        for name, tensor in state.items():
            yield name, tensor[:7] if breaks and name == broken else tensor

    return stream(), broken


@pytest.mark.timeout(200)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_fault_on_either_rank_in_any_phase_is_undone_on_both(tmp_path: Path, every: int) -> None:
    models = [tiny_gpt(**MODEL, seed=seed) for seed in (0, 7)]
    pair = [weights_of(model) for model in models]
    torch.save(pair, tmp_path / "pair.pt")
    run_on_ranks(on_faults, 2, tmp_path, every)
