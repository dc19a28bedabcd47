"""Over several ranks a session's gradients and steps are those of Megatron's own; errors are errors of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import training_case
from gloo_ranks import new_groups, run_on_ranks, stage_ends
from session_case import make_session
from trainers import MegatronTrainer, TorchTrainer
from training_case import assert_equal, error_of, gradients, loss_over, megatron_backward, sequences_of

from megatron_infer.errors import ConfigError, InvalidPrompt, LockstepError, OtherRankFailed, WrongState
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.filterwarnings("ignore:.*leaf Tensor:UserWarning", "ignore:.*deprecated:FutureWarning")
EXPERTS = training_case.EXPERTS | {"num_layers": 4}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "qk_layernorm": True}
PP = {"pipeline_model_parallel_size": 2, "share_embeddings_and_output_weights": True, "num_layers": 4}
CP = {"context_parallel_size": 2, "position_embedding_type": "rope"}
EP = {"expert_model_parallel_size": 2}
EVEN, EVEN_GROUPS, EVEN_LIMIT = [12, 12, 8, 8, 8], [[0, 1], [2, 3, 4]], 24
ONE, ONE_GROUPS = [10, 10, 10], [[0], [1], [2]]
QUICK = ("distributed optimizer, experts", "PP2")
CASES: dict[str, Any] = {
    "DDP": ({}, lambda m: MegatronTrainer(m, distributed=False, smooth=True)),
    "DDP reducing in overlap": (
        {},
        lambda m: MegatronTrainer(m, distributed=True, overlap=True, smooth=True),
    ),
    "distributed optimizer, experts": (EXPERTS, lambda m: MegatronTrainer(m, distributed=True, smooth=True)),
    "torch DDP": ({}, lambda m: TorchTrainer(m, ddp=True, smooth=True)),
    "TP2, sequence parallel": (TP, lambda m: MegatronTrainer(m, distributed=True, smooth=True)),
    "EP2, experts": (EP | EXPERTS, lambda m: MegatronTrainer(m, distributed=True, smooth=True)),
    "TP2, experts": (TP | EXPERTS, lambda m: MegatronTrainer(m, distributed=False, smooth=True)),
    "PP2": (PP, lambda m: MegatronTrainer(m, distributed=True, smooth=True)),
    "PP2 reducing in overlap, experts": (
        PP | EXPERTS,
        lambda m: MegatronTrainer(m, distributed=True, overlap=True, smooth=True),
    ),
    "CP2": (CP, lambda m: MegatronTrainer(m, distributed=False, smooth=True)),
    "CP2, torch DDP": (CP, lambda m: TorchTrainer(m, ddp=True, smooth=True)),
    "CP2, distributed optimizer, experts": (
        CP | EXPERTS,
        lambda m: MegatronTrainer(m, distributed=True, smooth=True),
    ),
    "CP2 x EP2": (CP | EP | EXPERTS, lambda m: MegatronTrainer(m, distributed=False, smooth=True)),
}
PARTS: dict[str, Any] = {
    "quick": list(QUICK),
    "CP2": ["CP2"],
    "rest": pytest.param([name for name in CASES if name not in (*QUICK, "CP2")], marks=pytest.mark.long),
}


def model_of(settings: dict[str, Any], rank: int) -> Any:
    stages = stage_ends(rank, 2) if "pipeline_model_parallel_size" in settings else {}
    with cpu_shim(2):  # tied embeddings of two stages are moved to CUDA
        return tiny_gpt(**settings, **stages)


def is_split(settings: dict[str, Any]) -> bool:
    return any(name.endswith("parallel_size") for name in settings)


def on_ranks(rank: int, size: int, folder: Path, names: list[str]) -> None:
    from megatron.core.distributed import finalize_model_grads

    for name in names:
        settings, make = CASES[name]
        new_groups(**{key: value for key, value in settings.items() if key.endswith("parallel_size")})
        with cpu_shim(1):
            ours, plain = (make(model_of(settings, rank)) for _ in range(2))
        session = make_session(ours.model, settings={"collective_timeout_s": 60})
        for step in range(2):
            is_same = is_split(settings) and (not settings.keys() & EP.keys() or "context_parallel_size" in settings)
            sequences = sequences_of(EVEN, seed=step if is_same else 10 * rank + step)
            plain.model.train()
            is_megatron = isinstance(plain, MegatronTrainer)
            want = megatron_backward(
                plain.model, sequences, EVEN_GROUPS, finalize=finalize_model_grads if is_megatron else None
            )
            with cpu_shim(4), session.training():
                report = session.score_and_backward(sequences, loss_over(sequences), micro_batch_tokens=EVEN_LIMIT)
                if name == "PP2":
                    want_scores = session.score(sequences, micro_batch_tokens=EVEN_LIMIT)
                    for got, score in zip(report.scores, want_scores, strict=True):
                        assert torch.equal(got, score)
                if step == 0:  # before weights can differ by rounding
                    check_gradients(name, session, plain, ours)
                assert session.step(ours.optimizer).weight_version == step + 1
                plain.optimizer.step()
                plain.optimizer.zero_grad()
                if is_megatron:
                    plain.model.zero_grad_buffer()
            if not name.startswith("PP2") or rank == 1:
                assert report.loss == pytest.approx(want, rel=2e-6), name
            if "experts" in name:
                losses = report.auxiliary_losses["load_balancing_loss"]
                assert len(losses) == settings.get("num_layers", 2) and bool((losses > 0.9).all()), name
        if "overlap" in name:
            plain.model.disable_forward_pre_hook()  # gathers what its next forward would gather
        pairs = (dict(trainer.model.named_parameters()) for trainer in (ours, plain))
        assert_equal(*pairs)
        for group in {session.engine.rank_group, session.ranks}:
            group.lockstep.close()


def check_gradients(name: str, session: Any, plain: Any, ours: Any) -> None:
    """Those that Megatron's own step has reduced; ours are reduced by what `step` calls first."""
    from megatron_infer.models.trainer_state import wrapper_chain
    from megatron_infer.models.trainer_step import reduce_gradients

    if "torch" in name:
        assert_equal(gradients(ours.model.module), gradients(plain.model.module))
        return
    if "overlap" in name or "distributed" in name:
        return  # each rank reduces its own part: the parameters show it
    want = gradients(plain.model.module)
    before = gradients(session.model)
    reduce_gradients(wrapper_chain(ours.model), num_ranks=session.engine.rank_group.size)
    assert_equal(gradients(session.model), want)
    for parameter, (_, grad) in zip(session.model.parameters(), before.items(), strict=True):
        parameter.main_grad.copy_(grad)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("names", PARTS.values(), ids=PARTS)
def test_two_ranks_train_as_megatrons_own_step_does(tmp_path: Path, names: list[str]) -> None:
    run_on_ranks(on_ranks, 2, tmp_path, names)


def on_own_sequences(rank: int, size: int, folder: Path) -> None:
    """Sequences of other lengths and numbers on each rank, where tokens are gathered and where they are sent."""
    from megatron.core.distributed import finalize_model_grads

    new_groups(**EP)
    send = torch.distributed.all_to_all_single

    def send_listed(out: Any, given: Any, *sizes: Any, **how: Any) -> Any:
        """On a CPU megatron-core leaves the sizes in tensors."""
        how = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in how.items()}
        return send(out, given, *sizes, **how)

    torch.distributed.all_to_all_single = send_listed
    # all but one position of each is scored: gradients have Megatron's bits
    own = sequences_of([12, 12, 8], seed=1) if rank == 0 else sequences_of([8, 8, 8], seed=2)
    both = sequences_of([12, 12, 8], seed=1) + sequences_of([8, 8, 8], seed=2)
    for dispatcher in ("allgather", "alltoall"):
        settings = EP | EXPERTS | {"moe_token_dispatcher_type": dispatcher}
        with cpu_shim(3):
            models = [model_of(settings, rank) for _ in range(2)]
        with cpu_shim(1):
            ours, plain = (MegatronTrainer(model, distributed=True, smooth=True) for model in models)
        session = make_session(ours.model, settings={"collective_timeout_s": 60})
        with cpu_shim(4), session.training():
            want = session.score(both)[3 * rank : 3 * rank + 3]
            for limit in (16, 24, 100):
                for got, score in zip(session.score(own, micro_batch_tokens=limit), want, strict=True):
                    torch.testing.assert_close(got, score, atol=2e-6, rtol=0)
            few = own[: 3 - 3 * rank]  # none on rank 1
            assert len(session.score(few, micro_batch_tokens=16)) == len(few)
            with pytest.raises(ConfigError if rank else OtherRankFailed, match="another expert-parallel rank has 3"):
                session.score_and_backward(own[: 3 - rank], loss_over(own), micro_batch_tokens=16)
            broken = [*own, [4, 999]] if rank else own
            with pytest.raises(InvalidPrompt if rank else OtherRankFailed, match="sequence 3 has token ids 4 to 999"):
                session.score(broken)
            report = session.score_and_backward(
                own, loss_over(own), micro_batch_tokens=16, auxiliary_losses=dispatcher == "alltoall"
            )
            assert report.num_micro_batches == 3
            for got, score in zip(report.scores, want, strict=True):
                torch.testing.assert_close(got, score, atol=2e-6, rtol=0)
            assert session.step(ours.optimizer).update_successful
        if dispatcher == "alltoall":  # Megatron's own step needs equal shapes to gather tokens
            plain.model.train()
            megatron_backward(plain.model, own, ONE_GROUPS, finalize=finalize_model_grads)
            with cpu_shim(4):
                plain.optimizer.step()
            assert_equal(*(dict(one.model.named_parameters()) for one in (ours, plain)))
        session.engine.rank_group.lockstep.close()


@pytest.mark.timeout(200)
def test_expert_parallel_ranks_train_on_sequences_of_their_own(tmp_path: Path) -> None:
    run_on_ranks(on_own_sequences, 2, tmp_path)


def on_faults(rank: int, size: int, folder: Path) -> None:
    sequences = sequences_of(ONE)
    for settings in (TP, PP):
        new_groups(**{key: value for key, value in settings.items() if key.endswith("parallel_size")})
        model, twin = (model_of(settings, rank) for _ in range(2))
        session = make_session(model, settings={"collective_timeout_s": 60})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        in_stages = "pipeline_model_parallel_size" in settings

        def breaks(scores: list[torch.Tensor], indices: list[int]) -> torch.Tensor:
            if rank == 1 and indices == [1]:
                raise KeyError("reward")
            return torch.cat(scores).sum()

        with cpu_shim(4), session.training():
            with pytest.raises(KeyError if rank == 1 else OtherRankFailed, match="reward"):
                session.score_and_backward(sequences, breaks, micro_batch_tokens=10)
            with pytest.raises(
                WrongState,
                match="in micro-batch 2 of 3" if rank or not in_stages else r"score_and_backward\(\) failed;",
            ):
                session.step(optimizer)
            session.zero_grad(optimizer)
            with pytest.raises(LockstepError, match="other arguments"):
                session.score_and_backward(sequences_of([10 + rank]), loss_over(sequences))
            wrapped = MegatronTrainer(twin, distributed=False)
            wrapped.model.train()
            from megatron.core.distributed import finalize_model_grads

            megatron_backward(wrapped.model, sequences, ONE_GROUPS, finalize=finalize_model_grads)
            session.score_and_backward(sequences, loss_over(sequences), micro_batch_tokens=10)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            session.step(optimizer)
        for old, parameter, other in zip(before, model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter, old - 0.1 * other.main_grad, atol=1e-6, rtol=1e-5)
        if in_stages:
            with pytest.raises(NotImplementedError, match="score_and_backward"):
                session.score(sequences, grad=True)
            uneven = sequences_of([9, 4, 7])
            with cpu_shim(4), session.training():
                report = session.score_and_backward(uneven, loss_over(uneven), micro_batch_tokens=10)
                want = session.score(uneven, micro_batch_tokens=10)
            assert [len(score) for score in report.scores] == [8, 3, 6]
            for got, score in zip(report.scores, want, strict=True):
                assert torch.equal(got, score)
            assert not session.model.config.variable_seq_lengths
        session.engine.rank_group.lockstep.close()
    only_one_sees(rank)
    in_half_precision(rank)


def in_half_precision(rank: int) -> None:
    """Logits are not rounded here, as they are in Megatron's own step."""
    settings, sequences = TP | {"params_dtype": torch.bfloat16, "init_method_std": 0.2}, sequences_of(ONE)
    new_groups(tensor_model_parallel_size=2)
    model, twin = (model_of(settings, rank) for _ in range(2))
    session, wrapped = (
        make_session(model, settings={"collective_timeout_s": 60}),
        MegatronTrainer(twin, distributed=False),
    )
    from megatron.core.distributed import finalize_model_grads

    wrapped.model.train()
    megatron_backward(wrapped.model, sequences, ONE_GROUPS, finalize=finalize_model_grads)
    with cpu_shim(1), session.training():
        session.score_and_backward(sequences, loss_over(sequences), micro_batch_tokens=10)
    own = dict(zip(gradients(twin), gradients(model).values(), strict=True))
    whole = {name: grad for name, grad in gradients(twin).items() if "norm" not in name}  # those are reduced by `step`
    assert 0 < error_of({name: own[name] for name in whole}, whole) < 0.05
    session.engine.rank_group.lockstep.close()


def only_one_sees(rank: int) -> None:
    """What one rank alone refuses, all refuse."""
    new_groups(tensor_model_parallel_size=2)
    session = make_session(model_of(TP, rank), settings={"collective_timeout_s": 60})
    with cpu_shim(1), session.training(), pytest.raises(ConfigError if rank else OtherRankFailed, match="one number"):
        session.score_and_backward([[1, 2, 3]], lambda scores, _: None if rank else scores[0].sum())
    optimizer = torch.optim.SGD(session.model.parameters(), lr=0.1)
    taken = optimizer.step

    def breaks() -> None:
        raise torch.OutOfMemoryError("no memory for the optimizer")

    with cpu_shim(4), session.training():  # one rank has taken the step, the other has not
        session.zero_grad(optimizer)
        session.score_and_backward([[1, 2, 3]], loss_over([[1, 2, 3]]))
        optimizer.step = breaks if rank else taken
        with pytest.raises(torch.OutOfMemoryError if rank else OtherRankFailed, match="no memory"):
            session.step(optimizer)
        optimizer.step = taken
        session.zero_grad(optimizer)
        with pytest.raises(WrongState, match="their weights may differ; load a checkpoint"):
            session.score_and_backward([[1, 2, 3]], loss_over([[1, 2, 3]]))
        session.update_weights()  # as after a checkpoint was loaded
        session.score_and_backward([[1, 2, 3]], loss_over([[1, 2, 3]]))
        session.step(optimizer)
    session.engine.rank_group.lockstep.close()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_an_error_on_one_rank_is_one_on_all_and_plain_models_are_stepped_as_wrapped_ones(tmp_path: Path) -> None:
    run_on_ranks(on_faults, 2, tmp_path)
