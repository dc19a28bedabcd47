"""config.json -> a model's description, and back, by the rows of `families`; no transformers, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.families import (
    ALWAYS,
    FAMILIES,
    MODEL_TYPES,
    OF_TEXT_AND_IMAGES,
    REFUSED,
    Family,
    Key,
    Pattern,
    Rope,
    Window,
)
from megatron_infer.models.loading.hf_config_keys import ACTIVATIONS, Keys, check_mxfp4, check_rest
from megatron_infer.models.loading.model_description import KINDS, ModelDescription, RopeScaling
from megatron_infer.models.stage_layers import expert_layers
from megatron_infer.text.end_ids import end_ids_of

_SYMBOLS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Layer type in a config, with the names of older versions of transformers -> megatron-core's symbol."""
_OWN_FIELDS = {one.name for one in fields(ModelDescription)}
_ROPE_TYPES: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
    "longrope": {
        "factors": "short_factor",
        "long_factors": "long_factor",
        "original_max_position": "original_max_position_embeddings",
        "attention_factor": "attention_factor",
    },
    "dynamic": {"factor": "factor"},
}
"""rope_type -> field of RopeScaling -> its key."""
_OTHER_NAMES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}
"""Names of rope types in first configs, in Qwen2-VL's and in Sarvam's -> the type that is computed of text."""
_OF_POSITIONS = ("mrope_section", "mrope_interleaved")
"""Parameters of ropes that have no effect on text, whose positions in time, height and width are equal."""
_YARN_WEIGHTS = ("mscale", "mscale_all_dim")
_YARN_DEFAULTS: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def description_from_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, *, name: str = ""
) -> ModelDescription:
    """The description in a Hugging Face config.json. Raises ModelError for what is unknown or cannot be exact."""
    config = _of_text(config)
    architecture = architecture_of(config)
    family = FAMILIES.get(architecture)
    if family is None:
        refused = REFUSED.get(architecture)
        reason = f" ({refused})" if refused else ""
        raise ModelError(
            f"{name or 'model'}: architecture {architecture!r} is not supported{reason}; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    keys = Keys(config)
    try:
        parts = _parts(family, keys)
    except ModelError:
        raise
    except _WRONG_TYPES as error:
        wrong = [
            f"{key!r} is {config[key]!r:.100}"
            for key in keys.read & config.keys()
            if _has_wrong_type(key, family, config)
        ]
        shown = f"{', '.join(sorted(wrong))}: " if wrong else ""
        raise ModelError(f"{name or 'model'}: config.json: {shown}{type(error).__name__}: {error}") from error
    check_rest(keys, architecture)
    return ModelDescription(
        architecture=architecture,
        eos_ids=end_ids_of(generation_config or {}, config),
        bos_id=_token_id(config, "bos_token_id"),
        pad_id=_token_id(config, "pad_token_id"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        name=name,
        **parts,
    )


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model in one of `OF_TEXT_AND_IMAGES`; another config as it is."""
    architecture = OF_TEXT_AND_IMAGES.get(architecture_of(config))
    if architecture is None:
        return config
    inner = config.get("text_config", {})
    if not isinstance(inner, Mapping):
        raise ModelError(f"config.json: 'text_config' is {inner!r:.100}, it must be an object")
    of_images = ("vision", "image", "video", "text_config")
    outer = {key: value for key, value in config.items() if not key.startswith(of_images)}
    if inner:  # else its keys are those of the whole model
        outer = {key: outer[key] for key in _OF_BOTH if key in outer}
    return {**inner, **outer, "architectures": [architecture]}


_OF_BOTH = (
    *("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("quantization_config", "compression_config"),
)
"""Keys next to text_config that count for the language model, whose tensors are in the whole model's files."""


def _token_id(config: Mapping[str, Any], key: str) -> int | None:
    """A token's id, the first of a list. Raises ModelError for anything else."""
    found = config.get(key)
    first = next(iter(found), None) if isinstance(found, list) else found
    if first is not None and type(first) is not int:
        raise ModelError(f"config.json: {key!r} is a token id, got {str(found)[:80]!r}")
    return first


def architecture_of(config: Mapping[str, Any]) -> str:
    """The name of the architecture, else that of the model's type."""
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError(f"config.json: 'architectures' is {names!r:.100}, it must be a list of names")
    if names:
        return str(names[0])
    kind = config.get("model_type")
    return MODEL_TYPES.get(str(kind), str(kind)) if kind else "(none named in config.json)"


# ---------------------------------------------------------------------- reading


MAX_LAYERS = 10_000
"""More than any model has."""
_WRONG_TYPES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What reading raises for a value of a type that nobody would write."""


def _has_wrong_type(key: str, family: Family, config: Mapping[str, Any]) -> bool:
    """Whether the key's value has a wrong type: it is no positive number, and reading goes on where it is missing."""
    value = config[key]
    if isinstance(value, int | float) and value is not True and value > 0:
        return False
    try:
        _parts(family, Keys({name: value for name, value in config.items() if name != key}))
    except ModelError:
        return True
    except _WRONG_TYPES:
        return False
    return True


def _parts(family: Family, keys: Keys) -> dict[str, Any]:
    """The fields of ModelDescription that decide what the model computes."""
    keys.rename(family.renamed_keys)
    if family.reads_mxfp4:
        check_mxfp4(keys)
    for key, (allowed, why) in family.required.items():
        keys.require(key, *allowed, why=why)
    values = _values(family, keys)
    _refuse(family, keys, values)
    _read_experts(values)
    _read_biases(keys, family, values)
    if values.get("position_embedding") == "none":
        values["rope_scaling"] = None
    if values.get("scales.embedding", 1.0) != 1.0 or values.get("scales.logits", 1.0) != 1.0:
        values["tied_embeddings"] = False  # two tensors, as their factors differ
    parts: dict[str, Any] = {"transformer": {}}
    for name, value in values.items():
        group, _, inner = name.rpartition(".")
        if group:
            parts.setdefault(group, {})[inner] = value
        elif name in _OWN_FIELDS:
            parts[name] = value
        elif not name.startswith("_"):
            parts["transformer"][name] = value
    return parts | {group: kind(**parts[group]) for group, kind in KINDS.items() if group in parts}


def _values(family: Family, keys: Keys) -> dict[str, Any]:
    """All fields of the row, and those that its rules for rotation, windows and patterns give."""
    keys.read.update((*family.ignored_keys, *family.required_of_experts))
    values: dict[str, Any] = {} if family.rope is None else _rope(keys, family.rope)
    for name, source in family.fields.items():
        if isinstance(source, Key):
            values[name] = _value(keys, source, values)
    if values.get("num_layers", 0) > MAX_LAYERS:  # lists of so many entries would be made
        raise ModelError(f"config.json: {values['num_layers']} layers, more than {MAX_LAYERS}")
    for name, source in family.fields.items():
        if not isinstance(source, Key):
            values[name] = _resolved(source, values)
    _check_shares(family, values)
    if family.no_rope:
        values["no_rope_freq"] = _unrotated(keys, values["num_layers"])
    if family.window is not None:
        values |= _windows(keys, family, family.window, values)
        if "window_size" not in values:
            values.pop("extensions.local_rotary_base", None)
    if family.pattern is not None:
        values["hybrid.pattern"] = pattern = _pattern(keys, family.pattern, values)
        values["num_layers"] = len(pattern)
    scaling = values.get("rope_scaling")
    rotates = values.get("position_embedding", "rope") == "rope"
    if rotates and scaling is not None and scaling.attention_factor != 1.0:
        if "extensions.local_rotary_base" in values:
            raise ModelError("config.json: yarn with an attention factor needs layers that all rotate alike")
        if values.get("multi_latent_attention"):
            pass  # it has a factor of its own (`build_model.latent_rope`)
        elif values["rotary_percent"] != 1.0 or any(values.get("no_rope_freq", ())):
            values["rope_scaling"] = replace(scaling, is_in_rotation=True)
        else:
            scale = values.get("softmax_scale") or values["kv_channels"] ** -0.5
            values["softmax_scale"] = scale * scaling.attention_factor**2
    values["_has_experts"] = "E" in values.get("hybrid.pattern", "E" if values.get("num_moe_experts") else "")
    return values


def _refuse(family: Family, keys: Keys, values: Mapping[str, Any]) -> None:
    if values["_has_experts"]:
        for key, (allowed, why) in family.required_of_experts.items():
            keys.require(key, *allowed, why=why, case=" with experts")
    for applies, text in family.refusals:
        if applies(values):
            raise ModelError(f"config.json: {text.format_map(values)}")


def _resolved(source: Any, values: Mapping[str, Any]) -> Any:
    return source(values) if callable(source) else source


def _value(keys: Keys, key: Key, values: Mapping[str, Any]) -> Any:
    default, null = _resolved(key.default, values), _resolved(key.null, values)
    match key.kind:
        case "count" | "positive":
            return keys.number(key.name, default, kind=int if key.kind == "count" else float, null=null)
        case "range":
            return _range(keys, key.name)
        case "activation":
            return _activation(keys, key.name, default)
    value = keys.get(key.name, default)
    match key.kind:
        case "real":
            return float(null if value is None else value)
        case "flag":
            if key.name in keys.config and not isinstance(value, bool | int | None):
                raise ModelError(f"config.json: {key.name!r} must be true or false, got {value!r:.100}")
            return bool(value)
        case "nullable":
            return None if value is None else keys.number(key.name, default)
        case "optional" | "auto":
            unset = (None, 0) if key.kind == "optional" else (None, "auto")
            return int(default) if value in unset else keys.number(key.name, default)
    return value


def _activation(keys: Keys, key: str, default: str) -> str:
    name = keys.get(key, default)
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: {key} {name!r} is not supported (supported: {', '.join(sorted(ACTIVATIONS))})")
    return str(name)


def _range(keys: Keys, key: str) -> tuple[float, float | None]:
    """Two numbers; infinity is a float (a JSON extension) or {"__float__": "Infinity"}.

    The time steps of every token are clamped, as in the modelling files' forward over a sequence. Their cached forward
    of one token clamps none, so that their own decode differs from their own forward where a step is out of range.
    """
    value = keys.get(key)
    if value is None:
        return 0.0, None
    try:
        low, high = (float(end["__float__"]) if isinstance(end, Mapping) else float(end) for end in value)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"config.json: {key}={value!r} is not a pair of numbers") from error
    if math.isnan(low) or math.isnan(high) or low > high:
        raise ModelError(f"config.json: {key}={value!r} is not a range")
    return low, None if math.isinf(high) else high


def _check_shares(family: Family, values: Mapping[str, Any]) -> None:
    """Raise ModelError for heads that do not divide over what they share, and for an inner width stated in two ways."""
    heads, kv_heads = values["num_attention_heads"], values["num_query_groups"]
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if family.pattern is None:
        return
    heads, groups = values["mamba_num_heads"], values["mamba_num_groups"]
    if "_expand" in values:
        width, inner = int(values["_expand"] * values["hidden_size"]), heads * values["mamba_head_dim"]
        expand, count, dim = (family.fields[name].name for name in ("_expand", "mamba_num_heads", "mamba_head_dim"))
        if width != inner:
            raise ModelError(f"config.json: {expand} x hidden_size = {width}, but {count} x {dim} = {inner}")
    if heads % groups:
        raise ModelError(f"config.json: {heads} Mamba heads cannot share {groups} groups evenly")


def _rope(keys: Keys, rule: Rope) -> dict[str, Any]:
    """Rotary embedding, from rope_parameters (newer configs) or rope_theta and rope_scaling (older)."""
    old = keys.get("rope_scaling") or {}
    new = keys.get("rope_parameters") or {}
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        raise ModelError("config.json: rope_scaling / rope_parameters must be an object")
    parameters = {**old, **new}
    local, parameters = _local_rope(keys, rule, parameters)
    if not {"rope_type", "type"} & parameters.keys():
        parameters = {**rule.scaling, **parameters}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError("config.json: rope_parameters differ per layer type, which is not supported")
    base, percent = keys.get("rope_theta", rule.base), keys.get("partial_rotary_factor") or rule.percent
    if rule.dim_key and (dim := keys.get(rule.dim_key)) is not None:
        percent = dim / keys.number("head_dim", 128)
    base = parameters.pop("rope_theta", None) or base
    percent = parameters.pop("partial_rotary_factor", None) or percent
    if percent != 1.0 and not rule.partial:
        raise ModelError(f"config.json: partial_rotary_factor={percent} is not supported for this architecture")
    weights = {key: float(parameters[key]) for key in _YARN_WEIGHTS if parameters.get(key)}
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    kind = _OTHER_NAMES.get(kind, kind)
    if kind not in _ROPE_TYPES:
        raise ModelError(f"config.json: rope type {kind!r} is not supported (supported: {', '.join(_ROPE_TYPES)})")
    used = _ROPE_TYPES[kind]
    if kind == "yarn":
        given = {key: value for key, value in parameters.items() if value is not None}
        parameters = _YARN_DEFAULTS | {"attention_factor": _yarn_attention(given)} | given
        parameters = {key: value for key, value in parameters.items() if not key.startswith("mscale")}
    if kind == "longrope":
        parameters = _longrope(keys, parameters)
    for key in used.values():
        if key not in parameters:
            raise ModelError(f"config.json: rope_scaling has no {key!r}, which its type needs")
    left = set(parameters) - {*used.values(), "original_max_position_embeddings", *_OF_POSITIONS}
    if left:
        raise ModelError(f"config.json: rope parameters {', '.join(sorted(left))} are not known for rope type {kind!r}")
    for key in used.values():
        value = parameters[key]
        numbers = value if key.endswith("_factor") and isinstance(value, list | tuple) else [value]
        for one in numbers:
            if not isinstance(one, bool) and not (isinstance(one, int | float) and 0 < one < math.inf):
                raise ModelError(f"config.json: rope parameter {key}={one!r} must be a positive number")
    kinds: dict[str, Callable[[Any], Any]] = {"original_max_position": int, "truncate": bool}
    kinds |= dict.fromkeys(("factors", "long_factors"), lambda values: tuple(map(float, values)))
    scaling = None
    if used:
        scaling = RopeScaling(
            kind=kind,
            **{name: kinds.get(name, float)(parameters[key]) for name, key in used.items()},
            **(weights if rule.mscales else {}),
        )
    values = {"rotary_base": float(base), "rotary_percent": float(percent), "rope_scaling": scaling}
    if local is not None and (local != base or scaling is not None):
        values["extensions.local_rotary_base"] = local
    return values


def _local_rope(keys: Keys, rule: Rope, parameters: dict[str, Any]) -> tuple[float | None, dict[str, Any]]:
    """(base of the rope of layers with a window, the parameters of that of the others); None: there is one rope."""
    if not rule.local_key:
        return None, parameters
    base = keys.get(rule.local_key, keys.get("rope_theta", rule.base) if rule.local_base is None else rule.local_base)
    if "sliding_attention" not in parameters and "full_attention" not in parameters:
        return float(base), parameters
    local = dict(parameters.get("sliding_attention") or {})
    base = local.pop("rope_theta", base)
    kind, everywhere = local.pop("rope_type", "default"), dict(parameters.get("full_attention") or {})
    share = local.pop("partial_rotary_factor", None)
    if share != everywhere.get("partial_rotary_factor"):
        raise ModelError(f"config.json: partial_rotary_factor={share} of layers with a window alone is not supported")
    if kind != "default" or local:
        raise ModelError(f"config.json: the rope of layers with a window is scaled ({kind}), which is not supported")
    return float(base), everywhere


def _longrope(keys: Keys, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters with the original length and the attention factor, which a config need not give."""
    longest = keys.number("max_position_embeddings", 1)
    original = keys.get("original_max_position_embeddings") or longest
    given = {key: value for key, value in parameters.items() if value is not None}
    given = {"original_max_position_embeddings": original} | given
    for key in ("short_factor", "long_factor"):
        if not isinstance(given.get(key), list | tuple):
            raise ModelError(f"config.json: rope_scaling has no list {key!r}, which its type needs")
    original, factor = given["original_max_position_embeddings"], given.pop("factor", None)
    factor = longest / original if factor is None else factor
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {"attention_factor": attention} | given


def _yarn_attention(parameters: Mapping[str, Any]) -> float:
    """The attention factor of a config that gives none."""

    def scale(weight: float) -> float:
        factor = float(parameters.get("factor", 1.0))
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weights = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(weights[0]) / scale(weights[1]) if weights[0] and weights[1] else scale(1.0)


def _unrotated(keys: Keys, num_layers: int) -> list[int]:
    """1 for each layer without rotation: in a config 1 means "rotates", in megatron-core "does not rotate"."""
    interval = keys.get("no_rope_layer_interval", 4)
    rotates = keys.get("no_rope_layers")
    if rotates is None:
        rotates = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(rotates) < num_layers:
        raise ModelError(f"config.json: no_rope_layers has {len(rotates)} entries for {num_layers} layers")
    return [int(not rotate) for rotate in rotates[:num_layers]]


def _windows(keys: Keys, family: Family, rule: Window, values: Mapping[str, Any]) -> dict[str, Any]:
    """Sliding windows of W keys, the query's own included; megatron-core counts the keys before it."""
    num_layers = values["num_layers"]
    window = keys.get("sliding_window", rule.default)
    if rule.before and (before := keys.get(rule.before)) is not None:
        window = before + 1
    if rule.switch and not keys.get(rule.switch, False):
        window = None
    slides = [True] * num_layers
    if rule.first_layer is not None:
        first = keys.get(*rule.first_layer)
        slides = [layer >= first for layer in range(num_layers)]
    elif family.no_rope:
        slides = [bool(unrotated) for unrotated in values["no_rope_freq"]]
    types, flags = keys.get("layer_types"), keys.get(rule.flags) if rule.flags else None
    if flags is not None:
        if len(flags) != num_layers:
            raise ModelError(f"config.json: {rule.flags} has {len(flags)} entries for {num_layers} layers")
        slides = [bool(one) for one in flags]
    elif rule.flags and types is None:
        raise ModelError(f"config.json: neither {rule.flags} nor layer_types says which layers have a window")
    elif types is None and rule.pattern is not None and window is not None:
        key, default = rule.pattern
        every_full = keys.get(key, default) if key else default
        if not isinstance(every_full, int):
            raise ModelError(f"config.json: {key}={every_full!r} without layer_types is not supported")
        slides = [(layer + 1) % every_full != 0 for layer in range(num_layers)]
    elif types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        unknown = sorted({str(kind) for kind in types if kind not in known})
        if unknown:
            raise ModelError(f"config.json: layer types {', '.join(unknown)} are not supported")
        if len(types) != num_layers:
            raise ModelError(f"config.json: {len(types)} layer_types for {num_layers} layers")
        slides = [known[kind] for kind in types]
        if window is None and any(slides):
            raise ModelError("config.json: layer_types has sliding_attention but there is no sliding_window")
    if window is None:
        return {}
    found: dict[str, Any] = {}
    if rule.rotates and not all(slides):
        found["no_rope_freq"] = [int(not one) for one in slides]
    if not any(slides):
        return found
    if not all(slides):
        found["window_attn_skip_freq"] = [int(one) for one in slides]
    return found | {"window_size": [window - 1, 0]}


def _pattern(keys: Keys, rule: Pattern, values: Mapping[str, Any]) -> str:
    """megatron-core's symbol of each block."""
    given = [value for key in rule.types if (value := keys.get(key))]
    text = keys.get(rule.text) if rule.text else None
    attends = (keys.get(rule.attention) or ()) if rule.attention else ()
    num_layers = values.get("num_layers")
    if given:
        symbols = _symbols(given[0])
    elif text is not None:
        symbols = _checked(rule.text, text)
    elif num_layers is None:
        raise ModelError(f"config.json: neither {rule.types[0]!r} nor {rule.text!r} says what each layer is")
    else:
        symbols = "".join("*" if layer in attends else rule.others for layer in range(num_layers))
    if num_layers is not None and (len(symbols) != num_layers or not set(symbols) <= set(rule.allowed)):
        raise ModelError(f"config.json: {rule.types[0]} must say mamba or attention for each of {num_layers} layers")
    if not rule.two_blocks:
        return symbols
    second = "E" if values.get("num_moe_experts") else "-"
    return "".join(f"{symbol}{second}" for symbol in symbols)


def _symbols(types: Any) -> str:
    unknown = sorted({str(kind) for kind in types if kind not in _SYMBOLS})
    if unknown:
        raise ModelError(
            f"config.json: layer types {', '.join(unknown)} are not supported (supported: {', '.join(_SYMBOLS)})"
        )
    return "".join(_SYMBOLS[kind] for kind in types)


def _checked(key: str, text: Any) -> str:
    for at, symbol in enumerate(text):
        if symbol not in _SYMBOLS.values():
            raise ModelError(
                f"config.json: {key} {text!r}: symbol {symbol!r} at {at} is not known "
                "(known: M Mamba, * attention, - MLP, E mixture of experts)"
            )
    return str(text)


def _read_experts(values: dict[str, Any]) -> None:
    """Check the fields of experts; drop them where there are none."""
    if not values["_has_experts"]:
        for name in [name for name in values if name.startswith(("moe_", "num_moe_"))]:
            del values[name]
        return
    num_experts, top_k = values["num_moe_experts"], values["moe_router_topk"]
    if not 1 <= top_k <= num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok is {top_k}, it must be 1 to {num_experts}, the experts there are"
        )
    sizes = ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    values |= {name: int(values[name]) for name in sizes if values.get(name) is not None}


def _read_biases(keys: Keys, family: Family, values: dict[str, Any]) -> None:
    """Note which linears have biases, and ask megatron-core for the fewest that cover them."""
    default = family.biases_by_default
    given = [linears for key, linears in family.biases.items() if key == ALWAYS or keys.get(key, default)]
    linears = tuple(one for several in given for one in several)
    if "-" not in values.get("hybrid.pattern", "-"):
        linears = tuple(one for one in linears if one not in ("fc1", "fc2"))
    values["linear_biases"] = linears
    values["add_bias_linear"] = bool(set(linears) - {"qkv"})
    values["add_qkv_bias"] = "qkv" in linears


# ---------------------------------------------------------------------- writing


def config_of(description: ModelDescription) -> tuple[dict[str, Any], ModelDescription]:
    """(config.json, the description that reading it gives). Raises ModelError where none says all that it says."""
    own, has_experts = description.architecture, bool(description.transformer.get("num_moe_experts"))
    written = [
        name
        for name, family in FAMILIES.items()
        if family.is_written
        and (family.pattern is not None) == (description.hybrid is not None)
        and (description.hybrid is not None or ("num_moe_experts" in family.fields) == has_experts)
    ]
    reasons = []
    for architecture in sorted(written, key=lambda name: name != own):
        family = FAMILIES[architecture]
        try:
            config = {"architectures": [architecture], "model_type": family.model_type, **_written(family, description)}
        except KeyError as missing:  # a field that only models of this family have
            reasons.append(f"{architecture}: it has no {missing}")
            continue
        ids = (("bos", description.bos_id), ("eos", list(description.eos_ids) or None), ("pad", description.pad_id))
        config |= {f"{name}_token_id": value for name, value in ids if value is not None}
        try:
            read = description_from_config(config, name=description.name)
        except ModelError as error:
            reasons.append(f"{architecture}: {error}")
            continue
        different = _differences(description, read)
        if not different:
            return config, read
        reasons.append(f"{architecture}: {', '.join(different)}")
    raise ModelError(
        f"{description.name or own}: it can be written as {', '.join(written)} only, and is none of them "
        f"({'; '.join(reasons)})"
    )


def _written(family: Family, description: ModelDescription) -> dict[str, Any]:
    layers = description.transformer
    values = {name: getattr(description, name) for name in _OWN_FIELDS} | dict(layers)
    for group in KINDS:
        if (found := getattr(description, group)) is not None:
            values |= {f"{group}.{one.name}": getattr(found, one.name) for one in fields(found)}
    values["num_query_groups"] = layers.get("num_query_groups") or layers["num_attention_heads"]
    if layers.get("num_moe_experts"):
        values["moe_layer_freq"] = expert_layers(layers["num_layers"], layers.get("moe_layer_freq", 1))
    config = {
        source.name: values[name]
        for name, source in family.fields.items()
        if isinstance(source, Key) and values.get(name) is not None
    }
    config |= {key: value(values) for key, value in family.written.items()}
    if family.rope is not None:
        config["rope_theta"] = description.rotary_base
        if family.rope.partial:
            config["partial_rotary_factor"] = description.rotary_percent
        if family.rope.dim_key:
            config[family.rope.dim_key] = round(description.rotary_percent * layers["kv_channels"])
        scaling = description.rope_scaling
        if scaling is not None and scaling.kind in _ROPE_TYPES:
            factors = {key: _json(getattr(scaling, name)) for name, key in _ROPE_TYPES[scaling.kind].items()}
            if family.rope.mscales and scaling.mscale_all_dim:
                factors |= {key: getattr(scaling, key) for key in _YARN_WEIGHTS}
            config["rope_scaling"] = {"rope_type": scaling.kind, **factors}
            if scaling.kind == "longrope":
                config["original_max_position_embeddings"] = scaling.original_max_position
        if family.rope.local_key:
            local = description.extensions.local_rotary_base or description.rotary_base
            config[family.rope.local_key] = local
            shared = {"rope_type": "default"}
            if family.rope.partial:
                shared["partial_rotary_factor"] = description.rotary_percent
            everywhere = {"rope_theta": description.rotary_base, **shared, **config.get("rope_scaling", {})}
            # of transformers 5; earlier ones read the keys above
            config["rope_parameters"] = {
                "sliding_attention": {"rope_theta": local, **shared},
                "full_attention": everywhere,
            }
    if family.window is not None:
        config |= _written_window(family.window, layers)
    for key, linears in family.biases.items():
        if key != ALWAYS:
            config[key] = _has_bias(description, linears[-1])
    return config


def _json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _written_window(rule: Window, layers: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of sliding windows; those of layers without any where transformers could not be told of them."""
    slides = layers.get("window_attn_skip_freq")
    if "window_size" not in layers or not (rule.writes_types or (rule.writes_all and slides is None)):
        if rule.switch:
            return {rule.switch: False}
        types = {"layer_types": ["full_attention"] * layers["num_layers"]} if rule.writes_types else {}
        return types if types and not rule.rotates else {"sliding_window": None, **types}
    config = {rule.switch: True} if rule.switch else {}
    config |= {"sliding_window": layers["window_size"][0] + 1}
    if rule.before:
        config[rule.before] = layers["window_size"][0]
    if rule.flags:
        config[rule.flags] = [int(one) for one in slides or [1] * layers["num_layers"]]
    if rule.writes_types:
        types = {True: "sliding_attention", False: "full_attention"}
        config["layer_types"] = [types[bool(one)] for one in slides or [1] * layers["num_layers"]]
    return config


def _has_bias(description: ModelDescription, linear: str) -> bool:
    """Whether the Hugging Face model has a bias there; a description of Megatron's says only that all may have one."""
    if description.linear_biases:
        return linear in description.linear_biases
    return bool(description.transformer.get("add_bias_linear"))


_ARITHMETIC = (
    *("vocab_size", "max_sequence_length", "position_embedding", "rotary_base", "rotary_percent", "rope_scaling"),
    *("tied_embeddings", "hybrid", "scales", "extensions"),
)
"""Fields of a description that, next to `transformer`, decide what the model computes. `linear_biases` is not one: the
writer of tensors finds a bias that has no tensor."""


def _differences(description: ModelDescription, other: ModelDescription) -> list[str]:
    """What the two say differently of the model's arithmetic."""
    mine, theirs = _plain(description), _plain(other)
    return [f"{name} is {mine.get(name)!r}" for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]


def _plain(description: ModelDescription) -> dict[str, Any]:
    """Every field that decides what the model computes; switches that are off are left out."""
    layers = dict(description.transformer)
    if layers.get("add_bias_linear"):
        layers["add_qkv_bias"] = True  # megatron-core's own meaning
    if description.position_embedding != "rope":
        description = replace(description, rotary_base=0.0, rotary_percent=1.0, rope_scaling=None)
    values = layers | {name: getattr(description, name) for name in _ARITHMETIC}
    if layers.get("multi_latent_attention"):
        values["latent_norm_epsilon"] = description.latent_norm_epsilon or layers.get("layernorm_epsilon", 1e-5)
    return {name: value for name, value in values.items() if value not in (None, False)}
