"""Tensors of a torch_dist checkpoint whose keys the model's own layer spec spells otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

NORMS = (
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("input_layernorm.", "self_attention.in_proj.layer_norm_"),
    ("q_layernorm.", "linear_q_up_proj.layer_norm_"),
    ("kv_layernorm.", "linear_kv_up_proj.layer_norm_"),
)
"""A norm as a module, and as a part of the linear after it (Transformer Engine's specs)."""


def by_keys_of(wanted: Any, held: Mapping[str, Any]) -> Any:
    """Give each leaf of the sharded state dict `wanted` the key that the checkpoint has for it, in place.

    held: key -> metadata of the checkpoint's tensors. A layer's tensor may lie in a tensor of all layers, which
    megatron-core writes where all layers are of one kind. A leaf without any such key stays as it is.
    """
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

    # a tensor that is saved in parts has their keys: its own, a dot and the part's name
    present = {*held, *(key.rpartition(".")[0] for key in held)}
    halves = any(".mamba_mixer." in key for key in held)

    def found(leaf: Any) -> Any:
        key = getattr(leaf, "key", None)
        if key is not None and halves:
            key = leaf.key = _of_falcon_h1(key)
        if key is None or key in held:
            return leaf
        for name in _spellings(key):
            if name in present:
                leaf.key = name
                return leaf
            layer = re.fullmatch(r"(.*\blayers)\.(\d+)\.(.*)", name)
            if layer and (stacked := f"{layer[1]}.{layer[3]}") in held:
                return _in_stack(leaf, stacked, int(layer[2]), held[stacked].global_shape[0])
        return leaf

    return dict_list_map_inplace(found, wanted)


def _spellings(key: str) -> Iterator[str]:
    yield key
    for module, part in NORMS:
        for given, other in ((module, part), (part, module)):
            if given in key:
                yield key.replace(given, other)


def _of_falcon_h1(key: str) -> str:
    """The key in a checkpoint of Megatron-Bridge's FalconH1Model, whose layers are two of a MambaModel's."""
    layer = re.fullmatch(r"(decoder\.layers)\.(\d+)\.(.*)", key)
    if layer is None:
        return key
    name = re.sub(r"^(input_layernorm|self_attention\.linear_qkv\.layer_norm)[._]", "norm.", layer[3])
    return f"{layer[1]}.{int(layer[2]) // 2}.{re.sub('^mixer', 'mamba_mixer', name)}"


def _in_stack(leaf: Any, key: str, layer: int, num_layers: int) -> Any:
    """`leaf` as the part `layer` of a tensor with a further first dimension."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

    leaf.key = key
    if (build := getattr(leaf, "build_fn", None)) is not None:  # a factory: what it builds has the dimension
        leaf.build_fn = lambda *args, **options: dict_list_map_inplace(
            lambda built: _in_stack(built, built.key, layer, num_layers), build(*args, **options)
        )
        return leaf
    leaf.global_shape = (num_layers, *leaf.global_shape)
    leaf.global_offset = (layer, *leaf.global_offset)
    leaf.axis_fragmentations = (num_layers, *(leaf.axis_fragmentations or ()))
    leaf.prepend_axis_num += 1
    return leaf
