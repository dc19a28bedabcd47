"""An engine on Triton's norms and activations answers as torch's does, for layers that are not RMS norms and SwiGLU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.kernels.triton.launch import listening
from megatron_infer.models.mcore_compat import squared_relu
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.triton
LAYERS: dict[str, dict[str, Any]] = {
    "layer norm, GELU, biases": {
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "activation_func": F.gelu,
        "add_bias_linear": True,
    },
    "zero-centered, squared ReLU, head norms": {
        "layernorm_zero_centered_gamma": True,
        "gated_linear_unit": False,
        "activation_func": squared_relu,
        "qk_layernorm": True,
    },
}


def answers(model: torch.nn.Module, device: torch.device) -> list[list[int]]:
    config = InferenceConfig(buffer_size_gb=0.01, block_size_tokens=16, max_sequence_length=64, max_requests=4)
    engine = DynamicInferenceEngine(model, config, device=str(device))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    return [output.outputs[0].token_ids for output in engine.generate([[5, 6, 7, 8], [9]], params)]


@pytest.mark.parametrize("kind", LAYERS)
def test_tokens_are_those_of_torch_and_no_norm_or_activation_is_left_to_it(device, monkeypatch, kind):
    model = tiny_gpt(vocab_size=128, max_sequence_length=64, init_method_std=0.2, **LAYERS[kind]).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(std=0.3)
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", "torch")
    expected = answers(model, device)
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", "triton")
    ran: list[str] = []
    with listening(lambda launch, kernel, *rest: ran.append(getattr(kernel, "__name__", kernel.fn.__name__))):
        assert answers(model, device) == expected
    assert {"_norm", "_activate"} <= set(ran)
