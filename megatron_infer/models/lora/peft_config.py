"""What an adapter_config.json of PEFT says of each linear: whether it has a pair, of which rank and scale."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megatron_infer.errors import ModelError

USED = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights"),
)
WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config"),
    *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
)
"""Fields about training, about how the first values were made, or about others' products."""
REFUSED = {
    "use_dora": "DoRA's magnitudes are not supported",
    "lora_bias": "biases of adapters are not supported",
    "modules_to_save": "whole modules beside the pairs are not supported",
    "target_parameters": "pairs of bare parameters (routed experts) are not supported",
    "trainable_token_indices": "embeddings of adapters are not supported",
    "layer_replication": "layers that are used several times are not supported",
    "alora_invocation_tokens": "adapters that begin to act at a token (aLoRA) are not supported",
}
BASE_KEPT = ("true", "gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights that leave the base model's weights as they are."""
BASE_CHANGED = {"pissa": "PiSSA", "olora": "OLoRA", "corda": "CorDA", "lora_ga": "LoRA-GA", "loftq": "LoftQ"}
"""Beginnings of values that change them. Source: peft.tuners.lora.layer.LoraLayer.update_layer."""
MAX_PATTERN_CHARS, MAX_REPEATS = 1024, 4


def scale_of(alpha: float, rank: int, *, rslora: bool) -> float:
    """The factor of a pair's product. Source: LoRA, arXiv:2106.09685; rank-stabilised, arXiv:2312.03732."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


class PeftConfig:
    """Fields of an adapter_config.json, checked. Raises ModelError for what is wrong or not supported."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """fields: lora_alpha at least; those that are not given say nothing."""
        for name, value in fields.items():
            if not value or value == "none":
                continue  # off, whatever it is
            if name in REFUSED:
                raise ModelError(f"{name}={_shown(value)}: {REFUSED[name]}")
            if name not in USED + WITHOUT_EFFECT:
                raise ModelError(f"{name}={_shown(value)} is not known here, and may change what the adapter computes")
        _check_base_is_kept(fields.get("init_lora_weights"))
        if (kind := str(getattr(fields.get("peft_type"), "value", fields.get("peft_type", "LORA")))) != "LORA":
            raise ModelError(f"peft_type is {_shown(kind)}; only LORA is supported")
        if fields.get("bias") not in (None, "none"):
            raise ModelError(f"bias={_shown(fields['bias'])}: biases of adapters are not supported")
        if "lora_alpha" not in fields:
            raise ModelError("there is no lora_alpha, without which the scale is not known")
        self.r = None if fields.get("r") is None else _rank("r", fields["r"])
        """The rank of linears that no pattern names; None: what the tensors have."""
        self.alpha = _number("lora_alpha", fields["lora_alpha"])
        self.rslora = fields.get("use_rslora") or False
        if not isinstance(self.rslora, bool):
            raise ModelError(f"use_rslora is {_shown(self.rslora)}, it must be true or false")
        self.ranks = {key: _rank("rank_pattern", value) for key, value in _patterns(fields, "rank_pattern")}
        self.alphas = {key: _number("alpha_pattern", value) for key, value in _patterns(fields, "alpha_pattern")}
        self._targets = _names(fields, "target_modules")
        self._excluded = _names(fields, "exclude_modules")
        layers = fields.get("layers_to_transform")
        self._layers = [layers] if type(layers) is int else (layers or [])
        if not isinstance(self._layers, list | tuple) or any(type(one) is not int for one in self._layers):
            raise ModelError(f"layers_to_transform is {_shown(layers)}, it must be a list of integers")
        if self._layers and isinstance(self._targets, str):
            raise ModelError("layers_to_transform beside a pattern as target_modules, which PEFT refuses too")
        pattern = fields.get("layers_pattern") or []
        if not isinstance(pattern, str | list | tuple):
            raise ModelError(f"layers_pattern is {_shown(pattern)}, it must be a pattern or a list of them")
        self._layers_pattern = [pattern] if isinstance(pattern, str) else list(pattern)
        for key in (*self.ranks, *self.alphas, *self._layers_pattern):
            _check_pattern(key)

    @property
    def names_targets(self) -> bool:
        """Whether it says which linears have a pair."""
        return self._targets is not None

    def rank_of(self, module: str) -> int | None:
        """The rank of a linear's pair; None: what its tensors have."""
        return self.ranks.get(_matching(self.ranks, module), self.r)

    def scale_of(self, module: str, rank: int) -> float:
        return scale_of(self.alphas.get(_matching(self.alphas, module), self.alpha), rank, rslora=self.rslora)

    @property
    def max_rank(self) -> int | None:
        """The largest rank that it speaks of; None: it speaks of none."""
        return max((*self.ranks.values(), *(() if self.r is None else (self.r,))), default=None)

    def targets(self, module: str) -> bool:
        """Whether PEFT gives this linear a pair. Source: peft.tuners.tuners_utils.check_target_module_exists."""
        if self._excluded is not None and _named(self._excluded, module):
            return False
        if self._targets is None or self._targets == "all-linear":
            return True
        if isinstance(self._targets, str) or module in self._targets:
            return _named(self._targets, module)
        return _named(self._targets, module) and (not self._layers or self._layer_of(module) in self._layers)

    def unknown_targets(self, modules: list[str]) -> list[str]:
        """Entries of target_modules that are the name of none of these."""
        if self._targets is None or isinstance(self._targets, str):
            return []
        return sorted(one for one in self._targets if not any(_named([one], module) for module in modules))

    def _layer_of(self, module: str) -> int | None:
        patterns = [_layer_pattern(one) for one in self._layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<number>\d+)\."]:
            if (found := re.match(pattern, module)) is not None:
                return int(found["number"])
        return None


def _check_base_is_kept(init: Any) -> None:
    """Raise ModelError for a way to begin that PEFT changes the base model's weights for."""
    value = str(init).lower()
    if not init or value in BASE_KEPT:
        return
    name = next((name for start, name in BASE_CHANGED.items() if value.startswith(start)), None)
    if name is None:
        raise ModelError(f"init_lora_weights={_shown(init)} is not known here, and may change the base model's weights")
    own = "serve the base that was trained on (its save_pretrained), and set init_lora_weights to true in this file"
    if name != "LoftQ":
        initial = "save_pretrained(..., path_initial_model_for_weight_conversion=INITIAL)"
        own = f"write the adapter with PEFT's {initial}, INITIAL the adapter as it was before training; or {own}"
    raise ModelError(
        f"init_lora_weights={_shown(init)}: {name} changes the base model's weights, and the adapter goes with the "
        f"changed ones; {own}"
    )


def _named(names: str | list[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in names)


def _matching(patterns: Mapping[str, Any], module: str) -> str:
    """The first key that matches the end of the name; the name itself if none does. Source: PEFT, get_pattern_key."""
    return next((key for key in patterns if re.match(_end_pattern(key), module)), module)


def _end_pattern(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _layer_pattern(one: str) -> str:
    return rf"(?:^|.*?\.){one}\.(?P<number>\d+)\."


def _names(fields: Mapping[str, Any], field: str) -> str | list[str] | None:
    """A pattern, a list of names, or None where nothing is given."""
    value = fields.get(field)
    if not value:
        return None
    if isinstance(value, str):
        if value != "all-linear":
            _check_pattern(value)
        return value
    if not isinstance(value, list | tuple | set | frozenset) or any(not isinstance(one, str) for one in value):
        raise ModelError(f"{field} is {_shown(value)}, it must be a list of names or a pattern")
    return sorted(value)


def _patterns(fields: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    value = fields.get(field) or {}
    if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
        raise ModelError(f"{field} is {_shown(value)}, it must be a mapping from names to numbers")
    return list(value.items())


def _check_pattern(pattern: Any) -> None:
    """Raise ModelError for what is no regular expression, or one that may take very long."""
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        raise ModelError(f"pattern {_shown(pattern)}: a pattern is text of at most {MAX_PATTERN_CHARS:,} characters")
    plain = re.sub(r"\\.|\[[^\]]*\]", "x", pattern)  # escaped characters and sets repeat nothing
    if len(re.findall(r"[*+{]", plain)) > MAX_REPEATS or re.search(r"\)[*+{]|\(\?P?[=<]?\w*[=)]", plain):
        raise ModelError(
            f"pattern {_shown(pattern)} may take very long: at most {MAX_REPEATS} of * + {{ are allowed, none after a "
            "group"
        )
    try:
        for whole in (pattern, _end_pattern(pattern), _layer_pattern(pattern)):  # as they are used
            re.compile(whole)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"pattern {_shown(pattern)} is no regular expression: {error}") from None


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{field} is {_shown(value)}, a rank is an integer from 1 on")
    return value


def _number(field: str, value: Any) -> float:
    if type(value) in (int, float):
        with suppress(OverflowError):  # an integer that no float holds
            if math.isfinite(number := float(value)):
                return number
    raise ModelError(f"{field} is {_shown(value)}, it must be a finite number")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
