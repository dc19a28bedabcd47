"""Engines of several gloo ranks for tests, and the same model in one process to compare with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import engines
import torch
from gloo_ranks import start_ranks
from test_adopt_tensor_parallel import fill_vectors, share

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

VOCAB = 128
GPT: dict[str, Any] = {"qk_layernorm": True, "init_method_std": 0.2, "max_sequence_length": 512}
HYBRID: dict[str, Any] = {"position_embedding_type": "rope", "init_method_std": 0.2, "max_sequence_length": 512}
BASE: dict[str, Any] = engines.BASE | {"collective_timeout_s": 30}
REPLICATED = ("router.weight", "gate_weight", "norm.weight", "latent_proj.weight")
"""Parameters that tensor-parallel ranks do not split."""


def whole_model(kind: str) -> torch.nn.Module:
    if kind == "attention":
        model = tiny_gpt(**GPT, randomize=False)
        fill_vectors(model, 0, 1)
        return model
    return tiny_hybrid("M*-M", **HYBRID)


def part_of_model(kind: str, folder: str, rank: int, size: int, *, seed: int = 0) -> torch.nn.Module:
    """This rank's part of `whole_model`. seed: of an "attention" model with other weights."""
    if kind == "attention":
        model = tiny_gpt(**GPT, seed=seed, randomize=False, tensor_model_parallel_size=size)
        fill_vectors(model, rank, size)
        return model
    weights = torch.load(f"{folder}/{kind}.weights.pt")
    model = tiny_hybrid("M*-M", **HYBRID, tensor_model_parallel_size=size)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(share(key, weights[key], model, rank, size))
    return model


def expert_of(name: str) -> int | None:
    """The number of the expert on its rank that a parameter belongs to."""
    return int(name.split(".local_experts.")[1].split(".")[0]) if ".local_experts." in name else None


def take_part(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give this rank's model its parameters of the undivided one, whatever the layout."""
    groups = model.pg_collection
    first = model.decoder.layers[0].layer_number - 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            expert, tp = expert_of(name), groups.tp
            if name.startswith("decoder.layers."):
                number, rest = name.removeprefix("decoder.layers.").split(".", 1)
                name = f"decoder.layers.{int(number) + first}.{rest}"
            if expert is not None:
                tp = groups.expt_tp
                own = model.config.num_moe_experts // groups.ep.size()
                name = name.replace(f"local_experts.{expert}.", f"local_experts.{expert + own * groups.ep.rank()}.")
            whole = weights[name]
            is_replicated = name.endswith(REPLICATED) and "mixer" not in name and parameter.shape == whole.shape
            if tp.size() > 1 and not is_replicated and ".indexer." not in name:
                whole = share(name, whole, model, tp.rank(), tp.size())
            parameter.copy_(whole)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters, for `take_part`."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def make_engine(model: torch.nn.Module, *, drafts_for_itself: bool = False, **settings: Any) -> DynamicInferenceEngine:
    """As `engines.make_engine`."""
    return engines.make_engine(model, draft=model if drafts_for_itself else None, **{**BASE, **settings})


def workload(count: int = 10, **how: Any) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    how = {"temperature": 0.0} | how
    work = []
    for _ in range(count):
        prompt = stem[: rng.choice([0, 33, 40])] + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(max_tokens=rng.randint(8, 24), ignore_eos=True, logprobs=1, **how)
        work.append((prompt, params))
    return work


def account(outputs: list[Any]) -> dict[str, Any]:
    """What is compared: tokens and logprobs of every sample."""
    return {
        f"{output.request_id}#{sample.index}": (
            list(sample.token_ids),
            str(sample.finish_reason),
            [entry[token].logprob for entry, token in zip(sample.logprobs or [], sample.token_ids, strict=False)],
        )
        for output in outputs
        for sample in output.outputs
    }


def assert_same_account(got: dict[str, Any], want: dict[str, Any], where: Any = "", *, tolerance: float = 1e-5) -> None:
    """Of `account`: equal tokens and finish reasons, log probabilities within `tolerance`."""
    assert got.keys() == want.keys(), where
    for key, (tokens, reason, logprobs) in want.items():
        assert got[key][:2] == (tokens, reason), (where, key)
        worst = max((abs(a - b) for a, b in zip(got[key][2], logprobs, strict=True)), default=0.0)
        assert worst < tolerance, (where, key, worst)


def assert_no_block_leaked(engine: DynamicInferenceEngine) -> None:
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks, "a block leaked"


def start_rank(rank: int, size: int, folder: str) -> None:
    """torch.distributed and megatron-core's groups for `size` tensor-parallel ranks."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


def run_ranks(function: Any, folder: Path, size: int = 2) -> None:
    """function(rank, size, folder) of a test module in `size` processes, to the end; an error of a rank is shown."""
    start_ranks(_enter, (function, size, str(folder)), size)


def _enter(rank: int, function: Any, size: int, folder: str) -> None:
    start_rank(rank, size, folder)
    function(rank, size, folder)
