"""A Mamba-2 mixer that trains on any device of torch and, with a step, generates from state slots.

`SlottedMambaMixer` has the constructor arguments, parameters and checkpoint keys of megatron-core's MambaMixer, which
cannot be imported without triton: each loads the other's checkpoints. `paged_class` gives a live stock mixer the
same second forward and changes nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_infer.errors import ConfigError
from megatron_infer.kernels.ssm import SsmSpec
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.core_attention import init_device
from megatron_infer.models.extensions import multipliers_of
from megatron_infer.models.mamba_scan import gated_rms_norm, mix, over_sequences, training_weights
from megatron_infer.models.paged_layers import PagedPart

NORM_EPS = 1e-5
"""megatron-core's epsilon, for which it has no option."""
_STOCK_MODULE = "megatron.core.ssm.mamba_mixer"


def is_stock_mixer(cls: type) -> bool:
    """True for megatron-core's own MambaMixer, found by name: its module does not import without triton."""
    return (cls.__module__, cls.__qualname__) == (_STOCK_MODULE, "MambaMixer")


def is_stock_norm(cls: type) -> bool:
    """True for the gated norm inside megatron-core's MambaMixer."""
    return (cls.__module__, cls.__qualname__) == (_STOCK_MODULE, "ExtendedRMSNorm")


def derives_from_stock_mixer(cls: type) -> bool:
    return any(is_stock_mixer(base) for base in cls.__mro__)


def spec_of(mixer: Any) -> SsmSpec:
    """The sizes of this rank's part of a mixer, ours or megatron-core's."""
    dt_min, dt_max = getattr(mixer, "dt_limit", (0.0, math.inf))  # megatron-core's has none
    return SsmSpec(
        num_heads=mixer.nheads_local_tp,
        head_dim=mixer.headdim,
        state_dim=mixer.d_state,
        num_groups=mixer.ngroups_local_tp,
        conv_width=mixer.d_conv,
        dt_min=dt_min,
        dt_max=dt_max,
    )


def projection_factors(mixer: Any, *, of_input: float = 1.0) -> Tensor | None:
    """[X] in the model's dtype: `Extensions.ssm_multipliers` of the columns z, x, B, C, dt that `in_proj` gives on this
    rank, times of_input; None: all are 1."""
    factors = [of_input * factor for factor in multipliers_of(mixer.config).ssm_multipliers]
    if factors == [1.0] * 5:
        return None
    spec, weight = spec_of(mixer), mixer.in_proj.weight
    states = spec.num_groups * spec.state_dim
    widths = (spec.inner_width, spec.inner_width, states, states, spec.num_heads)
    with torch.inference_mode(False):  # kept, and multiplied with gradients in exact mode
        return torch.cat([weight.new_full((width,), factor) for width, factor in zip(widths, factors, strict=True)])


class GatedRMSNorm(torch.nn.Module):
    """RMS norm of y * silu(gate) over groups of channels, with megatron-core's parameter and checkpoint key."""

    def __init__(
        self, width: int, *, group_size: int, dtype: torch.dtype, device: Any, tp_group: Any, eps: float = NORM_EPS
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype, device=device))
        self.eps, self.group_size, self.tp_group = eps, group_size, tp_group

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(y, gate, self.weight, self.eps, self.group_size)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return mcore.sharded_tensors(self, prefix, {"weight": 0}, sharded_offsets, metadata, self.tp_group)


class TorchMambaMixer(mcore.MegatronModule):
    """Mamba-2 in differentiable torch: convolution, chunked scan, gated norm. [S, b, D] -> ([S, b, D], None).

    Arguments are those of megatron-core's MambaMixer; sizes come from the config (mamba_state_dim, mamba_head_dim,
    mamba_num_groups, mamba_num_heads). norm_groups: groups of channels with a norm of their own, counted over all
    ranks; None is mamba_num_groups, as in megatron-core; 1 is one norm over all channels. norm_epsilon: of that norm,
    for which megatron-core has no option. bias: of both projections. dt_limit: the range that softplus(dt + bias) is
    clamped to. `name` is the module's name in the logs of 0.19. Raises ConfigError for sizes that do not divide.
    Source: Mamba-2, arXiv:2405.21060.
    """

    def __init__(
        self,
        config: mcore.TransformerConfig,
        submodules: Any,
        d_model: int,
        *,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 128,
        layer_number: int | None = None,
        pg_collection: Any = None,
        pp_layer_offset: int = 0,
        name: str | None = None,
        norm_groups: int | None = None,
        norm_epsilon: float = NORM_EPS,
        dt_limit: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        super().__init__(config)
        self.cp_group = getattr(pg_collection, "cp", None)
        self.tp_group, self.layer_number, self.pp_layer_offset = pg_collection.tp, layer_number, pp_layer_offset
        self.d_conv, self.d_state, self.headdim = d_conv, config.mamba_state_dim, config.mamba_head_dim
        num_heads = config.mamba_num_heads or divided(expand * d_model, self.headdim, "expand * d_model", "head dim")
        self._set_shares(num_heads, config.mamba_num_groups)
        self.rmsnorm, self.chunk_size, self.dt_limit = rmsnorm, chunk_size, dt_limit
        # In megatron-core's order, so that equal seeds give equal weights.
        ranks, local = self.tp_group.size(), spec_of(self)
        projected = local.inner_width + local.num_channels + local.num_heads  # z, x B C, dt
        parts = {"config": config, "bias": bias, "tp_group": self.tp_group}
        self.in_proj = build_projection(submodules.in_proj, (d_model, ranks * projected), is_first=True, **parts)
        with init_generator(config):
            states = self.ngroups_local_tp * self.d_state
            self.conv1d = draw_convolution(
                config,
                (self.d_inner_local_tp, states, states),
                taps=d_conv,
                ranks=self._ranks_drawn(),
                rank=self.tp_group.rank(),
                conv_init=conv_init,
                has_bias=conv_bias,
            )
        with init_generator(config):
            self._init_scan((dt_min, dt_max, dt_init_floor), A_init_range, D_has_hdim)
        if rmsnorm:
            self.norm = self._gated_norm(config.mamba_num_groups if norm_groups is None else norm_groups, norm_epsilon)
        sizes = ranks * local.inner_width, d_model
        self.out_proj = build_projection(submodules.out_proj, sizes, is_first=False, **parts)
        for key, parameter in self.named_parameters():
            if not key.startswith(("in_proj.", "out_proj.")):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Whole sequences, each from an empty state; packed ones have one sequence axis and cu_seqlens.

        Raises NotImplementedError for a context of megatron-core's own inference.
        """
        if inference_context is not None or inference_params is not None:
            raise NotImplementedError(
                "this mixer serves steps of megatron_infer only; megatron-core's own inference needs its MambaMixer"
            )
        projected, _ = self.in_proj(hidden_states)
        if (factors := projection_factors(self)) is not None:
            projected = projected * factors
        return self.out_proj(over_sequences(self._mix, projected, packed_seq_params, self.cp_group))

    def _mix(self, projected: Tensor) -> Tensor:
        """[S, b, z x B C dt] -> [S, b, M], each sequence from an empty state."""
        spec = spec_of(self)
        wide = torch.promote_types(projected.dtype, torch.float32)
        gate, inputs, dt = projected.split((spec.inner_width, spec.num_channels, spec.num_heads), dim=-1)
        weights = training_weights(self, wide)
        y = mix(inputs.to(wide), dt.to(wide), weights, spec, chunk=self.chunk_size).to(projected.dtype)
        return self.norm(y, gate) if self.rmsnorm else gated_rms_norm(y, gate, None, 0.0, spec.inner_width)

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Shapes of one request's (convolution, SSM) state on this rank."""
        return (self.conv1d.weight.shape[0], self.d_conv), (self.nheads_local_tp, self.headdim, self.d_state)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Checkpoint keys of megatron-core's MambaMixer: in_proj and conv1d in parts, each divided over the ranks."""
        width, state = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state
        parts = {"z": width, "x": width, "B": state, "C": state, "dt": self.nheads_local_tp}
        of_linears = {"in_proj": parts, "conv1d": {part: parts[part] for part in "xBC"}}
        return sharded_in_parts(self, of_linears, prefix, sharded_offsets, metadata, self.tp_group)

    def _set_shares(self, num_heads: int, num_groups: int) -> None:
        """This rank's heads and groups."""
        ranks = self.tp_group.size()
        divided(num_heads, num_groups, "mamba heads", "mamba_num_groups")
        self.nheads_local_tp = divided(num_heads, ranks, "mamba heads", "tensor-parallel ranks")
        self.ngroups_local_tp = divided(num_groups, ranks, "mamba_num_groups", "tensor-parallel ranks")
        self.d_inner_local_tp = self.nheads_local_tp * self.headdim

    def _init_scan(
        self, dt_range: tuple[float, float, float], decay_range: tuple[float, float], wide_skip: bool
    ) -> None:
        """dt_bias, A_log and D of this rank's heads, as megatron-core draws them; A_log and D are always fp32."""
        low, high, floor = dt_range
        ranks, device = self._ranks_drawn(), init_device(self.config)
        heads = self.nheads_local_tp * ranks
        rank = self.tp_group.rank() if ranks > 1 else 0
        drawn = torch.rand(heads, device=device, dtype=self.config.params_dtype)
        dt = torch.exp(drawn * (math.log(high) - math.log(low)) + math.log(low)).clamp(min=floor)
        inverse = dt + torch.log(-torch.expm1(-dt))  # softplus(inverse) == dt
        self.dt_bias = torch.nn.Parameter(inverse.chunk(ranks)[rank].clone())
        decay = torch.ones(heads, dtype=torch.float32, device=device)
        if self.config.perform_initialization:
            decay.uniform_(*decay_range)
        self.A_log = torch.nn.Parameter(torch.log(decay).chunk(ranks)[rank].clone())
        self.D = torch.nn.Parameter(
            torch.ones(self.d_inner_local_tp if wide_skip else self.nheads_local_tp, device=device)
        )

    def _gated_norm(self, norm_groups: int, epsilon: float) -> GatedRMSNorm:
        ranks = self.tp_group.size()
        local = divided(norm_groups, ranks, "norm_groups", "tensor-parallel ranks")
        return GatedRMSNorm(
            self.d_inner_local_tp,
            group_size=divided(self.d_inner_local_tp, local, "channels of a rank", "norm groups"),
            dtype=self.config.params_dtype,
            device=init_device(self.config),
            tp_group=self.tp_group,
            eps=epsilon,
        )

    def _ranks_drawn(self) -> int:
        """The number of ranks whose weights each rank draws: all with CPU initialization, as in megatron-core's linears
        (so that weights do not depend on the number of ranks), else 1, itself."""
        return self.tp_group.size() if self.config.use_cpu_initialization else 1


class SlottedMambaMixer(PagedPart, TorchMambaMixer):
    """The mixer of `hybrid_spec`: trains as TorchMambaMixer, generates from state slots once adopted."""


def build_projection(
    spec: Any, sizes: tuple[int, int], *, config: mcore.TransformerConfig, bias: bool, tp_group: Any, is_first: bool
) -> Any:
    """A recurrent layer's first or last linear. sizes: (in, out) over all ranks."""
    first = {"init_method": config.init_method, "gather_output": False, "tp_comm_buffer_name": "fc1"}
    last = {"init_method": config.output_layer_init_method, "input_is_parallel": True, "tp_comm_buffer_name": "fc2"}
    shared = {"config": config, "bias": bias, "is_expert": False, "tp_group": tp_group, "skip_bias_add": not is_first}
    return mcore.build_module(spec, *sizes, **shared, **(first if is_first else last))


def draw_convolution(
    config: mcore.TransformerConfig,
    parts: Sequence[int],
    *,
    taps: int,
    ranks: int,
    rank: int,
    conv_init: float | None,
    has_bias: bool,
) -> torch.nn.Conv1d:
    """A convolution of one rank's channels, which lie in `parts`; only its parameters are used.

    ranks: those whose weights are drawn, of which `rank` keeps its own.
    """
    channels = ranks * sum(parts)
    conv = torch.nn.Conv1d(
        channels,
        channels,
        taps,
        groups=channels,
        padding=taps - 1,
        bias=has_bias,
        device=init_device(config),
        dtype=config.params_dtype,
    )
    if config.perform_initialization and conv_init is not None:
        torch.nn.init.uniform_(conv.weight, -conv_init, conv_init)
    elif config.perform_initialization:
        torch.nn.init.kaiming_uniform_(conv.weight, a=math.sqrt(5))
    if ranks > 1:
        conv.in_channels = conv.out_channels = conv.groups = sum(parts)
        for key, whole in list(conv.named_parameters()):
            whole_parts = whole.detach().split([ranks * part for part in parts])
            mine = torch.cat([part.chunk(ranks)[rank] for part in whole_parts])
            setattr(conv, key, torch.nn.Parameter(mine))
    return conv


def divided(whole: int, parts: int, what: str, by: str) -> int:
    if whole % parts:
        raise ConfigError(f"{whole} {what} cannot be divided by {parts} ({by})")
    return whole // parts


def init_generator(config: mcore.TransformerConfig) -> Any:
    """A context with the generator of tensor-parallel weights, which differs per rank; the global one on a CPU.

    Weights that will be loaded need none: a program that serves a model has seeded no generators.
    """
    if config.use_cpu_initialization or not config.perform_initialization:
        return nullcontext()
    return mcore.get_cuda_rng_tracker().fork()


def sharded_in_parts(
    layer: Any,
    parts: Mapping[str, Mapping[str, int]],
    prefix: str,
    sharded_offsets: Any,
    metadata: dict[str, Any] | None,
    tp_group: Any,
) -> dict[str, Any]:
    """A recurrent layer's parameters for a distributed checkpoint.

    parts: name of a linear or of the convolution -> rows of each of its parts, which are saved under keys of their own.
    """
    own = dict.fromkeys(("A_log", "dt_bias", "D"), 0)
    sharded = mcore.sharded_tensors(layer, prefix, own, sharded_offsets, metadata, tp_group, recurse=False)
    for name, module in layer.named_children():
        where = f"{prefix}{name}."
        if module is layer.conv1d:
            axes = {"weight": 0, "bias": 0}
            sharded |= mcore.sharded_tensors(module, where, axes, sharded_offsets, metadata, tp_group)
        else:
            sharded |= mcore.sharded_state_dict_default(module, where, sharded_offsets, metadata, tp_group=tp_group)
    for name, rows in parts.items():
        for kind in ("weight", "bias"):
            if f"{prefix}{name}.{kind}" in sharded:
                split_in_parts(sharded, f"{prefix}{name}.{kind}", rows)
    return sharded


def split_in_parts(sharded: dict[str, Any], key: str, parts: Mapping[str, int]) -> None:
    """Replace a tensor by a factory that saves its parts under separate keys: `key.z`, `key.x`, ..."""
    whole = sharded[key]
    blank = whole.without_data()

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        changed = {"key": key, "data": tensor, "dtype": tensor.dtype, "replica_id": replica_id}
        if flattened_range is not None:
            changed["flattened_range"] = flattened_range
        present = dataclasses.replace(blank, **changed)
        out, start = [], 0
        for part, size in parts.items():
            for narrowed in present.narrow(0, start, size):
                narrowed.key = f"{narrowed.key}.{part}"
                out.append(narrowed)
            start += size
        return out

    @torch.no_grad()
    def merge(found: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(found))

    sharded[key] = mcore.ShardedTensorFactory(whole.key, whole.data, build, merge, whole.replica_id)
