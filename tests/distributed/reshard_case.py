"""Models whose weights move between layouts, and what is known of them without the code that moves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gloo_ranks import new_groups

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import CheckpointSource, save_checkpoint
from megatron_infer.testing.tiny import tiny_delta, tiny_gpt, tiny_hybrid

COMMON = {"init_method_std": 0.05, "seed": 11}
WHOLE = {
    "gpt": lambda: tiny_gpt(num_layers=4, qk_layernorm=True, **COMMON),
    "tied": lambda: tiny_gpt(num_layers=4, share_embeddings_and_output_weights=True, **COMMON),
    "experts": lambda: tiny_hybrid(
        "*E*E", moe_shared_expert_intermediate_size=40, moe_latent_size=24, **ROUTER, **COMMON
    ),
    "delta": lambda: tiny_delta(linear_attention_freq=[1, 0, 1, 1], num_layers=4, **COMMON),
    "hybrid": lambda: tiny_hybrid("M*-ME-", position_embedding_type="rope", **ROUTER, **COMMON),
}
ROUTER = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
SIZES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}
OPTIONS = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel"}
ENGINE = {
    "buffer_size_gb": 0.01,
    "block_size_tokens": 16,
    "max_requests": 4,
    "max_tokens": 64,
    "check_invariants": True,
}
PROMPTS = [[(i * 7 + 3 * j) % 120 + 4 for j in range(length)] for i, length in enumerate((5, 33, 18))]


def save_models(folder: Path) -> None:
    """As checkpoints, which megatron-core's own code divides over ranks."""
    for name in WHOLE:
        model = whole_model(name)
        save_checkpoint(model, folder / name)
        torch.save(model.state_dict(), folder / f"{name}.pt")


def save_llama(folder: Path) -> None:
    """A model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM  # not in every rank: it takes seconds

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 3}
    llama = LlamaConfig(vocab_size=131, num_hidden_layers=2, max_position_embeddings=256, **sizes)
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")


def whole_model(name: str) -> Any:
    model = WHOLE[name]()
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("expert_bias"):
                buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    return model


def load(folder: Path, name: str, **layout: int) -> Any:
    """This rank's part under a layout of all processes (tp=2 and so on); what is left of them is data parallel."""
    new_groups(**{SIZES[key]: size for key, size in layout.items()})
    return build_model(CheckpointSource(folder / name), **{OPTIONS[key]: size for key, size in layout.items()})


def scrambled(model: Any) -> Any:
    """Other weights, so that one that stays is seen."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(-0.3, 0.3)
    return model


def make_engine(model: Any, **settings: Any) -> DynamicInferenceEngine:
    return DynamicInferenceEngine(model, InferenceConfig(**ENGINE, **settings))


def logprobs(engine: DynamicInferenceEngine) -> list[Any]:
    """Greedy tokens and their logprobs, those of the prompts as well; the same on every rank."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    tokens = [output.outputs[0].token_ids for output in outputs]
    drawn = [e[t].logprob for o in outputs for e, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)]
    given = [p.logprob for o in outputs for entry in o.prompt_logprobs if entry for p in entry.values()]
    return [tokens, drawn + given]


def assert_equal(got: list[Any], want: list[Any], where: str, tolerance: float = 1e-6) -> float:
    assert got[0] == want[0], f"{where}: {got[0]} != {want[0]}"
    worst = max(abs(a - b) for a, b in zip(got[1], want[1], strict=True))
    assert worst <= tolerance, f"{where}: a logprob differs by {worst}"
    return worst


def must_move(source: Any, target: Any) -> int:
    """Bytes of all ranks' targets that their own sources do not have, element by element."""
    total = 0
    have: dict[str, torch.Tensor] = {}
    for local in [] if source is None else source.tensors:
        mask = have.setdefault(local.layout.name, torch.zeros(local.layout.shape, dtype=torch.bool))
        for span in local.layout.spans:
            mask.narrow(local.layout.dim, span.whole, span.size).fill_(True)
    for local in [] if target is None else target.tensors:
        mask = torch.zeros(local.layout.shape, dtype=torch.bool)
        for span in local.layout.spans:
            mask.narrow(local.layout.dim, span.whole, span.size).fill_(True)
        total += int((mask & ~have.get(local.layout.name, torch.zeros_like(mask))).sum()) * local.tensor.element_size()
    return summed(total)


def everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def summed(value: int) -> int:
    """Over all ranks."""
    both = torch.tensor([value])
    torch.distributed.all_reduce(both)
    return int(both)
