"""Two context-parallel ranks score and train as one process, which has whole sequences; what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks
from model_kinds import LATENT
from session_case import make_session, prompts
from trainers import MegatronTrainer
from training_case import assert_equal, gradients, loss_over, sequences_of

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, LockstepError, OtherRankFailed, SwitchFailed, WrongState
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.context_parallel import gather_positions, take_own
from megatron_infer.models.router_replay import replay_routing
from megatron_infer.models.trainer_state import wrapper_chain
from megatron_infer.models.trainer_step import reduce_gradients
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import DELTA, EXPERTS, tiny_gpt, tiny_hybrid

pytestmark = pytest.mark.filterwarnings("ignore:.*leaf Tensor:UserWarning", "ignore:.*deprecated:FutureWarning")
MODEL: dict[str, Any] = {"position_embedding_type": "rope", "init_method_std": 0.2, "qk_layernorm": True}
KINDS: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned positions": {"position_embedding_type": "learned_absolute", "max_sequence_length": 13},
    "window and sinks": {"window_size": (3, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"},
    "latent": LATENT | {"qk_layernorm": True},
    "hybrid": {"pattern": "M*-M"},
}
if mcore.version() >= (0, 19):  # 0.16 refuses them
    KINDS["delta"] = DELTA
LENGTHS = [13, 11, 5, 3, 2]
"""None is a multiple of 4, and of short ones a rank has no position that is scored."""


def model_of(num_ranks: int, **settings: Any) -> Any:
    new_groups(context_parallel_size=num_ranks)
    make = tiny_hybrid if "pattern" in settings else tiny_gpt
    return make(context_parallel_size=num_ranks, **MODEL | settings)


def over_both(run: Any, **settings: Any) -> tuple[Any, Any]:
    """run(model) of context-parallel ranks, and of whole sequences."""
    return run(model_of(2, **settings)), run(model_of(1, **settings))


def close(session: Any) -> None:
    for group in {session.engine.rank_group, session.ranks}:
        group.lockstep.close()


def differentiated(model: Any) -> tuple[list[list[int]], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Drawn tokens, scores, and the scores' gradients averaged over the ranks."""
    session = make_session(model, settings={"max_sequence_length": 13})
    sequences = sequences_of(LENGTHS)
    with session.generating() as roll:
        groups = roll.generate(sequences_of([7, 3, 2]), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    with session.training():
        scores = session.score(sequences, grad=True, start=[1, 4, 1, 2, 1], micro_batch_tokens=26)
        (torch.cat(scores).square().sum() / 100).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= 2
    close(session)
    return [group.samples[0].token_ids for group in groups], [score.detach() for score in scores], gradients(model)


def on_kinds(rank: int, size: int, folder: Path, names: list[str]) -> None:
    for name in names:
        (drawn, scores, grads), (whole_drawn, whole_scores, whole_grads) = over_both(differentiated, **KINDS[name])
        assert drawn == whole_drawn, name
        for got, want in zip(scores, whole_scores, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert_equal(grads, whole_grads, tolerance=1e-5)
    logits = over_both(packed_logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)


def packed_logits(model: Any) -> torch.Tensor:
    """Of two sequences end to end, each divided alone -> of all positions, in their order."""
    lengths, cp = [12, 8], model.pg_collection.cp
    sequences = [torch.tensor(ids) for ids in sequences_of(lengths)]
    starts = torch.tensor([0, 12, 20], dtype=torch.int32)
    packed = SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=12,
        max_seqlen_kv=12,
        cp_group=None,
    )
    own = [torch.arange(length) if cp.size() == 1 else take_own(torch.arange(length), cp) for length in lengths]
    ids = torch.cat([one[places] for one, places in zip(sequences, own, strict=True)])
    with torch.no_grad():
        logits = model(ids[None], torch.cat(own)[None], None, packed_seq_params=packed)[0]
    parts = logits.split([len(places) for places in own])
    return torch.cat([part if cp.size() == 1 else gather_positions(part, cp) for part in parts])


QUICK = ["rope", "hybrid"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([name for name in KINDS if name not in QUICK], marks=pytest.mark.long)],
    ids=["quick", "rest"],
)
def test_scores_and_gradients_are_those_of_whole_sequences(tmp_path: Path, names: list[str]) -> None:
    run_on_ranks(on_kinds, 2, tmp_path, names)


def exact(model: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Exact scores are the engine's log probabilities to the bit."""
    trainer = MegatronTrainer(model, distributed=False)
    session = make_session(trainer.model, settings={"batch_invariant": True})
    with session.generating() as roll:
        groups = roll.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    samples = [group.samples[0] for group in groups]
    sequences, starts = [sample.ids for sample in samples], [len(sample.prompt_ids) for sample in samples]
    with cpu_shim(4), session.training():
        report = session.score_and_backward(sequences, lambda scores, _: torch.cat(scores).sum(), start=starts)
        reduce_gradients(wrapper_chain(trainer.model), num_ranks=2)
    for score, sample in zip(report.scores, samples, strict=True):
        assert score.tolist() == sample.raw_logprobs
    close(session)
    return report.scores, gradients(model)


def replayed(model: Any) -> list[torch.Tensor]:
    """Scores by the experts that rolled out, of routers that have moved since."""
    session = make_session(model, meter={"share": 1.0})
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True, return_routing=True)
    with session.generating() as roll:
        groups = roll.generate([[5, 6, 7, 8, 9], list(range(20, 60)), [3, 99]], params)
    with session.generating() as roll:
        roll.generate([list(range(4, 24))] * 40, SamplingParams(n=2, max_tokens=20, ignore_eos=True))
    assert session.meter.last is not None and not session.meter.last.is_alarm
    samples = [group.samples[0] for group in groups]
    sequences = [sample.ids for sample in samples]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter += torch.randn(parameter.shape, generator=generator)
    with cpu_shim(1), replay_routing(model, [sample.routing for sample in samples], sequences):
        scores = session.score(sequences, micro_batch_tokens=50)
    with cpu_shim(1):
        own = session.score(sequences)
    assert any((a - b).abs().max() > 0.1 for a, b in zip(scores, own, strict=True)), "the routers have not moved"
    close(session)
    return scores


def check_twins() -> None:
    """A trainer whose model generates between its steps takes the steps of one whose model does not, to the bit."""
    new_groups(context_parallel_size=2)
    ours, twin = (
        MegatronTrainer(tiny_gpt(context_parallel_size=2, **MODEL), distributed=True, overlap=True) for _ in range(2)
    )
    session = make_session(ours.model, ours.optimizer)
    for step in range(2):
        with session.generating() as roll:
            assert len(roll.generate(prompts(), SamplingParams(max_tokens=4, ignore_eos=True))) == 3
        with session.training():
            assert ours.step(step) == twin.step(step)
        session.update_weights()
    for trainer in (ours, twin):
        trainer.model.disable_forward_pre_hook()  # gathers what its next forward would gather
    assert all(map(torch.equal, ours.model.parameters(), twin.model.parameters()))
    close(session)


def on_modes(rank: int, size: int, folder: Path) -> None:
    check_twins()
    (scores, grads), (whole_scores, whole_grads) = over_both(exact)
    assert all(map(torch.equal, scores, whole_scores))
    assert_equal(grads, whole_grads, tolerance=1e-6)
    for got, want in zip(*over_both(replayed, **EXPERTS), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_twins_exact_mode_and_replayed_experts_hold_over_context_parallel_ranks(tmp_path: Path) -> None:
    run_on_ranks(on_modes, 2, tmp_path)


def on_faults(rank: int, size: int, folder: Path) -> None:
    sequences = sequences_of([10, 10, 10])
    session = make_session(model_of(2))
    with session.training(), pytest.raises((ConfigError, OtherRankFailed), match=r"ranks \[0, 1\].*no DDP.*dp_cp"):
        session.score_and_backward(sequences, loss_over(sequences))
    close(session)
    trainer = MegatronTrainer(model_of(2), distributed=False)
    session = make_session(trainer.model)

    def breaks(scores: list[torch.Tensor], indices: list[int]) -> torch.Tensor:
        if rank == 1 and indices == [1]:
            raise KeyError("reward")
        return torch.cat(scores).sum()

    with cpu_shim(4), session.training():
        with pytest.raises(LockstepError, match="other arguments on rank 1"):
            session.score(sequences_of([10 + rank]))
        with pytest.raises(KeyError if rank == 1 else OtherRankFailed, match="reward") as failure:
            session.score_and_backward(sequences, breaks, micro_batch_tokens=12)
        if rank == 0:
            assert "rank 1: KeyError" in str(failure.value)
        with pytest.raises(WrongState, match="in micro-batch 2 of 3"):
            session.step(trainer.optimizer)
        session.zero_grad(trainer.optimizer)
        session.score_and_backward(sequences, loss_over(sequences))
        assert session.step(trainer.optimizer).weight_version == 1
    before = {name: parameter.detach().clone() for name, parameter in session.model.named_parameters()}
    source = {name: parameter + 1.0 for name, parameter in before.items()}
    with session.generating() as roll:
        with pytest.raises(SwitchFailed, match=r"rank 1 failed in the update.*another"):
            session.transition({"another": torch.zeros(1)} if rank else source)
        assert all(torch.equal(before[name], parameter) for name, parameter in session.model.named_parameters())
        assert len(roll.generate(prompts(), SamplingParams(max_tokens=2))) == 3
        assert session.transition(source).update.version == 2
    assert all(torch.equal(source[name], parameter) for name, parameter in session.model.named_parameters())
    close(session)


@pytest.mark.timeout(200)
def test_an_error_of_one_context_parallel_rank_is_one_of_all(tmp_path: Path) -> None:
    run_on_ranks(on_faults, 2, tmp_path)
