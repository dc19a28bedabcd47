"""Models in torch's FSDP2: two ranks generate with their own prompts and train as twins that never met an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import training_case
from engine_ranks import weights_of
from engines import finish, make_engine, tokens_of
from gloo_ranks import new_groups, run_on_ranks
from plain_forward import full_logits, worst_error
from session_case import BASE, PARAMS, batch, make_session, prompts
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from training_case import loss_over, sequences_of

from megatron_infer.errors import AdoptionError, ConfigError, ModelError, OtherRankFailed, WrongState
from megatron_infer.models.lora.attach import attach_lora
from megatron_infer.rl.updates import apply, verify_update
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*reshard_after_forward")
MODEL: dict[str, Any] = {"num_layers": 3, "init_method_std": 0.2}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Case:
    model: Callable[[], Any] = lambda: tiny_gpt(**MODEL)
    policy: dict[str, Any] = field(default_factory=dict)
    """Arguments of `fully_shard`."""
    each_layer: bool = True
    wraps: bool = False
    """In megatron-core's own wrapper, which calls `fully_shard`."""
    tolerance: float = 1e-4
    """Nats between the engine's log probabilities and the forward's: of bf16, its rounding."""


def adapted() -> Any:
    model = tiny_gpt(**MODEL)
    attach_lora(model, rank=4)
    return model


QUICK = {
    "layers and root": Case(),
    "bf16 over fp32, root alone, tied": Case(
        model=lambda: tiny_gpt(**MODEL, share_embeddings_and_output_weights=True),
        policy={"mp_policy": HALF},
        each_layer=False,
        tolerance=0.2,
    ),
}
REST = {
    "kept after the forward": Case(policy={"reshard_after_forward": False}),
    "shards on the host": Case(policy={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "experts": Case(model=lambda: tiny_gpt(**training_case.EXPERTS | MODEL)),
    "hybrid": Case(model=lambda: tiny_hybrid("M*-M", init_method_std=0.1)),
    "an adapter": Case(model=adapted),
    "megatron-core's wrapper": Case(model=lambda: tiny_gpt(**MODEL, transformer_impl="local"), wraps=True),
    "bf16 over fp32": Case(policy={"mp_policy": HALF}, tolerance=0.2),
}


class Trainer:
    """AdamW on a model in FSDP2."""

    def __init__(self, case: Case, mesh: Any) -> None:
        model = case.model()
        if case.wraps:
            self.model = wrapped(model)
        else:
            for layer in model.decoder.layers if case.each_layer else ():
                fully_shard(layer, mesh=mesh, **case.policy)
            self.model = fully_shard(model, mesh=mesh, **case.policy)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.02)

    def step(self, seed: int) -> float:
        self.model.train()
        ids, positions, labels = batch(seed)
        loss = self.model(ids, positions, None, labels=labels).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name.removeprefix("module."): one.full_tensor() for name, one in self.model.named_parameters()}


def wrapped(model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
    from megatron.core.distributed import torch_fully_sharded_data_parallel as module

    with pytest.MonkeyPatch.context() as patch:  # its mesh is of CUDA devices
        of = module.DeviceMesh.from_group
        patch.setattr(module.DeviceMesh, "from_group", lambda group, _: of(group, "cpu"))
        return TorchFullyShardedDataParallel(model.config, DistributedDataParallelConfig(), model)


def state_of(root: Any) -> list[Any]:
    """What the trainer has: classes, modes, hooks, shards and their memory."""
    modules = [
        (type(module), module.training, len(module._forward_pre_hooks), len(module._forward_hooks))
        for module in root.modules()
    ]
    shards = [(id(one), type(one), one.to_local().data_ptr()) for one in root.parameters()]
    meshes = [group.post_forward_mesh_info for group in groups_of(root)]
    return [modules, shards, meshes, sum(map(whole_bytes, groups_of(root)))]


def groups_of(root: Any) -> list[Any]:
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    return [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]


def whole_bytes(group: Any) -> int:
    outputs = [tensor for one in group.fsdp_params for tensor in one.all_gather_outputs]
    return sum(tensor.untyped_storage().nbytes() for tensor in outputs)


def whole_model(case: Case, weights: dict[str, torch.Tensor]) -> Any:
    """A model without FSDP, in the dtype of the trainer's forward."""
    model = case.model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    if "mp_policy" in case.policy:
        model.to(torch.bfloat16)
    return model.eval()


def own_prompts(rank: int) -> list[list[int]]:
    return [prompt[rank:] for prompt in prompts(2 + rank)]


def check_rounds(rank: int, case: Case, mesh: Any) -> None:
    ours, twin = Trainer(case, mesh), Trainer(case, mesh)
    ours.model.train(), twin.model.train()
    ours.step(9), twin.step(9)  # FSDP2 has its root from here on
    session = make_session([ours.model], suspend_mode="recompute", settings={"collective_timeout_s": 60})
    before = state_of(ours.model)
    assert before[-1] == 0 or case.policy.get("reshard_after_forward") is False
    answers = []
    for step in range(3):
        whole = whole_model(case, twin.weights())
        with session.generating() as roll:
            groups = roll.generate(own_prompts(rank), PARAMS)
            sequences = [group.prompt_ids + group.samples[0].token_ids for group in groups]
            scores = session.score(sequences)
        assert state_of(ours.model) == before, step
        answers.append([group.samples[0].token_ids for group in groups])
        for group, score in zip(groups, scores, strict=True):
            sample, first = group.samples[0], len(group.prompt_ids) - 1
            want = full_logits(whole, group.prompt_ids + sample.token_ids).log_softmax(-1)[first:-1]
            want = want.gather(-1, torch.tensor(sample.token_ids).unsqueeze(-1)).squeeze(-1)
            for got in (torch.tensor(sample.raw_logprobs), score[first:]):
                torch.testing.assert_close(got, want, atol=case.tolerance, rtol=0)
        if case.tolerance < 0.1:
            outputs = session_outputs(session, rank)
            assert worst_error(outputs, lambda ids, model=whole: full_logits(model, ids)) < case.tolerance
        with session.training():
            session.score(sequences)  # leaves no weight gathered that the next step would take for the new one
            assert ours.step(step) == twin.step(step)
        assert session.update_weights().version == step + 1
    assert answers[0] != answers[-1], "the steps change nothing"
    assert_same(ours.weights(), twin.weights())
    session.engine.rank_group.lockstep.close()


def session_outputs(session: Any, rank: int) -> Any:
    with session.generating():
        return session.engine.generate(own_prompts(rank), PARAMS)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def on_rounds(rank: int, size: int, folder: Path, names: list[str]) -> None:
    torch.compiler.set_stance("force_eager")
    mesh = init_device_mesh("cpu", (size,))
    new_groups()
    for name in names:
        check_rounds(rank, (QUICK | REST)[name], mesh)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "names", [list(QUICK), pytest.param(list(REST), marks=pytest.mark.long)], ids=["quick", "rest"]
)
def test_a_model_in_fsdp2_generates_with_its_own_weights_and_trains_like_a_twin(
    tmp_path: Path, names: list[str]
) -> None:
    run_on_ranks(on_rounds, 2, tmp_path, names)


def on_steps(rank: int, size: int, folder: Path) -> None:
    """Ranks have 3 and 5 sequences, in other numbers of micro-batches."""
    mesh = init_device_mesh("cpu", (size,))
    new_groups()
    torch.compiler.set_stance("force_eager")
    for case in (QUICK["layers and root"], REST["experts"]):
        ours, twin = Trainer(case, mesh), Trainer(case, mesh)
        session = make_session(ours.model, settings={"collective_timeout_s": 60})
        sequences = sequences_of([9] * (3 + 2 * rank), seed=rank)
        with session.training():
            report = session.score_and_backward(
                sequences, loss_over(sequences), micro_batch_tokens=10, auxiliary_losses=False
            )
            assert report.num_micro_batches == 3 + 2 * rank
            twins_backward(twin, sequences, most=5)
            for (name, mine), its in zip(ours.model.named_parameters(), twin.model.parameters(), strict=True):
                same = torch.testing.assert_close
                same(mine.grad.full_tensor(), its.grad.full_tensor(), atol=2e-6, rtol=1e-4, msg=lambda m, n=name: n + m)
            for got, want in zip(session.score(sequences, micro_batch_tokens=10), report.scores, strict=True):
                same(got, want, atol=2e-6, rtol=0)
            norm = torch.nn.utils.get_total_norm([its.grad for its in twin.model.parameters()]).full_tensor()
            done = session.step(ours.optimizer)
            assert done.weight_version == 1
            assert done.grad_norm == pytest.approx(float(norm), rel=1e-4)
            check_failed_loss(rank, session, ours, sequences)
            if session.model.config.num_moe_experts is None:  # whose auxiliary losses the twin leaves out
                check_late_backward(session, ours, twin, sequences)
        session.engine.rank_group.lockstep.close()


def check_failed_loss(rank: int, session: Any, ours: Trainer, sequences: list[list[int]]) -> None:
    """A loss that raises on one rank raises on all, and all go on."""

    def loss(scores: list[torch.Tensor], indices: list[int]) -> torch.Tensor:
        if rank == 0 and indices == [1]:
            raise KeyError("reward")
        return torch.cat(scores).sum()

    text = "reward" if rank == 0 else "rank 0 failed while computing the loss.*reward"
    with pytest.raises(OtherRankFailed if rank else KeyError, match=text):
        session.score_and_backward(sequences, loss, micro_batch_tokens=10)
    with pytest.raises(WrongState, match="incomplete gradients"):
        session.step(ours.optimizer)
    session.zero_grad(ours.optimizer)


def check_late_backward(session: Any, ours: Trainer, twin: Trainer, sequences: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match=r"different numbers of micro-batches.*take score_and_backward\(\)"):
        session.score(sequences, grad=True, micro_batch_tokens=10)
    twin.optimizer.zero_grad()
    load(twin, ours)
    both = sequences[:2]
    loss_over(both)(session.score(both, grad=True), [0, 1]).backward()
    twins_backward(twin, both, most=2)
    for mine, its in zip(ours.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), its.grad.full_tensor(), atol=2e-5, rtol=1e-3)
    session.zero_grad(ours.optimizer)


@torch.no_grad()
def load(twin: Trainer, ours: Trainer) -> None:
    for its, mine in zip(twin.model.parameters(), ours.model.parameters(), strict=True):
        its.copy_(mine)


def twins_backward(twin: Trainer, sequences: list[list[int]], *, most: int) -> None:
    """One sequence at a time; where there is none, a forward whose loss counts nothing."""
    twin.model.train()
    for parameter in twin.model.config.__dict__:
        if parameter in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            setattr(twin.model.config, parameter, 0.0 if "aux" in parameter else None)
    loss = loss_over(sequences)
    for index in range(most):
        ids = torch.tensor([sequences[min(index, len(sequences) - 1)]])
        logits = twin.model(ids, torch.arange(ids.shape[1])[None], None)
        scores = torch.log_softmax(logits[0, :-1].float(), -1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        value = loss([scores], [index]) if index < len(sequences) else scores.sum() * 0.0
        value.backward()


def on_edges(rank: int, size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (size,))
    new_groups()
    case = Case()
    ours = Trainer(case, mesh)
    session = make_session(ours.model, suspend_mode="recompute", settings={"collective_timeout_s": 60})
    before = state_of(ours.model)
    check_refusals(rank, session, case, mesh)
    check_failed_gathers(rank, session, ours, before)
    check_versions(session, ours, case)
    check_sources(session, ours, folder)
    check_saved_requests(session, ours, folder / f"saved.requests{rank}")
    check_adapter(mesh, folder)
    session.engine.rank_group.lockstep.close()


def check_refusals(rank: int, session: Any, case: Case, mesh: Any) -> None:
    with pytest.raises(WrongState, match="SUSPENDED"):
        session.engine.generate(prompts(), PARAMS)
    with pytest.raises(WrongState, match=r"holds the weights in shards; the engine runs within session.generating\(\)"):
        session.engine.resume()
    with pytest.raises(WrongState, match=r"outside of generating.*update_weights"):
        session.transition()
    with pytest.raises(ConfigError, match=r"would be lost.*set_model_state_dict"):
        session.update_weights({})
    with session.generating():
        with pytest.raises(ConfigError, match="checksum=True"):
            session.update_weights(checksum=True)
        with pytest.raises(ModelError, match="FSDP shards"):
            verify_update(session.engine)
        with pytest.raises(ConfigError, match=r"score\(grad=True\) within generating"):
            session.score([[1, 2, 3]], grad=True)
        session.model.state_dict()  # of shards
        with pytest.raises(WrongState, match=r"holds the weights in shards.*call session.update_weights\(\) to gather"):
            session.engine.generate(prompts(), PARAMS)
        session.update_weights(version=0)
        session.engine.generate(prompts(), PARAMS)
    with pytest.raises(ConfigError, match=r"after FSDP2's fully_shard.*attach it before"):
        attach_lora(session.model, rank=4)
    with pytest.raises(ModelError, match=r"FSDP shards.*source of weights"):
        apply(session.model, {})
    exact = make_session(Trainer(case, mesh).model, settings={"batch_invariant": True})
    with pytest.raises(ConfigError, match="batch_invariant=True while FSDP holds"):
        exact.score([[1, 2, 3]])
    rounding = {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.bfloat16)}
    with pytest.raises(AdoptionError, match=r"TransformerLayer: FSDP2's output_dtype=torch.bfloat16 rounds"):
        make_session(Trainer(Case(policy=rounding), mesh).model)


def check_saved_requests(session: Any, ours: Trainer, path: Path) -> None:
    """Keys and values of an engine of shards are those of a model with whole weights."""
    want = generated(session)
    with session.generating():
        for number, prompt in enumerate(prompts()):
            session.engine.add_request(prompt, PARAMS, request_id=str(number))
        for _ in range(4):
            session.engine.step()
        session.engine.save_requests(path, kv=True)
        ended = finish(session.engine)
    whole = make_engine(whole_model(Case(), ours.weights()), **BASE)
    assert not whole.load_requests(path).recomputed
    for outputs in (ended, finish(whole)):
        assert [outputs[str(number)].outputs[0].token_ids for number in range(len(want))] == want


def check_adapter(mesh: Any, folder: Path) -> None:
    """An adapter in shards is exported whole, in generating() and outside. Two sessions do not generate at once."""
    model = tiny_gpt(**MODEL)
    adapter = attach_lora(model, rank=4)
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    want = adapter.to_adapter().pairs
    ours = Trainer(Case(model=lambda: model), mesh)
    session, other = make_session(ours.model), make_session(ours.model)
    adapter.save(folder / "adapter")
    found = [adapter.to_adapter().pairs]
    with session.generating():
        found.append(adapter.to_adapter().pairs)
        with pytest.raises(ModelError, match="another session generates with the weights"):
            generated(other)
        session.engine.generate(prompts(1), PARAMS)
    assert generated(other) == generated(session)
    for pairs in found:
        assert pairs.keys() == want.keys()
        for path, pair in want.items():
            assert torch.equal(pairs[path].a, pair.a) and torch.equal(pairs[path].b, pair.b), path


def check_failed_gathers(rank: int, session: Any, ours: Trainer, before: list[Any]) -> None:
    """Without memory on one rank, or with an error in the middle, all ranks raise and nothing is lost."""
    from megatron_infer.memory.device import Device
    from megatron_infer.models.sharded_weights import Fsdp2Shards

    first = generated(session)
    faults = [
        (
            Device,
            "available_bytes",
            lambda self: 1000,
            ModelError,
            "gathered weights take .* MiB, and 0.0 MiB are free",
        ),
        (
            Fsdp2Shards,
            "gather",
            broken_gather(Fsdp2Shards.gather),
            MemoryError,
            "rank 1 failed while gathering.*no room",
        ),
    ]
    for owner, name, broken, error, text in faults:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(owner, name, broken)
            expected = error if rank == 1 else OtherRankFailed
            with pytest.raises(expected, match=text if rank == 0 or error is ModelError else "no room"):
                generated(session)
        assert state_of(ours.model) == before
        assert generated(session) == first and session.weight_version == 0


def broken_gather(gather: Any) -> Any:
    def broken(self: Any) -> None:
        gather(self)
        raise MemoryError("no room")

    return broken


def generated(session: Any) -> list[list[int]]:
    with session.generating() as roll:
        return [group.samples[0].token_ids for group in roll.generate(prompts(), PARAMS)]


def check_versions(session: Any, ours: Trainer, case: Case) -> None:
    """Changes that were not announced are another version, as without FSDP; in generating() too."""
    known = generated(session)
    ours.step(1)
    changed = generated(session)
    assert changed != known and session.weight_version == 1
    session.update_weights(version=5)
    assert session.weight_version == 5
    assert generated(session) == changed and session.weight_version == 5
    session.update_weights()
    now = ours.weights()
    ours.step(2)  # after the announcement
    assert generated(session) != changed and session.weight_version == 7
    with session.generating() as roll:
        roll.generate(prompts(1), PARAMS)
        with torch.no_grad():
            for parameter in ours.optimizer.param_groups[0]["params"]:
                parameter.mul_(1.5)
        session.update_weights()
        found = [group.samples[0].token_ids for group in roll.generate(prompts(), PARAMS)]
        assert session.transition().update.version == 9
        session.engine.verify_weights()
    assert found == generated(session) and session.weight_version == 9
    assert any(not torch.equal(value, now[name]) for name, value in ours.weights().items())


def check_sources(session: Any, ours: Trainer, folder: Path) -> None:
    """A state dict of DTensors, the model itself, and what it has saved are sources for a model of another engine."""
    want = generated(session)
    checkpoint.save(ours.model.state_dict(), checkpoint_id=folder / "model")
    both = {"model": ours.model.state_dict(), "optimizer": {"step": torch.ones(3)}}
    checkpoint.save(both, checkpoint_id=folder / "both")
    saved = (folder / "model", folder / "both")
    for source in (dict(ours.model.state_dict()), ours.model, *saved):
        engine = make_engine(tiny_gpt(**MODEL, seed=5), max_tokens=256)
        apply(engine, source)
        assert tokens_of(engine.generate(prompts(), PARAMS)) == want


def on_two_dimensions(rank: int, size: int, folder: Path) -> None:
    """Two replicas, each of two tensor-parallel ranks."""
    whole, want = torch.load(folder / "whole.pt")
    new_groups(tensor_model_parallel_size=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    replica = rank // 2

    def part() -> Any:
        model = tiny_gpt(**MODEL, tensor_model_parallel_size=2)
        apply(model, whole)
        return model

    case = Case(model=part)
    ours, twin = Trainer(case, mesh), Trainer(case, mesh)
    session = make_session(ours.model, settings={"collective_timeout_s": 60})
    for step in range(2):
        with session.generating() as roll:
            groups = roll.generate(own_prompts(replica), PARAMS)
        assert step or [group.samples[0].token_ids for group in groups] == want[replica]
        sequences = [group.prompt_ids + group.samples[0].token_ids for group in groups]
        with session.training(), cpu_shim(1):
            scores = session.score(sequences, micro_batch_tokens=40)
            for group, score in zip(groups, scores, strict=True):
                drawn = torch.tensor(group.samples[0].raw_logprobs)
                torch.testing.assert_close(drawn, score[len(group.prompt_ids) - 1 :], atol=1e-4, rtol=0)
            assert ours.step(step) == twin.step(step)
        session.update_weights()
    assert_same(ours.weights(), twin.weights())
    session.engine.rank_group.lockstep.close()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_replicas_of_tensor_parallel_ranks_in_fsdp2(tmp_path: Path) -> None:
    model = tiny_gpt(**MODEL)
    engine = make_engine(model, max_tokens=256)
    want = [tokens_of(engine.generate(own_prompts(replica), PARAMS)) for replica in range(2)]
    torch.save((weights_of(model), want), tmp_path / "whole.pt")
    run_on_ranks(on_two_dimensions, 4, tmp_path)


@pytest.mark.timeout(200)
def test_gradients_of_unequal_micro_batches_are_a_twins(tmp_path: Path) -> None:
    run_on_ranks(on_steps, 2, tmp_path)


@pytest.mark.timeout(200)
def test_what_fsdp2_cannot_do_is_refused_and_a_failed_gather_loses_nothing(tmp_path: Path) -> None:
    run_on_ranks(on_edges, 2, tmp_path)
