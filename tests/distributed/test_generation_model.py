"""A session generates in another layout than the trainer's: the answers of one process, and training as without it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks, stage_ends
from model_kinds import LATENT
from reshard_case import ROUTER, SIZES, assert_equal, everyone
from session_case import make_session, prompts
from trainers import MegatronTrainer

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed.generation_groups import generation_groups
from megatron_infer.errors import ConfigError, OtherRankFailed, WeightUpdateError, WrongState
from megatron_infer.rl.generation_weights import GenerationWeights
from megatron_infer.rl.updates import apply, verify_update
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_delta, tiny_gpt, tiny_hybrid

pytestmark = pytest.mark.filterwarnings("ignore:.*leaf Tensor:UserWarning", "ignore:.*deprecated:FutureWarning")
Layout = dict[str, int]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
DRAWN = SamplingParams(n=2, max_tokens=6, ignore_eos=True)
COMMON: dict[str, Any] = {"init_method_std": 0.2, "seed": 11}
KINDS: dict[str, Callable[..., Any]] = {
    "gpt": lambda **how: tiny_gpt(num_layers=4, qk_layernorm=True, **COMMON, **how),
    "tied": lambda **how: tiny_gpt(num_layers=4, share_embeddings_and_output_weights=True, **COMMON, **how),
    "latents": lambda **how: tiny_gpt(**LATENT, **COMMON, **how),
    "experts": lambda **how: tiny_hybrid("*E*E", moe_shared_expert_intermediate_size=40, **ROUTER, **COMMON, **how),
    "hybrid": lambda **how: tiny_hybrid("M*-ME-", position_embedding_type="rope", **ROUTER, **COMMON, **how),
    "delta nets": lambda **how: tiny_delta(**COMMON, **how),
}
MOVES: list[tuple[str, Layout, Layout]] = [
    ("tied", {"tp": 2}, {}),
    ("gpt", {"pp": 2}, {"tp": 2}),
    ("gpt", {"pp": 2}, {}),
    ("gpt", {}, {"tp": 2}),
    ("gpt", {}, {"pp": 2}),
    ("experts", {"ep": 2}, {}),
    ("experts", {"ep": 2}, {"tp": 2}),
    ("experts", {}, {"ep": 2}),
    ("hybrid", {"tp": 2}, {}),
    ("latents", {"tp": 2}, {}),
    ("delta nets", {"tp": 2}, {}),
]
"""Of two ranks: kind, the trainer's layout, that of generation."""
MOVES_OF_FOUR: list[tuple[str, Layout, Layout]] = [
    ("gpt", {"tp": 2}, {}),
    ("gpt", {"pp": 2}, {"tp": 2}),  # whose replicas are ranks 0, 2 and 1, 3
    ("gpt", {"tp": 2, "pp": 2}, {"tp": 2}),
    ("gpt", {"tp": 2}, {"tp": 2, "pp": 2}),
    ("gpt", {"tp": 2, "cp": 2}, {}),
    ("experts", {"tp": 2, "ep": 2}, {}),
    ("experts", {"tp": 2, "ep": 2}, {"tp": 2}),
    ("experts", {"ep": 2}, {"ep": 4}),
]


def model_of(kind: str, layout: Layout, groups: Any = None) -> Any:
    """groups: None: megatron-core's own of this layout."""
    sizes: dict[str, Any] = {(SIZES | {"cp": "context_parallel_size"})[name]: size for name, size in layout.items()}
    if groups is None:
        new_groups(**sizes)
    else:
        sizes |= {"pg_collection": groups}
    if "pp" in layout:
        sizes |= stage_ends(_pipeline_rank() if groups is None else groups.pp.rank(), layout["pp"])
    return KINDS[kind](**sizes)


def _pipeline_rank() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_rank()


def generating_model(kind: str, model: Any, layout: Layout) -> Any:
    names = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel"}
    groups = generation_groups(model, **{names[name]: size for name, size in layout.items()})
    return model_of(kind, layout, groups)


def weights_of(kind: str) -> list[dict[str, torch.Tensor]]:
    """Two versions of the weights of a whole model."""
    model, versions = KINDS[kind](), []
    for scale in (1.0, 1.15):
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if torch.is_tensor(tensor):
                    tensor.mul_(scale)
                    if name.endswith("expert_bias"):
                        tensor.copy_(torch.linspace(-0.3, 0.3, len(tensor)) * (2 - scale))
        state = model.state_dict()
        versions.append({name: tensor.clone() for name, tensor in state.items() if torch.is_tensor(tensor)})
    return versions


def given(data_rank: int) -> list[list[int]]:
    """Prompts of one data-parallel rank."""
    return [[5 + data_rank, *prompt] for prompt in prompts(3)]


def answers(roll: Any, data_rank: int) -> list[Any]:
    groups = roll.generate(given(data_rank), GREEDY)
    samples = [group.samples[0] for group in groups]
    return [[one.token_ids for one in samples], [value for one in samples for value in one.raw_logprobs]]


def save(folder: Path, kinds: set[str], num_data_ranks: int) -> None:
    """Weights, and the answers of one process."""
    for kind in kinds:
        versions, found = weights_of(kind), []
        for weights in versions:
            model = KINDS[kind]()
            apply(model, weights)
            session = make_session(model, meter=None)
            with session.generating() as roll:
                found.append([answers(roll, rank) for rank in range(num_data_ranks)])
        assert found[0] != found[1]
        torch.save((versions, found), folder / f"{kind}.pt")


def bytes_of_tensors() -> int:
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def on_moves(rank: int, size: int, folder: Path, moves: list[tuple[str, Layout, Layout]]) -> None:
    for kind, before, after in moves:
        check_move(rank, folder, kind, before, after)


def check_move(rank: int, folder: Path, kind: str, before: Layout, after: Layout) -> None:
    where = f"{kind} {before} -> {after}"
    versions, want = torch.load(folder / f"{kind}.pt")
    model = model_of(kind, before)
    apply(model, versions[0])
    generates = generating_model(kind, model, after)
    whole = sum(one.nbytes for one in generates.parameters())
    session = make_session(
        model, settings={"collective_timeout_s": 60}, suspend_mode="recompute", generation_model=generates
    )
    data_rank = session._trainer._groups.data_rank
    replicas = everyone(data_rank)
    for version, weights in enumerate(versions):
        if version:
            apply(model, weights)
            assert session.update_weights().version == version
        resting = 0
        for _ in range(2):  # the second time with the same weights
            with session.generating() as roll:
                assert sum(one.untyped_storage().nbytes() for one in generates.parameters()) >= whole
                assert_equal(answers(roll, data_rank), want[version][data_rank], where, tolerance=2e-4)
                groups = roll.generate(given(data_rank), DRAWN)
            assert session.weight_version == version
            assert sum(one.untyped_storage().nbytes() for one in generates.parameters()) < whole / 50
            resting = resting or bytes_of_tensors()  # with buffers that forwards of any engine and trainer leave
            assert abs(bytes_of_tensors() - resting) < whole / 10, where
        drawn = everyone([[sample.token_ids for sample in group.samples] for group in groups])
        for mine, its in zip(drawn, replicas, strict=True):
            assert (mine == drawn[rank]) is (its == data_rank), (where, "ranks that train on the same data")
        sequences = [sample.ids for group in groups for sample in group.samples]
        with cpu_shim(4), session.training():  # the trainer's own forward, in its layout
            scores = session.score(sequences, start=[len(group.prompt_ids) for group in groups for _ in group.samples])
        for group, pair in zip(groups, zip(*[iter(scores)] * 2, strict=True), strict=True):
            for sample, score in zip(group.samples, pair, strict=True):
                torch.testing.assert_close(torch.tensor(sample.raw_logprobs), score, atol=2e-4, rtol=0, msg=where)
    report = session.reshard_report
    assert report is not None and not report.planned and report.bytes_received == report.bytes_to_receive
    for ranks in {session.engine.rank_group, session.ranks, session._trainer._rank_group}:
        ranks.lockstep.close()


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "moves",
    [MOVES[:2], pytest.param(MOVES[2:8], marks=pytest.mark.long), pytest.param(MOVES[8:], marks=pytest.mark.long)],
    ids=["quick", "layouts", "kinds"],
)
def test_two_ranks_generate_in_another_layout_what_one_process_does(
    tmp_path: Path, moves: list[tuple[str, Layout, Layout]]
) -> None:
    save(tmp_path, {kind for kind, *_ in moves}, 2)
    run_on_ranks(on_moves, 2, tmp_path, moves)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_generate_in_another_layout_what_one_process_does(tmp_path: Path) -> None:
    save(tmp_path, {kind for kind, *_ in MOVES_OF_FOUR}, 4)
    run_on_ranks(on_moves, 4, tmp_path, MOVES_OF_FOUR)


def on_training(rank: int, size: int, folder: Path, before: Layout, after: Layout) -> None:
    """A trainer and its twin that never meets an engine."""
    ours, twin = (MegatronTrainer(model_of("tied", before), distributed=True, overlap=True) for _ in range(2))
    bare = ours.model.module
    generates = generating_model("tied", bare, after)
    session = make_session([ours.model], ours.optimizer, generation_model=generates, offload_optimizer=True)
    seen = []
    for step in range(3):
        with session.generating() as roll:
            groups = roll.generate(given(session._trainer._groups.data_rank), GREEDY)
            seen.append([group.samples[0].token_ids for group in groups])
            sequences = [group.prompt_ids + group.samples[0].token_ids for group in groups]
            with cpu_shim(4):
                scores = session.score(sequences, start=[len(group.prompt_ids) for group in groups])
            for group, score in zip(groups, scores, strict=True):
                torch.testing.assert_close(
                    torch.tensor(group.samples[0].raw_logprobs), score, atol=2e-4, rtol=0, msg=f"{before} {step}"
                )
        rows = slice(None) if before else slice(rank, rank + 1)
        with session.training():
            assert ours.step(step, rows) == twin.step(step, rows)
        if step == 0:
            assert session.update_weights().version == 1
        for trainer in (ours, twin):  # parameters that other ranks have updated come now
            trainer.model.disable_forward_pre_hook()
            trainer.model.enable_forward_pre_hook()
        for mine, its in zip(ours.model.parameters(), twin.model.parameters(), strict=True):
            assert torch.equal(mine, its)
    assert session.weight_version == 2  # that of the second step was found by the content
    assert seen[0] != seen[1] != seen[2]
    check_edges(rank, session)
    for ranks in {session.engine.rank_group, session.ranks, session._trainer._rank_group}:
        ranks.lockstep.close()
    check_refusals(model_of("gpt", {"tp": 2}))


def check_edges(rank: int, session: Any) -> None:
    """What cannot be between two blocks, and a rank that has no room."""
    with pytest.raises(WrongState, match=r"weights within session.generating\(\) only"):
        session.engine.resume()
    with pytest.raises(WrongState, match=r"weights within session.generating\(\) only"):
        verify_update(session.engine)
    with pytest.raises(WrongState, match=r"outside of generating.*update_weights"):
        session.transition()
    with pytest.raises(ConfigError, match=r"update_weights\(source\) with generation_model"):
        session.update_weights({})
    resting, gather = bytes_of_tensors(), GenerationWeights.gather

    def broken(self: Any) -> None:
        gather(self)
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(GenerationWeights, "gather", broken)
        with pytest.raises(MemoryError if rank else OtherRankFailed, match="no room"), session.generating():
            pass
    assert abs(bytes_of_tensors() - resting) < 20_000
    with session.generating() as roll:
        first = answers(roll, 0)
        session.update_weights()
        assert answers(roll, 0) == first
        session.transition()
        assert answers(roll, 0) == first


def check_refusals(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"2 processes, but tp x pp x ep = 3 x 1 x 1 = 3"):
        generation_groups(model, tensor_parallel=3)
    other = generating_model("gpt", model, {})
    with pytest.raises(ConfigError, match="batch_invariant=True with generation_model"):
        make_session(model, settings={"batch_invariant": True}, generation_model=other)
    with pytest.raises(ConfigError, match="generation_model has an engine already"):
        make_session(model, generation_model=model)
    for refused, why in (
        ({"vocab_size": 136}, r"word_embeddings.weight has shape \[128, 64\] in the source, \[136, 64\] in the target"),
        ({"num_layers": 5}, r"the source has no decoder.layers.4"),
        ({"context_parallel_size": 2, "pg_collection": model.pg_collection}, "context_parallel_size=2"),
    ):
        with pytest.raises((ConfigError, WeightUpdateError), match=why):
            make_session(
                model,
                generation_model=tiny_gpt(
                    **{"qk_layernorm": True, "num_layers": 4, "pg_collection": other.pg_collection} | refused
                ),
            )


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("before", "after"),
    [({"tp": 2}, {}), ({}, {"tp": 2})],
    ids=["by whole models", "by tensor-parallel ranks"],
)
def test_a_trainer_that_generates_in_another_layout_trains_like_a_twin(
    tmp_path: Path, before: Layout, after: Layout
) -> None:
    run_on_ranks(on_training, 2, tmp_path, before, after)
