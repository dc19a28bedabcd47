"""Core attention and norms for specs that run on any device of torch, for the training forward on a CPU."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.distributed.backends import group_size
from megatron_infer.models.context_parallel import gather_positions, take_own
from megatron_infer.models.extensions import extensions_of
from megatron_infer.models.mcore_compat import (
    AttnMaskType,
    MegatronModule,
    TransformerConfig,
    is_layer_window_attention,
    packed_lengths,
    sharded_tensors,
)


class TorchCoreAttention(MegatronModule):
    """Spec slot `core_attention` through torch's SDPA: dense [s, b, n, h] or packed (thd) [t, n, h] queries.

    Stock `DotProductAttention` takes its score buffer and its dropout generator from CUDA and cannot run on a CPU.
    Supports both of megatron-core's kinds of softmax sinks, and `Extensions.attention_softcap`. Over context-parallel
    ranks each has the queries of its positions and gathers the keys and values of all. Raises NotImplementedError for
    attention biases.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.cp_group: dist.ProcessGroup | None = None
        if config.context_parallel_size > 1:
            if pg_collection is None:
                raise ValueError("context parallelism: TorchCoreAttention needs pg_collection with the group cp")
            self.cp_group = pg_collection.cp
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.attn_mask_type = attn_mask_type
        windowed = is_layer_window_attention(
            config.window_size, getattr(config, "window_attn_skip_freq", None), layer_number
        )
        self.softcap = extensions_of(config).attention_softcap
        self.window: tuple[int, int] | None = tuple(config.window_size) if windowed else None
        # Without it a sharded state dict would take the group from parallel_state.
        self.tp_group = pg_collection.tp if pg_collection is not None else None
        self.softmax_offset: Tensor | None = None
        if config.softmax_type != "vanilla":
            self._make_sinks()

    def _make_sinks(self) -> None:
        """Zeros or a parameter of DotProductAttention's name, one for each query head of this rank."""
        config = self.config
        ranks = self.tp_group.size() if self.tp_group is not None else config.tensor_model_parallel_size
        num_heads = config.num_attention_heads // ranks
        sinks = torch.zeros(num_heads, device=init_device(config), dtype=config.params_dtype)
        if config.softmax_type == "off-by-one":
            self.softmax_offset = sinks
            return
        del self.softmax_offset  # else it could not become a parameter
        self.softmax_offset = torch.nn.Parameter(sinks)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Learnable sinks, split over tensor-parallel ranks with the heads."""
        axes = {"softmax_offset": 0}
        return sharded_tensors(self, prefix, axes, sharded_offsets, metadata, self.tp_group)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        if attention_bias is not None:
            raise NotImplementedError("attention_bias: TorchCoreAttention has none")
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        mixed = self._attend(query, key, value, attention_mask, attn_mask_type or self.attn_mask_type)
        return mixed.flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: Any) -> Tensor:
        """Sequences laid end to end; each attends to itself only. Over context-parallel ranks each is divided alone."""
        num_ranks = group_size(self.cp_group)
        wholes = packed_lengths(packed_seq_params, length=len(query) * num_ranks, batch=1)
        lengths = [length // num_ranks for length in wholes]
        parts = [
            self._attend(*(x.unsqueeze(1) for x in sequence), None, AttnMaskType.causal).squeeze(1)
            for sequence in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        ]
        return torch.cat(parts).flatten(1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, mask_type: AttnMaskType
    ) -> Tensor:
        """[s, b, n, h] queries -> [s, b, n, h]."""
        if self.cp_group is not None:
            key, value = (gather_positions(x, self.cp_group) for x in (key, value))
        num_queries, num_keys = query.shape[0], key.shape[0]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask: Tensor | None = None
        if self.window is not None and self.cp_group is None:
            mask = _window_mask(num_queries, num_keys, self.window, query.device)
        elif self.window is not None:
            mask = take_own(_window_mask(num_keys, num_keys, self.window, query.device), self.cp_group)
        elif attention_mask is not None:
            mask = ~attention_mask
        elif self.cp_group is not None and mask_type == AttnMaskType.causal:
            causal = torch.ones(num_keys, num_keys, dtype=torch.bool, device=query.device).tril()
            mask = take_own(causal, self.cp_group)
        dropout = self.dropout if self.training else 0.0
        if self.softmax_offset is not None or self.softcap is not None:
            if mask is None and mask_type == AttnMaskType.causal:
                mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
            sinks = None if self.softmax_offset is None else self.softmax_offset.view(1, -1, 1, 1)
            form = {"scale": self.softmax_scale, "softcap": self.softcap, "dropout": dropout}
            return attend_explicitly(query, key, value, mask, sinks, **form).permute(2, 0, 1, 3)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and mask_type == AttnMaskType.causal,
            dropout_p=dropout,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return mixed.permute(2, 0, 1, 3)


def attend_explicitly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """What SDPA does not compute, with gradients: capped scores, and sinks, which broadcast to [*, Q, 1].

    query [*, Q, H], key and value [*, P, H], mask [*, Q, P]: True where a query sees a key -> [*, Q, H]. Scores and
    softmax are fp32.
    """
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
    return F.dropout(weights.to(value.dtype), dropout) @ value


def _window_mask(num_queries: int, num_keys: int, window: tuple[int, int], device: torch.device) -> Tensor:
    """True where query i sees key j: i - window[0] <= j <= i + window[1], ends aligned."""
    offset = num_keys - num_queries
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return seen.triu(offset - window[0]).tril(offset + window[1])


def init_device(config: TransformerConfig) -> torch.device:
    """Where the parameters of a new module are."""
    if config.use_cpu_initialization or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator(), torch.accelerator.current_device_index())


class WholeLinear(torch.nn.Linear):
    """A linear that every rank has all of, with the parameters of Transformer Engine's and what it returns."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype, device=init_device(config))
        if config.perform_initialization:
            init_method(self.weight)
        if bias:
            torch.nn.init.zeros_(self.bias)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class TorchNorm(torch.nn.Module):
    """Layer norm or RMS norm by `config.normalization`, with stock parameter names.

    Supports sequence parallelism and zero-centred weights, which megatron-core's wrapper of torch's norms refuses.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_: Any) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise NotImplementedError(f"normalization={config.normalization!r}: TorchNorm does RMSNorm and LayerNorm")
        # Mamba layers of megatron-core 0.16 do not pass eps
        self.eps: float = config.layernorm_epsilon if eps is None else eps
        self.shape = (hidden_size,)
        self.rms = config.normalization == "RMSNorm"
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        made = {"dtype": config.params_dtype, "device": init_device(config)}
        gain = torch.zeros if self.zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(gain(hidden_size, **made))
        self.register_parameter("bias", None if self.rms else torch.nn.Parameter(torch.zeros(hidden_size, **made)))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.rms and self.zero_centered_gamma:  # 1 + weight is not rounded to the weight's dtype
            return F.rms_norm(x.float(), self.shape, self.weight.float() + 1, self.eps).to(self.weight.dtype)
        # an fp32 residual stream is normed in fp32, as Transformer Engine does; elsewhere the casts do nothing
        weight = (self.weight + 1 if self.zero_centered_gamma else self.weight).to(x.dtype)
        if self.rms:
            return F.rms_norm(x, self.shape, weight, self.eps).to(self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.shape, weight, bias, self.eps).to(self.weight.dtype)
