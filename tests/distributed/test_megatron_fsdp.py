"""Models in Megatron-FSDP: two ranks generate with their own prompts and train as twins that never met an engine.

On a CPU under the shim. Gloo cannot scale while it sums: gradients are sums over ranks here, not means.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_engine
from gloo_ranks import new_groups, run_on_ranks
from plain_forward import full_logits
from session_case import PARAMS, batch, make_session, prompts
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from training_case import loss_over, sequences_of

from megatron_infer.errors import AdoptionError, ModelError, OtherRankFailed
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.sharded_weights import MegatronFsdpShards
from megatron_infer.rl.updates import apply
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.filterwarnings("ignore")
MODEL: dict[str, Any] = {"num_layers": 2, "init_method_std": 0.2}
CASES: dict[str, dict[str, Any]] = {
    "layers are units": {},
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48},
    "optimizer and gradients": {"data_parallel_sharding_strategy": "optim_grads"},
}


@contextmanager
def on_cpu() -> Iterator[None]:
    with cpu_shim(4), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.distributed, "_make_nccl_premul_sum", lambda factor: torch.distributed.ReduceOp.SUM)
        yield


class Trainer:
    """megatron-core's Adam on a model in its wrapper of Megatron-FSDP."""

    def __init__(self, settings: dict[str, Any], mesh: Any) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
        from megatron.core.distributed.fsdp.src.megatron_fsdp import FSDPDistributedIndex
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        settings = dict(settings)
        strategy = settings.pop("data_parallel_sharding_strategy", "optim_grads_params")
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        index = FSDPDistributedIndex(device_mesh=mesh, dp_shard_dim="dp_cp", tp_dim="tp")
        with pytest.MonkeyPatch.context() as patch:  # its mesh is of CUDA devices

            def own_index(wrapper: Any, groups: Any) -> Any:
                wrapper.tp_group = mesh["tp"].get_group()
                return index

            patch.setattr(FullyShardedDataParallel, "_init_dist_index", own_index)
            model = tiny_gpt(**MODEL, **settings)
            self.model = FullyShardedDataParallel(model.config, config, model, device=torch.device("cpu"))
        adam = OptimizerConfig(optimizer="adam", lr=0.02, clip_grad=1.0, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(adam, [self.model])
        self.fsdp = self.model.module

    def step(self, seed: int) -> float:
        self.model.train()
        ids, positions, labels = batch(seed)
        loss = self.model(ids, positions, None, labels=labels).mean()
        loss.backward()
        self.finish()
        return loss.item()

    def finish(self) -> None:
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.zero_grad_buffer()

    def weights(self) -> dict[str, torch.Tensor]:
        self.fsdp.start_param_sync(force_sync=True)
        found = {name: self.fsdp.raw_param[name].detach().clone() for name in self.fsdp.raw_param}
        self.fsdp.all_gather_pipeline.reset()
        return found


def state_of(trainer: Trainer) -> list[Any]:
    modules = [(module.training, len(module._forward_pre_hooks)) for module in trainer.model.modules()]
    shards = [(id(one), type(one)) for one in trainer.model.parameters()]
    buckets = {status.name for status in trainer.fsdp.all_gather_pipeline.bucket_status.values()}
    return [modules, shards, buckets]


def on_rounds(rank: int, size: int, folder: Path) -> None:
    torch.compiler.set_stance("force_eager")
    new_groups()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp_cp", "tp"))
    with on_cpu():
        for name, settings in CASES.items():
            check_rounds(rank, name, settings, mesh, folder)
        check_edges(rank, mesh)


def check_rounds(rank: int, name: str, settings: dict[str, Any], mesh: Any, folder: Path) -> None:
    ours, twin = Trainer(settings, mesh), Trainer(settings, mesh)
    session = make_session([ours.model], suspend_mode="recompute", settings={"collective_timeout_s": 60})
    ours.model.train(), twin.model.train()
    before = state_of(ours)
    assert before[-1] == {"EMPTY"}
    shape = {key: value for key, value in settings.items() if "strategy" not in key}
    answers = []
    for step in range(3):
        whole = tiny_gpt(**MODEL, **shape)
        with torch.no_grad():
            for own, weight in zip(whole.parameters(), twin.weights().values(), strict=True):
                own.copy_(weight)
        own_prompts = [prompt[rank:] for prompt in prompts(2 + rank)]
        with session.generating() as roll:
            groups = roll.generate(own_prompts, PARAMS)
            sequences = [group.prompt_ids + group.samples[0].token_ids for group in groups]
            scores = session.score(sequences)
            roll.generate(own_prompts[:1], PARAMS)  # the weights are still there
        assert state_of(ours) == before, (name, step)
        answers.append([group.samples[0].token_ids for group in groups])
        for group, score in zip(groups, scores, strict=True):
            ids, first = group.samples[0].token_ids, len(group.prompt_ids) - 1
            want = full_logits(whole, group.prompt_ids + ids).log_softmax(-1)[first:-1]
            want = want.gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)
            for got in (torch.tensor(group.samples[0].raw_logprobs), score[first:]):
                torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        with session.training():
            again = session.score(sequences)  # through the hooks of Megatron-FSDP
            for got, score in zip(again, scores, strict=True):
                torch.testing.assert_close(got, score, atol=1e-5, rtol=0)
            assert ours.step(step) == twin.step(step)
        assert session.update_weights().version == step + 1
    assert answers[0] != answers[-1], "the steps change nothing"
    mine, its = ours.weights(), twin.weights()
    assert all(torch.equal(value, its[key]) for key, value in mine.items())
    check_step(rank, session, ours, twin)
    session.engine.rank_group.lockstep.close()
    if "data_parallel_sharding_strategy" not in settings:
        check_checkpoint(folder / name, ours, settings)


def check_checkpoint(run: Path, ours: Trainer, settings: dict[str, Any]) -> None:
    """What Megatron-LM saves with --ckpt-format fsdp_dtensor is a source of weights, and not of a description."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer.fsdp_dtensor_checkpoint import (
        handle_experts_in_state_dict,
        handle_fp8_extra_state_case,
        handle_swiglu_in_state_dict,
    )

    state = ours.model.state_dict_for_save_checkpoint()
    handle_fp8_extra_state_case(state)
    state, _ = handle_swiglu_in_state_dict(ours.model, state, None)
    if settings:
        state = handle_experts_in_state_dict(state, settings["num_moe_experts"])
    saved = {"model": state, "args": argparse.Namespace(iteration=40), "iteration": 40}
    preprocess_state_dict_for_uneven_dtensor(saved)
    checkpoint.save(saved, storage_writer=checkpoint.FileSystemWriter(run / "iter_0000040"))
    (run / "latest_checkpointed_iteration.txt").write_text("40")
    assert any(name.endswith("linear_fc1.weight_w") for name in state)
    loaded, weights = tiny_gpt(**MODEL, **settings, seed=5), ours.weights()
    apply(make_engine(loaded), run)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in loaded.named_parameters())
    for place in (run, run / "iter_0000040"):
        with pytest.raises(ModelError, match=r"fsdp_dtensor\) does not say how its model is built.*save_checkpoint"):
            open_source(place)


def check_step(rank: int, session: Any, ours: Trainer, twin: Trainer) -> None:
    sequences = sequences_of([9, 9], seed=rank)
    loss = loss_over(sequences)
    with session.training():
        session.score_and_backward(sequences, loss, auxiliary_losses=False)
        session.step(ours.optimizer)
    twin.model.train()
    ids = torch.tensor(sequences)
    logits = twin.model(ids, torch.arange(9)[None].expand(2, -1), None)
    scores = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss(list(scores), [0, 1]).backward()
    twin.finish()
    for mine, its in zip(ours.weights().values(), twin.weights().values(), strict=True):
        torch.testing.assert_close(mine, its, atol=2e-4, rtol=1e-3)


def check_edges(rank: int, mesh: Any) -> None:
    ours = Trainer({}, mesh)
    session = make_session(ours.model, suspend_mode="recompute", settings={"collective_timeout_s": 60})
    before = state_of(ours)
    gather = MegatronFsdpShards.gather

    def broken(self: Any) -> None:
        gather(self)
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(MegatronFsdpShards, "gather", broken)
        with pytest.raises(MemoryError if rank else OtherRankFailed, match=r"no room"), session.generating():
            pass
    assert state_of(ours) == before
    with session.generating() as roll:
        assert roll.generate(prompts(), PARAMS)
        with pytest.raises(ModelError, match=r"FSDP shards the weights"):
            apply(session.model, {})
    ours.fsdp.ddp_config.fsdp_double_buffer = True  # whose buffers are CUDA's alone
    with pytest.raises(AdoptionError, match=r"fsdp_double_buffer=True.*memory for two units"):
        make_session(ours.model)


@pytest.mark.timeout(200)
def test_a_model_in_megatron_fsdp_generates_with_its_own_weights_and_trains_like_a_twin(tmp_path: Path) -> None:
    run_on_ranks(on_rounds, 2, tmp_path)
