"""An adapter trains in every parallel layout as in one process, and moves from one layout to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import weights_of
from gloo_ranks import new_groups, run_on_ranks, stage_ends
from session_case import answers_in, make_session
from test_virtual_stages import VPP2, chunks_of_rank
from trainers import MegatronTrainer
from training_case import loss_over, sequences_of

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.checkpoint import sync_strategy
from megatron_infer.models.lora.attach import AttachedLoRA, attach_lora
from megatron_infer.rl.updates import ReshardSource, apply
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

pytestmark = pytest.mark.filterwarnings("ignore:.*leaf Tensor:UserWarning", "ignore:.*deprecated:FutureWarning")
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")
MODELS: dict[str, Any] = {
    "gpt": lambda **how: tiny_gpt(init_method_std=0.2, share_embeddings_and_output_weights=True, **how),
    "four layers": lambda **how: tiny_gpt(init_method_std=0.2, num_layers=4, qk_layernorm=True, **how),
    "hybrid": lambda **how: tiny_hybrid("M*-", init_method_std=0.2, **how),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "TP2": ("gpt", {TP: 2}, False),
    "TP2, sequence parallel": ("gpt", {TP: 2, "sequence_parallel": True}, False),
    "TP2, exact": ("gpt", {TP: 2}, True),
    "PP2": ("gpt", {PP: 2}, False),
    "PP2 with two chunks": ("four layers", {PP: 2} | VPP2, False),
    "DP2": ("gpt", {}, False),
    "TP2, hybrid": ("hybrid", {TP: 2}, False),
}
LENGTHS = [12, 12, 8, 8]


def trained(model: Any, exact: bool, part: slice = slice(None)) -> tuple[AttachedLoRA, Any, list[Any]]:
    """Two steps -> (adapter, session, answers after each). part: of the sequences, for this data-parallel rank."""
    adapter = attach_lora(model, rank=3, alpha=6, targets=TARGETS, seed=5)
    trainer = MegatronTrainer(model, distributed=not exact, smooth=True)
    session = make_session(trainer.model, settings={"batch_invariant": exact, "collective_timeout_s": 60})
    sequences, answers = sequences_of(LENGTHS), []
    loss, own = loss_over(sequences), list(range(len(sequences)))[part]
    for _ in range(2):
        with session.training(), cpu_shim(4):
            session.score_and_backward(
                [sequences[i] for i in own],
                lambda scores, at: loss(scores, [own[i] for i in at]) * len(sequences) / len(own),
            )
            session.step(trainer.optimizer)
        answers.append(answers_in(session))
    return adapter, session, answers


def on_layouts(rank: int, size: int, folder: Path, names: list[str]) -> None:
    from megatron.core import dist_checkpointing

    cases = torch.load(folder / "one.pt", weights_only=False)
    for name in names:
        kind, sizes, exact = LAYOUTS[name]
        new_groups(**{key: value for key, value in sizes.items() if key.endswith("_size")})
        weights, want, answers = cases[kind]
        stages = stage_ends(rank, size) if PP in sizes else {}
        if kind == "four layers":
            settings = {"init_method_std": 0.2, "num_layers": 4, "qk_layernorm": True}
            model = chunks_of_rank(settings | VPP2, 1, weights)
        else:
            with cpu_shim(4):  # a tied embedding on two stages
                model = MODELS[kind](**sizes, **stages)
            apply(model, weights)
        part = slice(rank, None, size) if name == "DP2" else slice(None)
        adapter, session, got = trained(model, exact, part)
        same_pairs(adapter, want, name)
        assert got == answers, name
        folders = {each: folder / f"{each} {name}" for each in ("torch_dist", "peft")}
        folders["torch_dist"].mkdir(exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(
            adapter.sharded_state_dict(), str(folders["torch_dist"]), sharded_strategy=sync_strategy()
        )
        if kind == "gpt":
            adapter.save(folders["peft"])
            if name != "DP2":
                with pytest.raises(ModelError, match="cannot be written"):  # on both ranks
                    adapter.save(folder / "one.pt")
        session.engine.rank_group.lockstep.close()
        if name != "PP2":
            continue
        for parameter in adapter.parameters():
            parameter.data.zero_()
        saved = str(folder / f"torch_dist {names[0]}")  # in another layout
        adapter.load_state_dict(dist_checkpointing.load(adapter.sharded_state_dict(), saved))
        same_pairs(adapter, want, name)


def same_pairs(adapter: AttachedLoRA, want: dict[str, Any], name: str) -> None:
    got = adapter.to_adapter().pairs
    assert got.keys() == want.keys(), name
    for path, (a, b) in want.items():
        assert b.any()
        for mine, its in ((got[path].a, a), (got[path].b, b)):
            torch.testing.assert_close(mine, its, atol=5e-4, rtol=0, msg=lambda m, at=path: f"{name} {at}: {m}")


@pytest.mark.parametrize(
    "names",
    [
        ["TP2, sequence parallel", "PP2"],
        pytest.param(["TP2", "TP2, exact", "DP2", "TP2, hybrid", "PP2 with two chunks"], marks=pytest.mark.long),
    ],
    ids=", ".join,
)
def test_every_layout_trains_an_adapter_like_one_process(names: list[str], tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    cases: dict[str, Any] = {}
    for kind in dict.fromkeys(LAYOUTS[name][0] for name in names):
        model = MODELS[kind]()
        weights = weights_of(model)
        adapter, _, answers = trained(model, exact=False)
        pairs = {path: (pair.a, pair.b) for path, pair in adapter.to_adapter().pairs.items()}
        cases[kind] = weights, pairs, answers
        if kind == "gpt":
            one = adapter
            adapter.save(tmp_path / "one")
    torch.save(cases, tmp_path / "one.pt")
    run_on_ranks(on_layouts, 2, tmp_path, names)
    want = load_file(tmp_path / "one" / "adapter_model.safetensors")
    for name in names:
        if LAYOUTS[name][0] == "gpt":
            got = load_file(tmp_path / f"peft {name}" / "adapter_model.safetensors")
            assert got.keys() == want.keys()
            assert all((got[key] - value).abs().max() < 5e-4 for key, value in want.items()), name
    before = one.state_dict()
    loaded = dist_checkpointing.load(one.sharded_state_dict(), str(tmp_path / f"torch_dist {names[0]}"))
    one.load_state_dict(loaded)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, before[name], atol=5e-4, rtol=0)


def on_reshard(rank: int, size: int, folder: Path) -> None:
    weights = torch.load(folder / "weights.pt")
    new_groups(**{TP: 2})
    trainer = tiny_gpt(init_method_std=0.2, **{TP: 2})
    apply(trainer, weights)
    adapter = attach_lora(trainer, rank=3, targets=TARGETS)
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            if name.endswith(".lora.b"):
                torch.manual_seed(len(name) + rank)
                parameter.normal_()
    source = ReshardSource(trainer)
    new_groups()
    engine_model = tiny_gpt(init_method_std=0.2)
    attach_lora(engine_model, rank=3, targets=TARGETS)
    apply(engine_model, source)
    want = adapter.to_adapter().pairs
    for path, pair in want.items():
        mine = engine_model.get_submodule(path).lora
        assert torch.equal(mine.a, pair.a) and torch.equal(mine.b, pair.b) and pair.b.any(), path


def test_an_adapter_is_resharded_with_its_model(tmp_path: Path) -> None:
    model = tiny_gpt(init_method_std=0.2)
    torch.save({name: value.detach() for name, value in model.named_parameters()}, tmp_path / "weights.pt")
    run_on_ranks(on_reshard, 2, tmp_path)
