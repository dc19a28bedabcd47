"""The backends that run an adopted model, as its configuration asks."""

from __future__ import annotations

import functools

import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.errors import ConfigError
from megatron_infer.kernels import select
from megatron_infer.kernels.select import BackendChoice, ChosenKernels
from megatron_infer.memory.device import Device
from megatron_infer.models.adopt import AdoptedModel


def kernels_for(adopted: AdoptedModel, config: InferenceConfig, device: Device) -> ChosenKernels:
    """The backends that run a model, without adapters. Raises ConfigError for an option that is not possible."""
    shape = adopted.shape
    if config.weight_dtype != "auto" and (reason := adopted.unpackable()) is not None:
        raise ConfigError(f'weight_dtype={config.weight_dtype.value!r}: {reason}; leave it "auto"')
    asked = {
        "attention": config.attention_backend.value,
        "sampling": config.sampling_backend.value,
        "linear": config.linear_backend.value,
        "weight_dtype": config.weight_dtype.value,
        "fused_rope": config.use_flashinfer_fused_rope,
        "kv_dtype": getattr(torch, config.kv_dtype_of(shape)),
    }
    chosen = (select.choose_exact if config.batch_invariant else functools.partial(select.choose, **asked))(
        device.torch,
        getattr(torch, shape.dtype),
        specs=[*adopted.specs, *([] if adopted.heads is None else [adopted.heads.spec])],
        block_size=config.block_size_tokens,
        ssm_specs=adopted.ssm_specs,
        conv_dtype=None if shape.state is None else getattr(torch, shape.state.conv_dtype),
        ssm_dtype=None if shape.state is None else getattr(torch, shape.state.ssm_dtype),
    )
    if (fp8 := adopted.fp8) is not None:
        chosen.rows.append(BackendChoice("products in FP8", f"transformer_engine ({fp8.num_products} linears)", {}))
    if device.is_cuda:
        chosen.rows.append(BackendChoice("host work", "beside the device's" if config.overlap else "between steps", {}))
    return chosen
