"""An engine on Triton's kernels gives the tokens of one that runs torch, whatever its layers are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines import make_engine
from launches import kernels_launched
from model_kinds import LATENT, SOFTCAPPED, SPARSE

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.models.mcore_compat import squared_relu
from megatron_infer.testing.tiny import tiny_delta, tiny_gpt, tiny_hybrid

pytestmark = pytest.mark.triton

VOCAB = 128
SIZES = {"buffer_size_gb": 0.02, "max_sequence_length": 96, "max_requests": 4, "max_tokens": 96}
CHUNKS = {"enable_chunked_prefill": True, "max_tokens": 24}
PREFIXES = {"enable_prefix_caching": True}
NORMS = ("_norm", "_activate")


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A model, what its engine is asked for, and kernels that must have run."""

    model: dict[str, Any]
    make: Callable[..., Any] = tiny_gpt
    engine: dict[str, Any] = field(default_factory=dict)
    ran: tuple[str, ...] = ()
    has_routing: bool = False
    always: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "attention": Layers(model={}, engine=CHUNKS | PREFIXES, ran=("decode_kernel", "prefill_kernel")),
    "window and sinks": Layers(
        model={"window_size": (11, 0), "softmax_type": "learnable", "rotary_percent": 0.5},
        engine=CHUNKS | PREFIXES,
    ),
    "caps and two ropes": Layers(
        model=SOFTCAPPED | {"window_size": (11, 0), "share_embeddings_and_output_weights": False},
        engine=CHUNKS | PREFIXES,
        ran=("decode_kernel", "prefill_kernel", *NORMS),
    ),
    "FP8 cache": Layers(model={}, engine=CHUNKS | PREFIXES, always={"kv_cache_dtype": "fp8_e4m3"}),
    "layer norm, GELU, biases": Layers(
        model={
            "normalization": "LayerNorm",
            "gated_linear_unit": False,
            "activation_func": F.gelu,
            "add_bias_linear": True,
        },
        ran=NORMS,
    ),
    "zero-centered, squared ReLU, head norms": Layers(
        model={
            "layernorm_zero_centered_gamma": True,
            "gated_linear_unit": False,
            "activation_func": squared_relu,
            "qk_layernorm": True,
        },
        ran=NORMS,
    ),
    "mixers and experts": Layers(
        make=partial(tiny_hybrid, "ME*M"),
        model={
            "hidden_size": 32,
            "mamba_head_dim": 32,
            "mamba_num_groups": 1,
            "num_attention_heads": 2,
            "num_query_groups": 1,
        },
        engine=CHUNKS,
        ran=("scan_decode", "scan_segments", "_convolve_decode", "_norm", "_choose", "_grouped_linear", "_add_up"),
        has_routing=True,
    ),
    "delta nets": Layers(
        make=tiny_delta, model={}, engine=CHUNKS, ran=("delta_decode", "delta_walk", "_convolve_decode")
    ),
    "sparse attention": Layers(model=SPARSE, engine=CHUNKS | PREFIXES, ran=("index_scores", "decode_kernel")),
    "latents": Layers(model=LATENT, engine=CHUNKS | PREFIXES, ran=("decode_kernel", "prefill_kernel")),
}


def workload() -> list[list[int]]:
    """Two prompts with the same stem, a short one, and one of equal tokens."""
    rng = random.Random(5)
    stem, *rest = ([rng.randrange(4, VOCAB) for _ in range(n)] for n in (34, 9, 3, 5))
    return [stem + rest[0], rest[1], stem + rest[2], [7] * 21]


def generate(
    model: torch.nn.Module, backend: str, monkeypatch: pytest.MonkeyPatch, layers: Layers, **settings: Any
) -> tuple[list[Any], DynamicInferenceEngine, set[str]]:
    """(tokens and routing of each request, the engine, names of the kernels that ran)."""
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    engine = make_engine(model, **SIZES | layers.always | settings)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, return_routing=layers.has_routing)
    with kernels_launched() as ran:
        found = [output.outputs[0] for output in engine.generate(workload(), params)]
    return [(one.token_ids, one.routing.tolist() if layers.has_routing else None) for one in found], engine, set(ran)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_their_experts_equal_those_of_torch(device, monkeypatch, kind):
    if kind == "FP8 cache" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    layers = KINDS[kind]
    model = layers.make(vocab_size=VOCAB, init_method_std=0.2, **layers.model).to(device)
    torch.manual_seed(3)  # in any order of the suite
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    want, engine, ran = generate(model, "torch", monkeypatch, layers)
    assert not ran and "triton" not in {row.chosen for row in engine.kernels.rows}
    assert len({token for tokens, _ in want for token in tokens}) > 4, "a model that says one thing shows nothing"
    got, engine, ran = generate(model, "triton", monkeypatch, layers, **layers.engine)
    assert got == want
    assert "triton" in {row.chosen.split(",")[0] for row in engine.kernels.rows} and ran.issuperset(layers.ran)
    assert bool(engine.stats().counters["prefix_hit_tokens"]) == ("enable_prefix_caching" in layers.engine)
