"""Paged attention, norms, activations and linears in plain torch: no compiler needed, runs wherever torch runs.

Attention gathers keys and values of a few sequences at a time into one workspace and calls SDPA on them. Three things
keep SDPA on its fast path on a CPU: 4-D tensors, the query group folded into the query length (decode) or into the
batch (prompts) instead of `enable_gqa`, and `is_causal` rather than a mask for prompts that start at position 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.base import NO_INDEXER, AttendSpec, StepMetadata
from megatron_infer.kernels.kv_rounding import append, movable
from megatron_infer.kernels.packing import PackedLinears, packed_linear
from megatron_infer.kernels.torch.fp32_linear import fp32_linear
from megatron_infer.kernels.torch.latent_products import into_latent, out_of_latent

MAX_SCORES = 1 << 24
"""Scores in memory at once where softmax sinks or a softcap exclude SDPA."""
GATHER_TOKENS = 4096
"""Keys gathered at once for decode rows: enough to amortise the calls, few enough for the L2/L3 cache."""


class TorchOps:
    """Norms, activations and linears with torch operators; linears use prepacked weights where there are any."""

    name = "torch"
    experts = None
    norms = None
    argmax_linear: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor] | None] | None = None
    route: Callable[..., tuple[Tensor, Tensor]] | None = None
    embedding: Callable[[Tensor, Tensor], Tensor] = staticmethod(F.embedding)
    into_latent = staticmethod(into_latent)
    out_of_latent = staticmethod(out_of_latent)

    def __init__(self, packed: PackedLinears | None = None) -> None:
        self._packed_of = (packed or PackedLinears()).get

    def linear(self, x_TX: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = self._packed_of(id(weight))
        if packed is None:
            return F.linear(x_TX, weight, bias)
        return packed_linear(x_TX, packed, bias)

    def fp32_linear(self, x_SX: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        packed = self._packed_of(id(weight))
        if packed is None or packed.dtype is not torch.float32:
            return fp32_linear(x_SX, weight, bias, rows)
        return packed_linear(x_SX.float(), packed, None if bias is None else bias.float())[:, :rows]

    def rms_norm(self, x_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        x = x_TD.float()
        scale = torch.rsqrt_(x.square().mean(-1, keepdim=True).add_(eps))
        factor = weight.float() + 1 if zero_centered else weight
        return (x * scale).mul_(factor).to(x_TD.dtype)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        total = residual_TD.add_(x_TD)
        return self.rms_norm(total, weight, eps, zero_centered=zero_centered).to(x_TD.dtype), total

    def layer_norm(self, x_TD: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x_TD, weight.shape, weight, bias, eps)

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        gate, up = x_T2F.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def softcap(self, x_SV: Tensor, cap: float) -> Tensor:
        return x_SV.div_(cap).tanh_().mul_(cap)

    def gated_rms_norm(
        self, y_TM: Tensor, gate_TM: Tensor, weight: Tensor | None, eps: float, *, group_size: int
    ) -> Tensor:
        y = F.silu(gate_TM.float()).mul_(y_TM)
        if weight is None:
            return y.to(y_TM.dtype)
        y_TGX = y.view(y.shape[0], -1, group_size)
        scale = torch.rsqrt_(y_TGX.square().mean(-1, keepdim=True).add_(eps))
        return y_TGX.mul_(scale).flatten(1).mul_(weight).to(y_TM.dtype)

    def sigmoid_mul(self, x_TM: Tensor, gate_TM: Tensor) -> Tensor:
        return gate_TM.float().sigmoid().mul(x_TM).to(x_TM.dtype)

    def rowwise(self, function: Callable[[Tensor], Any], x_TX: Tensor) -> Any:
        return function(x_TX)


def apply_rotary(x_TXH: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, dim: int, interleaved: bool) -> Tensor:
    """Rotate the leading `dim` dims of every head, in fp32, rounded once -> a new tensor shaped like x."""
    shape = (x_TXH.shape[0],) + (1,) * (x_TXH.ndim - 2) + (dim,)
    cos, sin = cos_TR[:, :dim].float().view(shape), sin_TR[:, :dim].float().view(shape)
    out = x_TXH.clone(memory_format=torch.contiguous_format)
    turn = x_TXH[..., :dim].float()
    if interleaved:
        even, odd = turn[..., 0::2], turn[..., 1::2]
        out[..., 0:dim:2] = even * cos[..., 0::2] - odd * sin[..., 0::2]
        out[..., 1:dim:2] = odd * cos[..., 1::2] + even * sin[..., 1::2]
    else:
        half = dim // 2
        low, high = turn[..., :half], turn[..., half:]
        out[..., :half] = low * cos[..., :half] - high * sin[..., :half]
        out[..., half:dim] = high * cos[..., half:] + low * sin[..., half:]
    return out


def rotate_and_append(
    q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cache: Tensor, step: StepMetadata, spec: AttendSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k, write k and v to a layer's cache [planes, blocks, B, K, H] -> (q, k, v), k and v as it keeps
    them, without what no query reads."""
    if (rotation := step.rotation(spec)) is not None:
        turn = {"dim": spec.rotary_dim, "interleaved": spec.rotary_interleaved}
        q_TKGH, k_TKH = (apply_rotary(x, *rotation, **turn) for x in (q_TKGH, k_TKH))
    k_TKH = append(cache[0], step.kv_pos_T, k_TKH)
    if spec.value_start is not None:
        k_TKH = k_TKH[..., : spec.query_dim]
        return q_TKGH, k_TKH, k_TKH[..., spec.value_start :]
    return q_TKGH, k_TKH, append(cache[1], step.kv_pos_T, v_TKH)


def attend_explicitly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """What SDPA does not compute: capped scores, and a sink in the softmax, which has no value.

    query [*, Q, H], key and value [*, P, H], mask [*, Q, P] or None, sinks [*, Q, 1] or None, broadcast
    -> [*, Q, H] in the query's dtype. In fp32; some queries at a time.
    """
    lines = query.shape[:-2].numel()
    at_once = max(1, MAX_SCORES // max(1, lines * key.shape[-2]))
    out = []
    keys, values = key.float().transpose(-1, -2), value.float()
    if sinks is not None:
        sinks = sinks.float().expand(*query.shape[:-1], 1)
    for first in range(0, query.shape[-2], at_once):
        here = slice(first, first + at_once)
        scores = query[..., here, :].float() @ keys * scale
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores = scores.masked_fill_(~(mask if mask.shape[-2] == 1 else mask[..., here, :]), -torch.inf)
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            weights = torch.cat((scores, sinks[..., here, :]), -1).softmax(-1)[..., :-1]
        out.append((weights @ values).to(query.dtype))
    return torch.cat(out, -2)


@dataclass(slots=True)
class _DecodeGroup:
    """Decode rows of similar length whose keys are gathered together."""

    rows: Tensor
    """int64 indices of the rows (and of their tokens) in the step."""
    block_ids: Tensor
    """[rows * blocks] cache blocks, row-major."""
    num_blocks: int
    mask_R11P: Tensor | None
    """Visible keys; None when every gathered key is visible."""


class TorchPagedAttention:
    """Gather + SDPA. Groups of rows and masks are made once per step and window; all layers share them."""

    name = "torch"
    graph_safe = False
    _step: StepMetadata

    def __init__(self) -> None:
        self._groups: dict[int | None, list[_DecodeGroup]] = {}
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._workspace: Tensor | None = None

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        return None if spec.index is None else NO_INDEXER

    def plan(self, step: StepMetadata) -> None:
        self._step = step
        self._groups.clear()
        self._masks.clear()

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        step = self._step
        q_TKGH, k_TKH, v_TKH = rotate_and_append(q_TKGH, k_TKH, v_TKH, kv_cache[layer], step, spec)
        out_TNH = torch.empty(
            q_TKGH.shape[0],
            spec.num_kv_heads * spec.group_size,
            spec.value_dim,
            dtype=q_TKGH.dtype,
            device=q_TKGH.device,
        )
        if step.num_decode:
            self._decode(q_TKGH, kv_cache[layer], out_TNH, spec)
        for row in range(step.num_decode, step.num_rows):
            if not step.q_len[row]:
                continue  # pads the step
            self._attend_slice(row, q_TKGH, k_TKH, v_TKH, kv_cache[layer], out_TNH, spec)
        if step.cu_q[step.num_rows] < q_TKGH.shape[0]:
            out_TNH[int(step.cu_q[step.num_rows]) :] = 0  # padding tokens must not carry garbage (NaN) onwards
        return out_TNH.flatten(1)

    def _attend_slice(
        self,
        row: int,
        q_TKGH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        layer_cache: Tensor,
        out_TNH: Tensor,
        spec: AttendSpec,
    ) -> None:
        """Attention of one row of several queries; q and k are rotated and this step's keys are in `layer_cache`.

        k and v are rounded as in the cache.
        """
        step = self._step
        kv_len, first, stop = int(step.kv_len[row]), int(step.cu_q[row]), int(step.cu_q[row + 1])
        q_len = stop - first
        windowed = spec.window is not None and spec.window < kv_len
        q_GKTH = q_TKGH[first:stop].permute(2, 1, 0, 3)
        if kv_len == q_len:
            key_PKH, value_PKH = k_TKH[first:stop], v_TKH[first:stop]
        else:
            num_blocks = -(-kv_len // layer_cache.shape[2])
            block_ids = step.block_table[int(step.table_row[row]), :num_blocks]
            gathered = movable(layer_cache).index_select(1, block_ids).view(layer_cache.dtype).flatten(1, 2)
            gathered = gathered[..., : spec.query_dim].to(q_TKGH.dtype)
            key_PKH, value_PKH = gathered[0, :kv_len], gathered[-1, :kv_len, :, spec.value_start or 0 :]
        # The group is a batch axis of stride 0 over keys and values: nothing is repeated in memory.
        key_GKPH, value_GKPH = (x.transpose(0, 1).expand(spec.group_size, -1, -1, -1) for x in (key_PKH, value_PKH))
        if spec.sinks_N is not None or spec.softcap is not None:
            mask = self._slice_mask(row, q_len, kv_len, spec.window if windowed else None)
            sinks_GK11 = None
            if spec.sinks_N is not None:
                sinks_GK11 = spec.sinks_N.view(spec.num_kv_heads, spec.group_size).t()[:, :, None, None]
            form = {"scale": spec.scale, "softcap": spec.softcap}
            mixed = attend_explicitly(q_GKTH, key_GKPH, value_GKPH, sinks_GK11, mask, **form)
        elif kv_len == q_len and not windowed:
            mixed = F.scaled_dot_product_attention(q_GKTH, key_GKPH, value_GKPH, is_causal=True, scale=spec.scale)
        else:
            mask = self._slice_mask(row, q_len, kv_len, spec.window if windowed else None)
            mixed = F.scaled_dot_product_attention(q_GKTH, key_GKPH, value_GKPH, attn_mask=mask, scale=spec.scale)
        out_TNH[first:stop].unflatten(1, (spec.num_kv_heads, spec.group_size)).copy_(mixed.permute(2, 1, 0, 3))

    def _slice_mask(self, row: int, q_len: int, kv_len: int, window: int | None) -> Tensor:
        """[q_len, kv_len] visible keys, made once per row and window of a step."""
        mask = self._masks.get((row, window))
        if mask is None:
            mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=self._step.block_table.device)
            mask = mask.tril_(kv_len - q_len)
            if window is not None:
                mask = mask.triu_(kv_len - q_len - window + 1)
            self._masks[row, window] = mask
        return mask

    def _decode(self, q_TKGH: Tensor, cache: Tensor, out_TNH: Tensor, spec: AttendSpec) -> None:
        """cache: a layer's [planes, blocks, B, K, H]."""
        groups = self._groups.get(spec.window)
        if groups is None:
            groups = self._groups[spec.window] = list(self._make_groups(cache.shape[2], spec.window))
        num_kv, head_dim, block_size = spec.num_kv_heads, spec.head_dim, cache.shape[2]
        longest = max(group.block_ids.shape[0] for group in groups)
        needed = spec.planes * longest * block_size * num_kv * head_dim
        kept = cache.dtype
        cache = movable(cache)
        if self._workspace is None or self._workspace.numel() < needed or self._workspace.dtype != cache.dtype:
            self._workspace = torch.empty(needed, dtype=cache.dtype, device=cache.device)
        for group in groups:
            rows, length = group.rows.shape[0], group.num_blocks * block_size
            planes = []
            for plane, room in zip(cache, self._workspace.chunk(spec.planes), strict=True):
                gathered = room[: rows * length * num_kv * head_dim].view(-1, block_size, num_kv, head_dim)
                torch.index_select(plane, 0, group.block_ids, out=gathered)
                read = gathered.view(kept).view(rows, length, num_kv, head_dim)[..., : spec.query_dim]
                planes.append(read.to(q_TKGH.dtype).transpose(1, 2))
            query_RKGH = q_TKGH.index_select(0, group.rows)
            key_RKPH, value_RKPH = planes[0], planes[-1][..., spec.value_start or 0 :]
            mask, scale = group.mask_R11P, spec.scale
            if spec.sinks_N is None and spec.softcap is None:
                mixed_RKGH = F.scaled_dot_product_attention(
                    query_RKGH, key_RKPH, value_RKPH, attn_mask=mask, scale=scale
                )
            else:
                sinks_KG1 = None if spec.sinks_N is None else spec.sinks_N.view(num_kv, spec.group_size, 1)
                form = {"scale": scale, "softcap": spec.softcap}
                mixed_RKGH = attend_explicitly(query_RKGH, key_RKPH, value_RKPH, sinks_KG1, mask, **form)
            out_TNH.index_copy_(0, group.rows, mixed_RKGH.flatten(1, 2))

    def _make_groups(self, block_size: int, window: int | None) -> list[_DecodeGroup]:
        """Longest first, so that rows of a group differ little and padding stays small."""
        step = self._step
        device = step.block_table.device
        lengths = step.kv_len[: step.num_decode].tolist()
        starts = [0 if window is None else max(0, n - window) for n in lengths]
        firsts = [start // block_size for start in starts]
        counts = [-(-n // block_size) - first for n, first in zip(lengths, firsts, strict=True)]
        order = sorted(range(len(lengths)), key=counts.__getitem__, reverse=True)
        groups = []
        begin = 0
        while begin < len(order):
            widest = counts[order[begin]]
            rows = order[begin : begin + max(1, GATHER_TOKENS // (widest * block_size))]
            begin += len(rows)
            columns = torch.tensor([firsts[row] for row in rows])[:, None] + torch.arange(widest)
            columns.clamp_(max=step.block_table.shape[1] - 1)  # past a short row's end; masked below
            table_rows = torch.tensor([int(step.table_row[row]) for row in rows])[:, None]
            block_ids = step.block_table[table_rows.to(device), columns.to(device)].flatten()
            mask = None
            exact = [
                firsts[r] * block_size == starts[r] and starts[r] + widest * block_size == lengths[r] for r in rows
            ]
            if not all(exact):
                position = torch.tensor([firsts[r] * block_size for r in rows])[:, None]
                position = position + torch.arange(widest * block_size)
                low = torch.tensor([starts[r] for r in rows])[:, None]
                high = torch.tensor([lengths[r] for r in rows])[:, None]
                mask = ((position >= low) & (position < high))[:, None, None, :].to(device)
            groups.append(
                _DecodeGroup(
                    rows=torch.tensor(rows, device=device), block_ids=block_ids, num_blocks=widest, mask_R11P=mask
                )
            )
        return groups
