"""The launches that `plan --roofline` counts are those that an engine makes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.kernels.triton.launch import listening
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.description_shape import step_counter
from megatron_infer.models.loading.model_description import HybridDescription, ModelDescription

pytestmark = pytest.mark.triton

LAYERS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "kv_channels": 16,
    "ffn_hidden_size": 48,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "gated_linear_unit": True,
    "activation": "silu",
    "add_bias_linear": False,
    "add_qkv_bias": False,
}
GPT = ModelDescription(
    architecture="LlamaForCausalLM", transformer=LAYERS, vocab_size=64, max_sequence_length=2048, name="gpt"
)
MIXERS_EXPERTS = dataclasses.replace(
    GPT,
    architecture="NemotronHForCausalLM",
    position_embedding="none",
    hybrid=HybridDescription(pattern="M*E-", norm_groups=1),
    transformer={
        **LAYERS,
        "num_layers": 4,
        "gated_linear_unit": False,
        "activation": "relu2",
        "is_hybrid_model": True,
        "mamba_num_heads": 2,
        "mamba_head_dim": 16,
        "mamba_state_dim": 16,
        "mamba_num_groups": 1,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "moe_aux_loss_coeff": 0.0,
    },
)
DRAW = {"chunk_maxima_kernel", "best_kernel"}
"""Of a greedy step outside of a graph."""


class Products(TorchDispatchMode):
    """Counts torch's products and embeddings of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::linear", "aten::mm", "aten::addmm", "aten::embedding")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("description", "length"),
    [
        pytest.param(GPT, 40, id="attention"),
        pytest.param(MIXERS_EXPERTS, 40, id="mixers and experts"),
        pytest.param(GPT, 257, id="split keys", marks=pytest.mark.long),
        pytest.param(MIXERS_EXPERTS, 256, id="a segment", marks=pytest.mark.long),
    ],
)
def test_launches_of_a_step_are_those_that_were_counted(device, monkeypatch, description, length):
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    torch.manual_seed(0)
    model = build_model(description, dtype=torch.float32, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.02)
    config = InferenceConfig(
        buffer_size_gb=0.02, block_size_tokens=16, max_requests=1, max_tokens=512, max_sequence_length=512
    )
    engine = DynamicInferenceEngine(model, config, eos_ids=())
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.add_request([1 + i % 60 for i in range(length)], params)
    counter = step_counter(description, dtype="float32")
    for work, selects in ((counter.prefill(length), 1), (counter.decode(1, length + 1), 0)):
        ran: Counter[str] = Counter()
        with listening(lambda launch, kernel, *_, ran=ran: ran.update([kernel.fn.__name__])), Products() as products:
            engine.step()
        found = sum(count for name, count in ran.items() if name not in DRAW) + products.count
        # torch makes the fp32 residual and selects the hidden states that are drawn from.
        counted = sum(part.num_launches for part in work.parts if part.name != "sampling")
        assert found + 1 + selects == counted, (ran, work.parts)
