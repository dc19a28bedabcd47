"""megatron-core's latent attention (MLA) as operations on its live weights, as `fused_layers` has self attention.

    x ── q down ── norm ── q up ─────────────┐
                                             ├─ into the latents' space ─ attend to cached latents ─ out of it ─ proj
    x ── kv down ── [latent | rotary part] ──┘
                      └─ norm

A token keeps its normed latent and one rotated vector, the key and value of all heads. The key up projection is
multiplied into the queries and the value up projection into the sums, so that no head's keys and values are made
(kernels/torch/latent_products.py). Long chunks of prompts attend to full keys and values where kernels can
(kernels/native/native_latent.py). Legend: kernels/base.py; L latent, R rotary part, K and V a head's key without its
rotary part and its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.config.model_shape import LatentShape
from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import AttendSpec, Ops, StepInputs
from megatron_infer.models.fused_layers import (
    Attend,
    FusedLinear,
    FusedNorm,
    LayerOp,
    LayerOps,
    norm_unless_none,
)
from megatron_infer.models.indexer import FusedIndexer, index_spec, indexer_of, is_sparse
from megatron_infer.models.rotary import ROTARY_CLASSES, rotary_dim
from megatron_infer.models.te_apex import WHOLE, has_norm_inside, linear_role, qualified
from megatron_infer.models.tp_collectives import Reducer


class UpProjection:
    """The live weight of keys and values of all heads, one below the other: [N * (K + V), L] on this rank."""

    def __init__(self, linear: FusedLinear, *, num_heads: int, key_dim: int) -> None:
        self.linear, self.num_heads, self.key_dim = linear, num_heads, key_dim

    def key_NKL(self) -> Tensor:
        return self.linear.weight().unflatten(0, (self.num_heads, -1))[:, : self.key_dim]

    def value_NVL(self) -> Tensor:
        return self.linear.weight().unflatten(0, (self.num_heads, -1))[:, self.key_dim :]


class Projection:
    """A linear whose whole output every rank has: its rows are split over the ranks and gathered, or on each rank."""

    def __init__(self, module: torch.nn.Module, name: str, *, tp: Reducer | None) -> None:
        self._tp, self._gathers = tp, linear_role(module) is not WHOLE
        self.linear = FusedLinear(module, name, tp=tp)

    def run(self, step: StepInputs, x_TD: Tensor) -> Tensor:
        out_TX, _ = self.linear.run(step, x_TD, None)
        return out_TX if self._tp is None or not self._gathers else self._tp.whole(out_TX)


class LatentHeads(LayerOp):
    """[T, D] -> (queries [T, N, K + R], and the vector [T, 1, R + L] that is key and, from R on, value)."""

    def __init__(self, attention: Any, name: str, *, num_heads: int, tp: Reducer | None) -> None:
        config = attention.config
        self.num_heads, self.rank, self._tp = num_heads, config.kv_lora_rank, tp
        self.kv_down = Projection(attention.linear_kv_down_proj, f"{name}.linear_kv_down_proj", tp=tp)
        self.kv_norm = _norm(attention, "kv_layernorm", "linear_kv_up_proj", name)
        self.q_down: Projection | None = None
        last = "linear_q_proj"
        if config.q_lora_rank is not None:
            self.q_down = Projection(attention.linear_q_down_proj, f"{name}.linear_q_down_proj", tp=tp)
            last = "linear_q_up_proj"
        self.q_norm = _norm(attention, "q_layernorm", last, name)
        self.q_up = FusedLinear(getattr(attention, last), f"{name}.{last}", tp=tp, norm_apart=True)

    def run(self, step: StepInputs, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Any, Tensor | None]:
        return self.heads(step, x_TD, self.q_latent(step, x_TD)), residual_TD

    def q_latent(self, step: StepInputs, x_TD: Tensor) -> Tensor:
        """What queries and index queries are made of: the normed latent, or x where queries have none."""
        q_TX = x_TD if self.q_down is None else self.q_down.run(step, x_TD)
        return q_TX if self.q_norm is None else self.q_norm.norm(step.ops, q_TX)

    def heads(self, step: StepInputs, x_TD: Tensor, q_TX: Tensor) -> tuple[Tensor, Tensor]:
        q_TX, _ = self.q_up.run(step, q_TX, None)
        q_TNX = q_TX.unflatten(1, (self.num_heads, -1))
        key_TH = self._key(step.ops, self.kv_down.run(step, x_TD))
        key_TKH = (key_TH if self._tp is None else self._tp.spread(key_TH)).unsqueeze(1)
        return q_TNX, key_TKH

    def _key(self, ops: Ops, kv_TX: Tensor) -> Tensor:
        """[latent | rotary part] -> [rotary part | normed latent]."""
        latent_TL = kv_TX[:, : self.rank]
        if self.kv_norm is not None:
            latent_TL = self.kv_norm.norm_heads(ops, latent_TL)
        return torch.cat((kv_TX[:, self.rank :], latent_TL), dim=-1)

    def linears(self) -> Iterator[FusedLinear]:
        """Without the up projection of keys and values, by which nothing is multiplied as it is."""
        if self.q_down is not None:
            yield self.q_down.linear
        yield from (self.q_up, self.kv_down.linear)


class LatentAttend(Attend):
    """What `LatentHeads` gives -> paged attention, in the latents' space or, of long chunks, not [T, N * V]."""

    def __init__(self, layer: int, spec: AttendSpec, up: UpProjection, *, reuses_choice: bool = False) -> None:
        super().__init__(layer, spec)
        self.up = up
        self.reuses_choice = reuses_choice
        """Queries attend to the keys that an earlier layer's indexer chose."""

    def run(self, step: StepInputs, qk: Any, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        q_TNX, key_TKH = qk
        some = step.absorbed_S
        if some is None:
            mixed_TX = self._attend(step, self._into(step, q_TNX), key_TKH)
            return self._out(step, mixed_TX), residual_TD
        q_TKGH = q_TNX.new_empty(len(q_TNX), 1, self.spec.group_size, self.spec.head_dim)
        if len(some):
            q_TKGH[some] = self._into(step, q_TNX[some])
        mixed_TX = self._attend(step, q_TKGH, key_TKH)
        weight_XL = self.up.linear.weight()
        out_TX = q_TNX.new_empty(len(q_TNX), len(weight_XL) - self.up.num_heads * self.up.key_dim)
        if len(some):
            out_TX[some] = self._out(step, mixed_TX[some])
        step.attend_expanded(self.layer, q_TNX, weight_XL, self.spec, out_TX)
        return out_TX, residual_TD

    def _attend(self, step: StepInputs, q_TKGH: Tensor, key_TKH: Tensor) -> Tensor:
        value_TKH = key_TKH[..., self.spec.value_start :]
        return step.attend(self.layer, q_TKGH, key_TKH, value_TKH, self.spec)

    def _into(self, step: StepInputs, q_TNX: Tensor) -> Tensor:
        return step.ops.into_latent(q_TNX, self.up.key_NKL()).unsqueeze(1)

    def _out(self, step: StepInputs, mixed_TX: Tensor) -> Tensor:
        mixed_TNL = mixed_TX.unflatten(1, (self.spec.group_size, -1))
        return step.ops.out_of_latent(mixed_TNL, self.up.value_NVL())


class SparseHeads(LatentHeads):
    """`LatentHeads` with index queries: the key has an index key after its latent, of zeros without an indexer."""

    def __init__(
        self,
        attention: Any,
        name: str,
        *,
        num_heads: int,
        tp: Reducer | None,
        indexer: FusedIndexer | None,
        dim: int,
    ) -> None:
        super().__init__(attention, name, num_heads=num_heads, tp=tp)
        self.indexer, self.index_dim = indexer, dim

    def run(self, step: StepInputs, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Any, Tensor | None]:
        latent_TX = self.q_latent(step, x_TD)
        q_TNX, key_TKH = self.heads(step, x_TD, latent_TX)
        if self.indexer is None:
            return (q_TNX, F.pad(key_TKH, (0, self.index_dim)), None), residual_TD
        key_TKH = torch.cat((key_TKH, self.indexer.key(step, x_TD).unsqueeze(1)), dim=-1)
        return (q_TNX, key_TKH, self.indexer.queries(step, x_TD, latent_TX)), residual_TD

    def linears(self) -> Iterator[FusedLinear]:
        yield from super().linears()
        if self.indexer is not None:
            yield from self.indexer.linears()


class SparseAttend(LatentAttend):
    """What `SparseHeads` gives -> attention over the latents that an indexer chooses, and out of their space."""

    def run(self, step: StepInputs, qkv: Any, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        q_TNX, k_TKH, index = qkv
        mixed_TX = step.attend_to_chosen(self.layer, self._into(step, q_TNX), k_TKH, self.spec, index)
        return self._out(step, mixed_TX), residual_TD


class FusedLatentAttention(LayerOps):
    """Projections, paged attention over latents, output projection. Raises AdoptionError for what is not known."""

    def __init__(self, attention: Any, name: str, *, layer: int, tp: Reducer | None) -> None:
        config = attention.config
        _check(attention, name)
        self.shape = LatentShape(
            rank=config.kv_lora_rank,
            num_heads=config.num_attention_heads,
            rotary_dim=config.qk_pos_emb_head_dim,
            key_dim=config.qk_head_dim + config.qk_pos_emb_head_dim,
            value_dim=config.v_head_dim,
        )
        num_heads, rotary = config.num_attention_heads // attention.world_size, config.qk_pos_emb_head_dim
        spec = AttendSpec(
            num_kv_heads=1,
            group_size=num_heads,
            head_dim=rotary + config.kv_lora_rank,
            scale=attention.softmax_scale,
            rotary_dim=rotary_dim(attention.rotary_pos_emb),
            rotary_interleaved=True,  # megatron-core sorts even dims before odd ones, of queries and keys alike
            value_start=rotary,
        )
        up_name = f"{name}.linear_kv_up_proj"
        up_linear = FusedLinear(attention.linear_kv_up_proj, up_name, tp=tp, norm_apart=True)
        if up_linear.attached is not None:
            raise AdoptionError(up_name, "has an adapter, which the products of latent attention would leave out")
        up = UpProjection(up_linear, num_heads=num_heads, key_dim=config.qk_head_dim)
        proj = FusedLinear(attention.linear_proj, f"{name}.linear_proj", tp=tp)
        heads: LatentHeads
        if is_sparse(attention.core_attention):
            index = index_spec(attention, name, rotary_dim=spec.rotary_dim)
            spec = replace(spec, index=index, head_dim=spec.head_dim + index.dim)
            self.shape = replace(self.shape, index_dim=index.dim)
            indexer = indexer_of(attention, name, tp=tp)
            heads = SparseHeads(attention, name, num_heads=num_heads, tp=tp, indexer=indexer, dim=index.dim)
            self.attend: LatentAttend = SparseAttend(layer, spec, up, reuses_choice=indexer is None)
        else:
            spec = replace(spec, expands_from=self.shape.expands_from)
            heads = LatentHeads(attention, name, num_heads=num_heads, tp=tp)
            self.attend = LatentAttend(layer, spec, up)
        super().__init__(heads, self.attend, *proj.flat())


def _norm(attention: Any, norm: str, linear: str, name: str) -> FusedNorm | None:
    """The norm of what a linear takes: a module of its own, or inside the linear; None: there is none."""
    module = getattr(attention, linear)
    if has_norm_inside(module):
        return FusedNorm(module, f"{name}.{linear}")
    return norm_unless_none(getattr(attention, norm, None), f"{name}.{norm}")


def _check(attention: Any, name: str) -> None:
    """Raise AdoptionError for a setting with which megatron-core's latent attention computes something else."""
    config = attention.config
    reasons = {
        "rotary_interleaved": "latent attention sorts the dims that rotate by itself",
        "cache_mla_latents": "megatron-core's own cache takes the up projection apart; ours needs no setting",
        "fp8": "latent attention multiplies its up projection into queries and sums, which no FP8 recipe covers",
        "window_size": "latent attention with windows is not supported",
        "attn_logit_softcapping": "latent attention with capped logits is not supported",
    }
    for field, reason in reasons.items():
        if value := getattr(config, field, None):
            raise AdoptionError(name, f"{field}={value!r}: {reason}")
    if type(attention.rotary_pos_emb) not in ROTARY_CLASSES[config.rope_type]:
        raise AdoptionError(f"{name}.rotary_pos_emb", f"class {qualified(attention.rotary_pos_emb)} is not known")
    if config.softmax_type != "vanilla":
        raise AdoptionError(name, f"softmax_type={config.softmax_type!r}: latent attention with sinks is not supported")
    if config.num_attention_heads % attention.world_size:
        raise AdoptionError(
            name, f"{config.num_attention_heads} heads cannot be divided over {attention.world_size} ranks"
        )
