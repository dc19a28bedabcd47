"""A live megatron-core model becomes a paged one, in place: same parameters, same state dict, same training path.

Adoption has two halves. The first looks at every module and either knows what it computes or refuses by name; nothing
has changed then. The second gives each stock attention and layer our subclass and binds it to its place in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.config import ModelShape
from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import AttendSpec, Ops, RotaryTable, StepInputs
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.core_attention import TorchCoreAttention
from megatron_infer.models.layers import PagedAttention, PagedSelfAttention, PagedTransformerLayer, require_inference
from megatron_infer.models.lean import FeedForward, LeanAttention, LeanLayer, LeanMLP, LeanNorm
from megatron_infer.models.moe import LeanExperts
from megatron_infer.models.rotary import cpu_rotary, rotary_table
from megatron_infer.models.support import check_config, check_hooks, check_model, unwrap

BY_SPEC = "build it by spec instead: megatron_infer.models.specs.with_inference(spec)"


def adopt(
    model: torch.nn.Module | Sequence[torch.nn.Module], *, name: str = "", vocab_size: int | None = None
) -> AdoptedModel:
    """Make a live GPTModel paged, in place, and give it as what the runner drives.

    `model` may be wrapped (DDP, Float16Module) and may be Megatron's one-element list of chunks. `vocab_size` is the
    true size where the model's own is padded. Adopting twice is fine. Raises AdoptionError, with nothing changed,
    naming the module and the reason if any part of the model is not known to compute what the paged path computes.
    """
    live = unwrap(model)
    check_config(live.config)
    check_model(live)
    num_ranks = mcore.group_size(live.pg_collection.tp)
    layers = [
        _LayerPlan(layer, f"decoder.layers.{i}", slot=i, model=live, num_ranks=num_ranks)
        for i, layer in enumerate(live.decoder.layers)
    ]
    if not layers:
        raise AdoptionError("decoder.layers", "the model has no attention layers: there is nothing to page")
    final_norm = live.decoder.final_layernorm
    if final_norm is None:
        raise AdoptionError("decoder.final_layernorm", "missing; a decoder without it is not supported")
    lean_norm = LeanNorm(final_norm, "decoder.final_layernorm")
    shape = _shape(live, layers, vocab_size)
    for layer in layers:
        layer.apply()
    cpu_rotary(live)
    return AdoptedModel(live, shape, layers, lean_norm, num_ranks=num_ranks, name=name)


class _LayerPlan:
    """What will become of one decoder layer."""

    def __init__(self, layer: Any, name: str, *, slot: int, model: Any, num_ranks: int) -> None:
        self.layer, self.attention = layer, layer.self_attention
        self.spec = _attention_spec(layer, name, model)
        attention = LeanAttention(
            self.attention, f"{name}.self_attention", layer=slot, spec=self.spec, num_ranks=num_ranks
        )
        self.lean_attention = attention
        self.lean: LeanLayer | None = None
        if type(layer) in (mcore.TransformerLayer, PagedTransformerLayer):
            _check_layer(layer, name)
            self.lean = LeanLayer(
                input_norm=LeanNorm(layer.input_layernorm, f"{name}.input_layernorm"),
                attention=attention,
                mlp_norm=LeanNorm(layer.pre_mlp_layernorm, f"{name}.pre_mlp_layernorm"),
                mlp=_feed_forward(layer.mlp, f"{name}.mlp", num_ranks),
            )
            check_hooks(layer, name)
        elif not isinstance(self.attention, PagedAttention):
            raise AdoptionError(
                name, f"layer class {_qualified(layer)} is not megatron-core's TransformerLayer; {BY_SPEC}"
            )

    def apply(self) -> None:
        if type(self.attention) is mcore.SelfAttention:
            self.attention.__class__ = PagedSelfAttention
        self.attention.lean = self.lean_attention
        if self.lean is not None:
            self.layer.__class__ = PagedTransformerLayer
            self.layer.lean = self.lean


class AdoptedModel:
    """kernels.base.PagedModel over a live GPTModel. Holds no tensors of its own."""

    def __init__(
        self, live: Any, shape: ModelShape, layers: list[_LayerPlan], norm: LeanNorm, *, num_ranks: int, name: str
    ) -> None:
        self.live, self.shape, self.name = live, shape, name
        """live: the GPTModel itself, without wrappers."""
        self.specs: list[AttendSpec] = [layer.spec for layer in layers]
        self.device: torch.device = next(live.decoder.parameters()).device
        self._lean = [layer.lean for layer in layers]
        self._drives_itself = all(lean is not None for lean in self._lean)
        self._norm = norm
        self._tp_group = live.pg_collection.tp if num_ranks > 1 else None
        self._lean_embedding = num_ranks == 1

    def embed(self, step: StepInputs) -> Tensor:
        """Token (and learned position) embeddings, [T, 1, D]."""
        return self._embed(step).unsqueeze(1)

    def hidden(self, step: StepInputs) -> Tensor:
        """Final normed hidden states [T, D]. Runs under torch.inference_mode() (no_grad too), in eval mode."""
        require_inference(self.live)
        x_TD = self._embed(step)
        if not self._drives_itself:
            return self.live.decoder(
                hidden_states=x_TD.unsqueeze(1), attention_mask=None, inference_context=step
            ).squeeze(1)
        residual_TD: Tensor | None = None
        for layer in self._lean:
            x_TD, residual_TD = layer.run(step, x_TD, residual_TD)  # type: ignore[union-attr]
        return self._norm.run_added(step.ops, x_TD, residual_TD)[0]

    def logits(self, hidden_SD: Tensor, ops: Ops) -> Tensor:
        """[S, padded V] in the model's dtype, gathered over tensor-parallel ranks."""
        logits_SV = ops.linear(hidden_SD, self._output_weight(), self.live.output_layer._parameters["bias"])
        if self._tp_group is None:
            return logits_SV
        parts = [torch.empty_like(logits_SV) for _ in range(self._tp_group.size())]
        torch.distributed.all_gather(parts, logits_SV.contiguous(), group=self._tp_group)
        return torch.cat(parts, dim=-1)

    def rotary_table(self, num_positions: int) -> RotaryTable | None:
        """cos and sin of positions 0 .. num_positions - 1; None without rotary embedding."""
        if not any(spec.rotary_dim for spec in self.specs):
            return None
        return rotary_table(self.live.rotary_pos_emb, num_positions, self.device)

    def packable_weights(self) -> Iterable[Tensor]:
        """Weights of this rank that go through `ops.linear`, the output layer's included."""
        yield self._output_weight()
        if self._tp_group is None:
            for layer in self._lean:
                if layer is not None:
                    yield from layer.weights()

    def _embed(self, step: StepInputs) -> Tensor:
        embedding = self.live.embedding
        if not self._lean_embedding:
            return embedding(step.token_ids_T.unsqueeze(0), step.positions_T.unsqueeze(0)).squeeze(1)
        x_TD = F.embedding(step.token_ids_T, embedding.word_embeddings.weight)
        if embedding.add_position_embedding:
            x_TD += F.embedding(step.positions_T, embedding.position_embeddings.weight)
        return x_TD

    def _output_weight(self) -> Tensor:
        live = self.live
        if live.share_embeddings_and_output_weights:
            return live.shared_embedding_or_output_weight()
        return live.output_layer._parameters["weight"]


def _attention_spec(layer: Any, name: str, model: Any) -> AttendSpec:
    """How this layer's attention attends; raises AdoptionError where that is not known."""
    attention, where = layer.self_attention, f"{name}.self_attention"
    if type(attention) is not mcore.SelfAttention and not isinstance(attention, PagedAttention):
        reason = f"attention class {_qualified(attention)} is not megatron-core's SelfAttention"
        raise AdoptionError(where, reason + (f"; {BY_SPEC}" if isinstance(attention, mcore.SelfAttention) else ""))
    core = attention.core_attention
    if type(attention) is mcore.SelfAttention and type(core) not in (mcore.DotProductAttention, TorchCoreAttention):
        raise AdoptionError(
            f"{where}.core_attention",
            f"class {_qualified(core)} is not known, so neither is what it computes; "
            f"if it is causal softmax attention, {BY_SPEC}",
        )
    if attention.attn_mask_type != mcore.AttnMaskType.causal:
        raise AdoptionError(where, f"attn_mask_type is {attention.attn_mask_type.name}; only causal attention is paged")
    config, number = attention.config, attention.layer_number
    if attention.num_query_groups_per_partition * attention.world_size != config.num_query_groups:
        raise AdoptionError(
            where,
            f"{config.num_query_groups} kv heads over {attention.world_size} tensor-parallel ranks: "
            "heads shared between ranks are not supported yet",
        )
    head_dim = attention.hidden_size_per_attention_head
    rotary = getattr(model, "rotary_pos_emb", None)
    rotates = rotary is not None and not (config.no_rope_freq and config.no_rope_freq[number - 1])
    return AttendSpec(
        num_kv_heads=attention.num_query_groups_per_partition,
        group_size=attention.num_attention_heads_per_partition // attention.num_query_groups_per_partition,
        head_dim=head_dim,
        # apply_query_key_layer_scaling divides by the layer's number and multiplies again: it cancels
        scale=1.0 / math.sqrt(head_dim) if config.softmax_scale is None else config.softmax_scale,
        window=_window(config, number, where),
        rotary_dim=2 * rotary.inv_freq.numel() if rotates else 0,
        rotary_interleaved=rotates and rotary.rotary_interleaved,
    )


def _window(config: Any, layer_number: int, where: str) -> int | None:
    """Keys visible to a query of this layer, itself included."""
    if not mcore.is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left, right = config.window_size
    if left < 0 or right != 0:
        raise AdoptionError(where, f"window_size={config.window_size}: only (n >= 0, 0) is causal and bounded")
    return int(left) + 1


def _check_layer(layer: Any, name: str) -> None:
    for slot in ("cross_attention", "pre_cross_attn_layernorm"):
        module = getattr(layer, slot)
        if type(module) is not mcore.IdentityOp:
            raise AdoptionError(f"{name}.{slot}", f"{_qualified(module)}: cross attention is not supported")
    for slot in ("self_attn_bda", "mlp_bda"):
        if getattr(layer, slot) is not mcore.get_bias_dropout_add:
            raise AdoptionError(f"{name}.{slot}", f"{getattr(layer, slot)!r} is not megatron-core's bias-dropout-add")


def _feed_forward(mlp: Any, name: str, num_ranks: int) -> FeedForward:
    if type(mlp) is mcore.MLP:
        return LeanMLP(mlp, name, num_ranks=num_ranks)
    if type(mlp) is mcore.MoELayer:
        return LeanExperts(mlp, name)
    raise AdoptionError(name, f"class {_qualified(mlp)} is not megatron-core's MLP or MoELayer")


def _shape(model: Any, layers: list[_LayerPlan], vocab_size: int | None) -> ModelShape:
    first, config = layers[0].spec, model.config
    for i, layer in enumerate(layers):
        spec = layer.spec
        if (spec.num_kv_heads, spec.group_size, spec.head_dim) != (
            first.num_kv_heads,
            first.group_size,
            first.head_dim,
        ):
            raise AdoptionError(
                f"decoder.layers.{i}.self_attention", "heads differ between layers: one cache holds them all"
            )
    weights = [weight for layer in layers for weight in _weights(layer)]
    dtypes = {weight.dtype for weight in weights}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise AdoptionError("decoder", f"weights are {names}; all float32 or all bfloat16 is supported")
    padded = model.vocab_size
    if vocab_size is not None and not 0 < vocab_size <= padded:
        raise AdoptionError("", f"vocab_size={vocab_size}, but the model's embedding has {padded} rows")
    learned = getattr(model.embedding, "position_embeddings", None)
    dtype = weights[0].dtype
    return ModelShape(
        num_layers=len(layers),
        num_attention_layers=len(layers),
        num_query_heads=first.num_kv_heads * first.group_size,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=padded if vocab_size is None else vocab_size,
        padded_vocab_size=padded,
        # Rotary angles exist for any position, but the model was trained for max_sequence_length of them.
        max_position=learned.weight.shape[0] if learned is not None else model.max_sequence_length,
        kv_dtype_bytes=dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _weights(layer: _LayerPlan) -> Iterator[Tensor]:
    if layer.lean is not None:
        yield from layer.lean.weights()
    else:
        yield layer.lean_attention.qkv.weight()


def _qualified(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
