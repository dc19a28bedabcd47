"""What adoption will make of each layer of a decoder, decided before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import AttendSpec
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adoption_checks import check_called_by_none, check_untouched
from megatron_infer.models.bridge_modules import (
    ATTENTIONS,
    CAPPED_CORES,
    FALCON_H1_ATTENTION,
    FALCON_H1_LAYER,
    FALCON_H1_MIXER,
    FALCON_H1_MLP,
    MIXED_HEADS_ATTENTION,
    PATTERNED_CORES,
    TWO_ROPE_ATTENTION,
    is_local,
    is_of,
)
from megatron_infer.models.core_attention import TorchCoreAttention
from megatron_infer.models.delta_net import TorchDeltaNet
from megatron_infer.models.extended_modules import MixedHeadsAttention, TwoRopeAttention, has_window
from megatron_infer.models.extensions import multipliers_of
from megatron_infer.models.fused_layers import (
    AddResidual,
    AttendAndMix,
    FusedAttention,
    FusedLayer,
    FusedLinear,
    FusedMLP,
    FusedNorm,
    HeadForm,
    LayerOp,
    LayerOps,
)
from megatron_infer.models.fused_mixer import FusedDeltaNet, FusedMixer, RecurrentMixer
from megatron_infer.models.latent_attention import FusedLatentAttention
from megatron_infer.models.mamba_mixer import TorchMambaMixer, derives_from_stock_mixer, is_stock_mixer
from megatron_infer.models.moe import FusedExperts, LatentMoELayer
from megatron_infer.models.paged_layers import PAGED_ATTENTION, PAGED_LAYERS, PagedPart, paged_class
from megatron_infer.models.parallel_layer import AttentionBesideMixer, ParallelLayer
from megatron_infer.models.rotary import ropes_of, rotary_dim
from megatron_infer.models.sparse_module import TorchSparseAttention
from megatron_infer.models.te_apex import has_norm_inside, is_te_attention, qualified
from megatron_infer.models.tp_collectives import Reducer

BY_SPEC = "build it by spec instead: megatron_infer.models.specs.with_inference(spec)"
_KNOWN_LAYERS = {*PAGED_LAYERS, *PAGED_LAYERS.values()}


class LayerAdoption:
    """The operations of one decoder layer, read off its modules. Raises AdoptionError for a layer that is not known."""

    def __init__(
        self, layer: Any, name: str, *, model: Any, tp: Reducer | None, num_attention: int, num_mamba: int
    ) -> None:
        """num_attention, num_mamba: layers before this one that keep keys and values, and recurrent states."""
        self.layer, self.name = layer, name
        self._model, self._tp = model, tp
        self.attention: FusedAttention | FusedLatentAttention | None = None
        self.mixer: RecurrentMixer | None = None
        self.experts: FusedExperts | None = None
        self.fused: FusedLayer | None = None
        """None: a layer class of the user's, around a paged attention or mixer."""
        self._parts: list[tuple[Any, LayerOps]] = []
        """(module, its operations): the attention and the mixer whose forwards run a step."""
        _check_untouched(layer, name)
        if is_of(layer, FALCON_H1_LAYER):
            self._read_falcon_h1(num_attention, num_mamba)
        elif isinstance(layer, mcore.TransformerLayer):
            self._read_transformer(num_attention, num_mamba)
        elif isinstance(layer, mcore.MambaLayer):
            self._read_mamba(num_mamba)
        else:
            raise AdoptionError(name, f"layer class {qualified(layer)} is not known")
        kind = type(getattr(layer, "mixer", getattr(layer, "self_attention", None)))
        if model.config.context_parallel_size > 1 and (is_stock_mixer(kind) or kind is mcore.GatedDeltaNet):
            raise AdoptionError(
                name,
                f"context_parallel_size={model.config.context_parallel_size} with a recurrent layer of megatron-core's "
                f"own, which divides heads over these ranks in training: not supported; {BY_SPEC}",
            )

    def apply(self) -> None:
        """Give the modules their paged classes and their operations."""
        for module, operations in self._parts:
            if not isinstance(module, PagedPart):
                module.__class__ = paged_class(PagedPart, type(module))
            module.fused = operations
        if self.fused is not None:
            self.layer.__class__ = PAGED_LAYERS.get(type(self.layer), type(self.layer))
            self.layer.fused = self.fused

    @property
    def number(self) -> int:
        """The layer's number in the whole model, from 0, in any pipeline stage."""
        return int(self.layer.layer_number) - 1

    def linears(self) -> Iterator[FusedLinear]:
        """The linears of the layer's known modules."""
        for operation in self._known():
            yield from operation.linears()

    def weights(self) -> Iterator[Tensor]:
        """The weights that decide the layer's dtype: those of the known modules that go through `ops.linear`."""
        for operation in self._known():
            yield from operation.weights()

    def _known(self) -> list[LayerOps]:
        parts = (self.fused,) if self.fused is not None else (self.attention, self.mixer)
        return [part for part in parts if part is not None]

    def _read_transformer(self, num_attention: int, num_mamba: int) -> None:
        layer, name, module = self.layer, self.name, self.layer.self_attention
        attends, is_paged = type(module) is not mcore.IdentityOp, isinstance(module, PagedPart)
        body: LayerOps | None = None
        if type(module) is mcore.GatedDeltaNet or (
            is_paged and isinstance(module, TorchDeltaNet | mcore.GatedDeltaNet)
        ):
            body = self.mixer = FusedDeltaNet(module, f"{name}.self_attention", layer=num_mamba, tp=self._tp)
        elif attends:
            body = self.attention = _attention(layer, name, self._model, index=num_attention, tp=self._tp)
            if isinstance(layer, ParallelLayer):
                body = self._with_mixer(layer.mixer, "mixer", num_mamba)
        if body is not None:
            self._parts.append((module, body))
        if type(layer) not in _KNOWN_LAYERS:
            if is_paged:
                return
            raise AdoptionError(
                name, f"layer class {qualified(layer)} is not megatron-core's TransformerLayer; {BY_SPEC}"
            )
        _check_no_cross_attention(layer, name)
        first = "linear_qkv" if self.mixer is None else "in_proj"
        parts = {"part": "self_attention", "norm": "input_layernorm", "add": "self_attn_bda"}
        input_norm = _norm_before(layer, name, **parts, first=(getattr(module, first, None), first))
        parts = {"part": "mlp", "norm": "pre_mlp_layernorm", "add": "mlp_bda"}
        mlp_norm = _norm_before(layer, name, **parts, first=(getattr(layer.mlp, "linear_fc1", None), "linear_fc1"))
        mlp = None if mlp_norm is None else _feed_forward(layer.mlp, f"{name}.mlp", self._tp)
        if type(mlp) is FusedExperts:
            self.experts = mlp
        pairs = ((input_norm, body), (mlp_norm, mlp))
        blocks = [(norm, body) for norm, body in pairs if norm is not None and body is not None]
        if not blocks:
            raise AdoptionError(name, "a layer with neither attention nor MLP")
        self.fused = FusedLayer(*blocks)

    def _with_mixer(self, mixer: Any, where: str, index: int) -> AttendAndMix:
        """The layer's attention and its mixer, side by side."""
        factors, attention = multipliers_of(mixer.config), self.attention
        assert attention is not None
        name, given = f"{self.name}.{where}", factors.ssm_in_multiplier
        self.mixer = FusedMixer(mixer, name, layer=index, tp=self._tp, of_input=given)
        # the factor of attention's input: the kernels have that of queries and keys in their scale
        attended = factors.attention_in_multiplier * factors.attention_out_multiplier
        return AttendAndMix(attention, self.mixer, (attended, factors.ssm_out_multiplier))

    def _read_falcon_h1(self, num_attention: int, num_mamba: int) -> None:
        """Megatron-Bridge's layer of attention, a mixer and an MLP. No class of its modules is changed: its forward
        multiplies what their forwards take and give."""
        layer, name = self.layer, self.name
        known = {
            "self_attention": FALCON_H1_ATTENTION,
            "mamba_mixer": FALCON_H1_MIXER,
            "mlp": FALCON_H1_MLP,
        }
        for part, kind in known.items():
            if not is_of(module := getattr(layer, part), kind):
                raise AdoptionError(f"{name}.{part}", f"class {qualified(module)} is not Megatron-Bridge's {kind}")
        for part in ("self_attention.linear_qkv", "mamba_mixer.in_proj"):
            if has_norm_inside(layer.get_submodule(part)):
                raise AdoptionError(f"{name}.{part}", "norms its input, which norm has normed")
        if (ranks := layer.config.context_parallel_size) > 1:
            raise AdoptionError(name, f"context_parallel_size={ranks} with Falcon-H1's mixers is not supported")
        self.attention = _attention(layer, name, self._model, index=num_attention, tp=self._tp)
        body = self._with_mixer(layer.mamba_mixer, "mamba_mixer", num_mamba)
        norm = FusedNorm(layer.norm, f"{name}.norm")
        mlp = FusedMLP(layer.mlp, f"{name}.mlp", tp=self._tp, norm_apart=True)
        self.fused = FusedLayer((norm, body), (FusedNorm(layer.mlp.linear_fc1, f"{name}.mlp.linear_fc1"), mlp))

    def _read_mamba(self, index: int) -> None:
        layer, name = self.layer, self.name
        where, found = f"{name}.mixer", type(layer.mixer)
        is_mixer = isinstance(layer.mixer, TorchMambaMixer) or derives_from_stock_mixer(found)
        is_paged = is_mixer and isinstance(layer.mixer, PagedPart)
        if not is_paged and not is_stock_mixer(found):
            reason = f"mixer class {qualified(layer.mixer)} is not megatron-core's MambaMixer"
            raise AdoptionError(where, reason + (f"; {BY_SPEC}" if derives_from_stock_mixer(found) else ""))
        self.mixer = FusedMixer(layer.mixer, where, layer=index, tp=self._tp)
        self._parts.append((layer.mixer, self.mixer))
        if type(layer) not in _KNOWN_LAYERS:
            if is_paged:
                return
            raise AdoptionError(name, f"layer class {qualified(layer)} is not megatron-core's MambaLayer; {BY_SPEC}")
        first = (layer.mixer.in_proj, "in_proj")
        norm = _norm_before(layer, name, part="mixer", norm="norm", add="mamba_bda", first=first)
        assert norm is not None
        self.fused = FusedLayer((norm, self.mixer))


def _check_untouched(layer: Any, name: str) -> None:
    """Raise AdoptionError for hooks and the like where no module is called: in a layer of ours, or in the attention or
    mixer of a layer of the user's."""
    if type(layer) in _KNOWN_LAYERS or is_of(layer, FALCON_H1_LAYER):
        check_untouched(layer, name)
        return
    for part in ("self_attention", "mixer"):
        if isinstance(module := getattr(layer, part, None), PagedPart):
            check_called_by_none(module, f"{name}.{part}", runs_hooks=True)
            for child, inner in module.named_children():
                check_untouched(inner, f"{name}.{part}.{child}")


def _norm_before(
    layer: Any, name: str, *, part: str, norm: str, add: str, first: tuple[Any, str]
) -> FusedNorm | AddResidual | None:
    """The norm before a part of a layer, or what stands in its place where the part has none; None where the layer has
    no such part: neither norm nor addition.

    first: the part's first linear and its name; Transformer Engine's linear may have the norm inside.
    """
    adds, before = getattr(layer, add), getattr(layer, norm)
    if type(getattr(layer, part)) is not mcore.IdentityOp:
        if adds is not mcore.get_bias_dropout_add:
            raise AdoptionError(f"{name}.{add}", f"{adds!r} is not megatron-core's bias-dropout-add")
        linear, where = first
        if not has_norm_inside(linear):
            return AddResidual() if type(before) is mcore.IdentityOp else FusedNorm(before, f"{name}.{norm}")
        if type(before) is not mcore.IdentityOp:
            raise AdoptionError(
                f"{name}.{norm}", f"{qualified(before)} before {part}.{where}, which norms its input too"
            )
        return FusedNorm(linear, f"{name}.{part}.{where}")
    for slot, module, nothing in ((add, adds, mcore.IdentityFuncOp), (norm, before, mcore.IdentityOp)):
        if type(module) is not nothing:
            raise AdoptionError(f"{name}.{slot}", f"{qualified(module)} in a layer without {part}")
    return None


def _attention(
    layer: Any, name: str, model: Any, *, index: int, tp: Reducer | None
) -> FusedAttention | FusedLatentAttention:
    """The operations of this layer's attention; raises AdoptionError where they are not known."""
    attention, where = layer.self_attention, f"{name}.self_attention"
    _check_attention(attention, where)
    if isinstance(attention, mcore.LATENT_ATTENTIONS):
        return FusedLatentAttention(attention, where, layer=index, tp=tp)
    spec, form = _attention_spec(layer, name, model), _head_form(attention, where)
    return FusedAttention(attention, where, layer=index, spec=spec, tp=tp, form=form)


def _head_form(attention: Any, where: str) -> HeadForm:
    """How the heads of this layer differ from those that one cache keeps of all layers."""
    config = attention.config
    if isinstance(attention, MixedHeadsAttention):
        most, width, scale = attention.most_query_groups, attention.value_dim, attention.value_scale
    elif is_of(attention, MIXED_HEADS_ATTENTION):
        most, width = max(config.full_attn_num_query_groups, config.swa_num_query_groups), config.v_head_dim
        scale = attention.core_attention._attention_value_scale
    else:
        return HeadForm()
    heads, head_dim = config.num_query_groups, config.kv_channels
    if most % heads or width > head_dim:
        raise AdoptionError(
            where,
            f"{heads} kv heads with values of {width}, where other layers have {most}: one cache of {most} heads of "
            f"{head_dim} cannot hold them",
        )
    return HeadForm(repeats=most // heads, value_dim=width, value_scale=1.0 if scale is None else scale)


def _check_attention(attention: Any, where: str) -> None:
    """Raise AdoptionError unless the module is known to compute causal softmax attention."""
    stock = type(attention) in (*PAGED_ATTENTION, TwoRopeAttention, AttentionBesideMixer) or is_of(
        attention, *ATTENTIONS
    )
    is_attention = isinstance(attention, tuple(PAGED_ATTENTION))
    is_paged = is_attention and isinstance(attention, PagedPart)
    if not stock and not is_paged:
        reason = f"attention class {qualified(attention)} is not megatron-core's SelfAttention or MLASelfAttention"
        raise AdoptionError(where, reason + (f"; {BY_SPEC}" if is_attention else ""))
    latent = bool(attention.config.multi_latent_attention)
    if latent is not isinstance(attention, mcore.LATENT_ATTENTIONS):
        raise AdoptionError(where, f"multi_latent_attention={latent}, but it is of class {qualified(attention)}")
    core = attention.core_attention
    if stock and not is_paged and not _is_known_core(core):
        raise AdoptionError(
            f"{where}.core_attention",
            f"class {qualified(core)} is not known, so neither is what it computes; "
            f"if it is causal softmax attention, {BY_SPEC}",
        )
    if attention.attn_mask_type != mcore.AttnMaskType.causal:
        raise AdoptionError(where, f"attn_mask_type is {attention.attn_mask_type.name}; only causal attention is paged")


def _attention_spec(layer: Any, name: str, model: Any) -> AttendSpec:
    """How this layer's self attention attends; raises AdoptionError where that is not known."""
    attention, where = layer.self_attention, f"{name}.self_attention"
    core = attention.core_attention
    config, number = attention.config, attention.layer_number
    size = attention.world_size
    if config.num_attention_heads % size or (size % config.num_query_groups and config.num_query_groups % size):
        raise AdoptionError(
            where,
            f"{config.num_attention_heads} query heads and {config.num_query_groups} kv heads cannot be divided over "
            f"{size} tensor-parallel ranks",
        )
    num_kv_heads = attention.num_query_groups_per_partition
    head_dim = attention.hidden_size_per_attention_head
    scale, window, softcap = _softmax_of(core, config, number, where)
    given = multipliers_of(config).attention_in_multiplier
    if given != 1.0 and attention.linear_qkv.bias is not None:
        raise AdoptionError(f"{where}.linear_qkv", f"a bias, and a factor of its input ({given:g}): not supported")
    return AttendSpec(
        num_kv_heads=num_kv_heads,
        # not num_attention_heads_per_partition: where ranks share a kv head it counts the whole group's queries
        group_size=config.num_attention_heads // size // num_kv_heads,
        head_dim=head_dim,
        scale=scale,
        window=window,
        softcap=softcap,
        **_rotation_of(attention, getattr(model, "rotary_pos_emb", None), where),
        sinks=_sinks(
            core, _config_of(core, config), f"{where}.core_attention", num_heads=config.num_attention_heads // size
        ),
    )


def _is_known_core(core: Any) -> bool:
    is_bridge = is_of(core, *PATTERNED_CORES, *CAPPED_CORES)
    known = (mcore.DotProductAttention, TorchCoreAttention, TorchSparseAttention, mcore.DSAttention)
    return type(core) in known or is_te_attention(core) or is_bridge


def _softmax_of(core: Any, config: Any, number: int, where: str) -> tuple[float, int | None, float | None]:
    """(scale, window, softcap) of a layer's core attention."""
    if is_of(core, *CAPPED_CORES):
        if config.apply_query_key_layer_scaling:
            raise AdoptionError(where, "apply_query_key_layer_scaling caps another score than the one of the softmax")
        window = None if core.window_size is None else _keys_of(core.window_size, where)
        return 1.0 / core.norm_factor, window, config.attn_logit_softcapping or None
    is_own = isinstance(core, TorchCoreAttention)
    if not is_own and (cap := getattr(config, "attn_logit_softcapping", None)):
        known = "known to cap scores are Megatron-Bridge's Gemma 2 and specs.gpt_spec's"
        raise AdoptionError(f"{where}.core_attention", f"attn_logit_softcapping={cap} with {qualified(core)}; {known}")
    # apply_query_key_layer_scaling divides by the layer's number and multiplies by it again
    scale = 1.0 / math.sqrt(config.kv_channels) if config.softmax_scale is None else config.softmax_scale
    softcap = core.softcap if is_own else None
    factors = multipliers_of(config)
    scale *= factors.key_multiplier * factors.attention_in_multiplier**2
    return scale, _window(_config_of(core, config), number, where), softcap


def _config_of(core: Any, config: Any) -> Any:
    """The config that says window and sinks of a core attention. config: that of the layer's attention."""
    return core.config if is_of(core, *PATTERNED_CORES) else config


def _rotation_of(attention: Any, rotary: Any, where: str) -> dict[str, Any]:
    """The fields of AttendSpec that say which columns of the model's angles rotate this layer's heads, and how."""
    config, number = attention.config, attention.layer_number
    if rotary is None or (config.no_rope_freq and config.no_rope_freq[number - 1]):
        return {}
    ropes = ropes_of(rotary)
    widths, at = [rotary_dim(rope) for rope in ropes], 0
    if len(ropes) > 1:
        if is_of(attention, *TWO_ROPE_ATTENTION):
            local = is_local(config, number)
        elif isinstance(attention, TwoRopeAttention):
            local = has_window(config, number)
        else:
            raise AdoptionError(where, "the model has two ropes, and it is not known which one this attention takes")
        widths, at = (widths[:1], 0) if local else (widths[1:], widths[0])
    return {"rotary_dim": widths[0], "rotary_at": at, "rotary_interleaved": rotary.rotary_interleaved}


def _sinks(core: Any, config: Any, where: str, *, num_heads: int) -> Callable[[], Tensor] | None:
    """What gives the layer's softmax sinks: zeros or a parameter of its core attention."""
    if config.softmax_type == "vanilla":
        return None
    sinks = getattr(core, "softmax_offset", None)
    if sinks is None or tuple(sinks.shape) != (num_heads,):
        shape = None if sinks is None else list(sinks.shape)
        raise AdoptionError(
            where,
            f"softmax_type={config.softmax_type!r}, but softmax_offset is {shape}, not a tensor of {num_heads} heads",
        )
    return lambda: core.softmax_offset


def _window(config: Any, layer_number: int, where: str) -> int | None:
    """Keys visible to a query of this layer, itself included."""
    if not mcore.is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    return _keys_of(config.window_size, where)


def _keys_of(window_size: tuple[int, int], where: str) -> int:
    """Keys visible to a query in a window of megatron-core, itself included."""
    left, right = window_size
    if left < 0 or right != 0:
        raise AdoptionError(where, f"window_size={window_size}: only (n >= 0, 0) is causal and bounded")
    return int(left) + 1


def _check_no_cross_attention(layer: Any, name: str) -> None:
    for slot in ("cross_attention", "pre_cross_attn_layernorm"):
        module = getattr(layer, slot)
        if type(module) is not mcore.IdentityOp:
            raise AdoptionError(f"{name}.{slot}", f"{qualified(module)}: cross attention is not supported")


def _feed_forward(mlp: Any, name: str, tp: Reducer | None) -> LayerOp:
    if type(mlp) is mcore.MLP:
        return FusedMLP(mlp, name, tp=tp, norm_apart=True)
    if type(mlp) in (mcore.MoELayer, LatentMoELayer):
        return FusedExperts(mlp, name, tp=tp)
    raise AdoptionError(name, f"class {qualified(mlp)} is not megatron-core's MLP or MoELayer")
