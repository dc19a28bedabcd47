"""A training batch as one step of the engine's layers, on exact kernels with gradients.

The forward runs the engine's own kernels and so has the engine's bits. The backward recomputes the operation with
differentiable torch code and differentiates that: gradients are those of the same formula, within rounding.

Legend: kernels/base.py and kernels/ssm.py; L length of a sequence, b sequences of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_infer.errors import ModelError
from megatron_infer.kernels.activations import GEGLU, form_of
from megatron_infer.kernels.base import AttendSpec, RotaryTable, StepMetadata
from megatron_infer.kernels.exact import ExactAttention, ExactOps
from megatron_infer.kernels.experts import RoutingRules
from megatron_infer.kernels.native.native_layers import LayerProgram
from megatron_infer.kernels.native.native_lora import NativeLoRA
from megatron_infer.kernels.native.native_scan import NativeScan
from megatron_infer.kernels.ssm import LayerStates, RecurrentSpec, SsmWeights
from megatron_infer.kernels.torch.cpu_torch import apply_rotary
from megatron_infer.kernels.torch.latent_products import into_latent, out_of_latent
from megatron_infer.models.attached_lora import LinearLoRA
from megatron_infer.models.core_attention import attend_explicitly
from megatron_infer.models.fused_layers import FusedLinear
from megatron_infer.models.mamba_scan import gated_rms_norm, mix

BLOCK = 256
"""Keys per block of the scratch cache; no bit depends on it."""
SHORT = 512
"""Positions up to which torch's flash attention is slower than plain products, and less accurate in bf16."""
SCAN_CHUNK = 128
"""Positions of a chunk in the differentiable scan."""
Formula = Callable[..., Any]


class _Exact(torch.autograd.Function):
    """Forward: kernel(*tensors). Backward: the gradients of formula(*tensors)."""

    @staticmethod
    def forward(ctx: Any, kernel: Formula, formula: Formula, *tensors: Tensor | None) -> Any:
        ctx.formula = formula
        ctx.save_for_backward(*tensors)
        return kernel(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [
            tensor if tensor is None else tensor.detach().requires_grad_(wants)
            for tensor, wants in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            outs = ctx.formula(*inputs)
        outs = (outs,) if isinstance(outs, Tensor) else outs
        pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None and out.requires_grad]
        sources = [tensor for tensor, wants in zip(inputs, wanted, strict=True) if wants]
        found = iter(
            torch.autograd.grad([out for out, _ in pairs], sources, [grad for _, grad in pairs], allow_unused=True)
        )
        return (None, None, *(next(found) if wants else None for wants in wanted))


class _Linear(torch.autograd.Function):
    """Forward: x @ weight.T + bias by the exact kernel. Backward: two products, of a gradient in x's dtype."""

    @staticmethod
    def forward(ctx: Any, linear: Formula, x_TX: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TX, weight)
        return linear(x_TX, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_TY: Tensor) -> tuple[Tensor | None, ...]:
        x_TX, weight = ctx.saved_tensors
        grad_TY = grad_TY.to(x_TX.dtype)  # of logits it is fp32
        _, to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            None,
            grad_TY @ weight if to_x else None,
            grad_TY.t() @ x_TX if to_weight else None,
            grad_TY.sum(0) if to_bias else None,
        )


class DifferentiableOps:
    """kernels.base.Ops with the bits of `ExactOps` and with gradients. Never writes into its arguments."""

    name = "native, exact, differentiable"
    experts = None
    norms = None
    argmax_linear = None
    embedding = staticmethod(F.embedding)

    def __init__(self, exact: ExactOps) -> None:
        self.exact = exact

    def linear(self, x_TX: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _Linear.apply(self.exact.linear, x_TX, weight, bias)

    def fp32_linear(self, x_SX: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        assert rows == len(weight), "gradients are those of all rows"
        return _Linear.apply(lambda *given: self.exact.fp32_linear(*given, rows), x_SX, weight, bias)

    def rms_norm(self, x_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        return _Exact.apply(
            lambda x, w: self.exact.rms_norm(x, w, eps, zero_centered=zero_centered),
            lambda x, w: _rms_norm(x, w, eps, x.dtype, zero_centered),
            x_TD,
            weight,
        )

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        def formula(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            total = residual + x
            return _rms_norm(total, w, eps, x.dtype, zero_centered), total

        return _Exact.apply(
            lambda x, residual, w: self.exact.add_rms_norm(x, residual.clone(), w, eps, zero_centered=zero_centered),
            formula,
            x_TD,
            residual_TD,
            weight,
        )

    def layer_norm(self, x_TD: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self.exact.layer_norm(x_TD, weight, bias, eps)

    def into_latent(self, q_TNX: Tensor, weight_NHL: Tensor) -> Tensor:
        return _Exact.apply(self.exact.into_latent, into_latent, q_TNX, weight_NHL)

    def out_of_latent(self, x_TNL: Tensor, weight_NVL: Tensor) -> Tensor:
        return _Exact.apply(self.exact.out_of_latent, out_of_latent, x_TNL, weight_NVL)

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        def formula(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up

        return _Exact.apply(self.exact.silu_mul, formula, x_T2F)

    def softcap(self, x_SV: Tensor, cap: float) -> Tensor:
        return _Exact.apply(lambda x: self.exact.softcap(x.clone(), cap), lambda x: cap * torch.tanh(x / cap), x_SV)

    def gated_rms_norm(
        self, y_TM: Tensor, gate_TM: Tensor, weight: Tensor | None, eps: float, *, group_size: int
    ) -> Tensor:
        return _Exact.apply(
            lambda y, gate, w: self.exact.gated_rms_norm(y, gate, w, eps, group_size=group_size),
            lambda y, gate, w: gated_rms_norm(y, gate, w, eps, group_size),
            y_TM,
            gate_TM,
            weight,
        )

    def route(
        self, logits_TE: Tensor, bias_E: Tensor | None, rules: RoutingRules, formula: Callable[[Tensor], Any]
    ) -> tuple[Tensor, Tensor]:
        return _Exact.apply(lambda logits: self.exact.route(logits, bias_E, rules, formula), formula, logits_TE)

    def sigmoid_mul(self, x_TM: Tensor, gate_TM: Tensor) -> Tensor:
        return _Exact.apply(
            self.exact.sigmoid_mul, lambda x, g: (x * torch.sigmoid(g.float())).to(x.dtype), x_TM, gate_TM
        )

    def rowwise(self, function: Callable[[Tensor], Any], x_TX: Tensor) -> Any:
        if form_of(function) == GEGLU:
            return _Exact.apply(lambda x: self.exact.rowwise(function, x), function, x_TX)
        return self.exact.rowwise(function, x_TX)


class _AddPair(torch.autograd.Function):
    """Forward: y + scale * b (a x) by the engine's kernel. Backward: products in x's dtype."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Formula, scale: float, y_TY: Tensor, x_TX: Tensor, a_rX: Tensor, b_Yr: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_TX, a_rX, b_Yr)
        ctx.scale = scale
        return kernel(y_TY.clone(), x_TX, a_rX, b_Yr)

    @staticmethod
    def backward(ctx: Any, grad_TY: Tensor) -> tuple[Tensor | None, ...]:
        x_TX, a_rX, b_Yr = ctx.saved_tensors
        scaled_TY = grad_TY * ctx.scale
        h_Tr = scaled_TY @ b_Yr
        return None, None, grad_TY, h_Tr @ a_rX, h_Tr.t() @ x_TX, scaled_TY.t() @ (x_TX @ a_rX.t())


class TrainedPair:
    """The pair that trains on a linear, of which an engine has copies (`LinearLoRA.trains_only`)."""

    num_pairs = 1

    def __init__(self, pair: LinearLoRA, linear: FusedLinear) -> None:
        self.pair = pair
        self.linear = linear


class TrainedPairs:
    """Adds live pairs with the bits of an engine's copies of them, and with gradients, complete on every rank."""

    name, graph_safe = "native, exact, differentiable", False

    def __init__(self, native: NativeLoRA) -> None:
        self._native = native

    def run(self, y_TY: Tensor, x_TX: Tensor, trained: TrainedPair) -> Tensor:
        """x_TX: as the linear's product takes it: spread over the ranks already."""
        pair, linear = trained.pair, trained.linear
        if pair.is_off:
            return y_TY
        a_rX = pair.a if linear.spread is None else linear.spread.spread(pair.a)
        b_Yr = pair.b if linear.reduce is None else linear.reduce.spread(pair.b)

        def kernel(y_TY: Tensor, x_TX: Tensor, a_rX: Tensor, b_Yr: Tensor) -> Tensor:
            slots = self._native.pairs(1, len(a_rX), a_rX.shape[1], len(b_Yr), dtype=y_TY.dtype, device=y_TY.device)
            (packed,) = self._native.pack([(slots, [(a_rX, b_Yr, None)])])
            if packed is None:
                raise ModelError("exact_math: the adapter has numbers that are not finite")
            slots.put(0, packed, pair.scaling)
            self._native.plan(torch.zeros(len(y_TY), dtype=torch.int32))
            return self._native.run(y_TY, x_TX, slots)

        added_TY: Tensor = _AddPair.apply(kernel, pair.scaling, y_TY, x_TX, a_rX, b_Yr)
        return added_TY


def _rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    wide, factor = x.float(), weight.float() + 1 if zero_centered else weight
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor).to(dtype)


class TrainingStep:
    """kernels.base.StepInputs over whole sequences end to end, each from position 0."""

    def __init__(
        self,
        token_ids_T: Tensor,
        lengths: Sequence[int],
        *,
        ops: DifferentiableOps,
        attention: ExactAttention,
        scan: NativeScan | None,
        rotary: RotaryTable | None,
        dtype: torch.dtype,
        live_scan_weights: Callable[[int], SsmWeights],
        lora: TrainedPairs | None,
    ) -> None:
        """rotary: cos and sin up to the longest length. live_scan_weights(layer) gives tensors with gradients. lora:
        adds the model's `TrainedPair`s; None: it has none."""
        assert sum(lengths) == len(token_ids_T), f"{len(token_ids_T)} tokens, lengths add up to {sum(lengths)}"
        self.num_tokens, self.lengths = len(token_ids_T), list(lengths)
        self.ops: Any = ops
        self.token_ids_T = token_ids_T
        self.routing_TLK: Tensor | None = None
        self.tokens_of_ranks = None
        self.lora: Any = lora
        self.absorbed_S: Tensor | None = None
        self.is_padded, self.padding_T1 = False, None
        self.positions_T = torch.cat([torch.arange(length) for length in lengths])
        self._attention, self._scan, self._dtype, self._live_scan_weights = attention, scan, dtype, live_scan_weights
        self._step = self._metadata(rotary)

    def attend(self, layer: int, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttendSpec) -> Tensor:
        def kernel(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
            shape = (1, spec.planes, self._num_blocks, BLOCK, spec.num_kv_heads, spec.head_dim)
            cache = torch.empty(shape, dtype=self._dtype)
            self._attention.plan(self._step)
            return self._attention.run(q, k, v, cache, layer=0, spec=spec)

        return _Exact.apply(
            kernel, lambda q, k, v, sinks: self._attend(q, k, v, sinks, spec), q_TKGH, k_TKH, v_TKH, spec.sinks_N
        )

    def ssm(self, layer: int, xBC_TC: Tensor, dt_TX: Tensor, weights: SsmWeights, spec: RecurrentSpec) -> Tensor:
        """Ignores `weights`, which may date from before the last optimizer step, and reads the parameters."""
        live = self._live_scan_weights(layer)

        def kernel(x: Tensor, dt: Tensor, *own: Tensor | None) -> Tensor:
            assert self._scan is not None
            rows = len(self.lengths)
            states = LayerStates(
                torch.empty(rows, spec.num_channels, spec.conv_width),
                torch.empty(rows, spec.num_heads, spec.head_dim, spec.state_dim),
            )
            self._scan.plan(self._step)
            return self._scan.run(x, dt, states, _weights(own), spec)

        tensors = (live.conv_CW, live.conv_bias_C, live.decay_H, live.skip_H, live.dt_bias_H)
        return _Exact.apply(
            kernel, lambda x, dt, *own: self._recur(x, dt, _weights(own), spec), xBC_TC, dt_TX, *tensors
        )

    def run_program(self, program: LayerProgram, x_TX: Tensor, residual_TD: Tensor | None) -> None:
        """Each operation has its own gradients."""

    def _metadata(self, rotary: RotaryTable | None) -> StepMetadata:
        lengths = np.array(self.lengths, dtype=np.int32)
        rows, blocks = len(lengths), -(-lengths // BLOCK)
        first = np.concatenate(([0], np.cumsum(blocks)))
        self._num_blocks = int(first[-1])
        table = torch.zeros(rows, int(blocks.max(initial=1)), dtype=torch.int32)
        for row in range(rows):
            table[row, : blocks[row]] = torch.arange(first[row], first[row + 1])
        kv_pos = [int(first[row]) * BLOCK + torch.arange(length) for row, length in enumerate(self.lengths)]
        cu_q = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        order = np.arange(rows, dtype=np.int32)
        cos = sin = None
        if rotary is not None:
            cos, sin = (part.to(self._dtype)[self.positions_T] for part in (rotary.cos_PR, rotary.sin_PR))
        return StepMetadata(
            num_tokens=self.num_tokens,
            num_rows=rows,
            num_decode=0,
            q_len=lengths,
            kv_len=lengths,
            cu_q=cu_q,
            table_row=order,
            num_prompt_queries=np.zeros(rows, dtype=np.int32),
            q_len_R=torch.from_numpy(lengths),
            kv_len_R=torch.from_numpy(lengths),
            cu_q_R1=torch.from_numpy(cu_q),
            table_row_R=torch.from_numpy(order),
            block_table=table,
            positions_T=self.positions_T,
            kv_pos_T=torch.cat(kv_pos),
            cos_TR=cos,
            sin_TR=sin,
        )

    def _attend(self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None, spec: AttendSpec) -> Tensor:
        """The attention of `attend` in torch, sequence by sequence."""
        if (rotation := self._step.rotation(spec)) is not None:
            turn = {"dim": spec.rotary_dim, "interleaved": spec.rotary_interleaved}
            q_TKGH, k_TKH = (apply_rotary(x, *rotation, **turn) for x in (q_TKGH, k_TKH))
        mixed = []
        for q, k, v in zip(*(x.split(self.lengths) for x in (q_TKGH, k_TKH, v_TKH)), strict=True):
            length = len(q)
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            if spec.window is not None:
                seen = seen.triu(1 - spec.window)
            key, value = (x.transpose(0, 1).expand(spec.group_size, -1, -1, -1) for x in (k, v))
            query = q.permute(2, 1, 0, 3)
            if spec.softcap is not None or sinks_N is not None:
                heads = (spec.num_kv_heads, spec.group_size)
                sinks_GK11 = None if sinks_N is None else sinks_N.view(heads).t()[:, :, None, None]
                out = attend_explicitly(query, key, value, seen, sinks_GK11, scale=spec.scale, softcap=spec.softcap)
            else:
                with sdpa_kernel(SDPBackend.MATH) if length <= SHORT else nullcontext():
                    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=spec.scale)
            mixed.append(out.permute(2, 1, 0, 3).flatten(1))
        return torch.cat(mixed)

    def _recur(self, xBC_TC: Tensor, dt_TX: Tensor, weights: SsmWeights, spec: RecurrentSpec) -> Tensor:
        """The scan of `ssm` in torch; sequences of one length together."""
        if len(set(self.lengths)) == 1:
            shape = (len(self.lengths), self.lengths[0])
            y_bLM = _recur(*(x.unflatten(0, shape).transpose(0, 1) for x in (xBC_TC, dt_TX)), weights, spec)
            return y_bLM.transpose(0, 1).flatten(0, 1)
        sequences = zip(xBC_TC.split(self.lengths), dt_TX.split(self.lengths), strict=True)
        return torch.cat([_recur(x[:, None], dt[:, None], weights, spec)[:, 0] for x, dt in sequences])


def _recur(xBC_LbC: Tensor, dt_LbX: Tensor, weights: SsmWeights, spec: RecurrentSpec) -> Tensor:
    """[L, b, C] -> [L, b, M], every sequence from an empty state."""
    return mix(xBC_LbC.float(), dt_LbX.float(), weights, spec, chunk=SCAN_CHUNK).to(xBC_LbC.dtype)


def _weights(own: Sequence[Tensor | None]) -> SsmWeights:
    conv, bias, decay, skip, dt_bias = own
    assert conv is not None and decay is not None and dt_bias is not None
    return SsmWeights(conv_CW=conv, conv_bias_C=bias, decay_H=decay, skip_H=skip, dt_bias_H=dt_bias)
