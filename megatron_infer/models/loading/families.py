"""The families of Hugging Face models, a row each: its config keys, its tensors' names, what it refuses. No torch.

`hf_config` reads and writes config.json by a row, `hf_names` makes parameters of tensors by the same row. A config key
that changes the arithmetic has its effect or is refused by name.
Source of the semantics: the models' own config and modelling files in `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from megatron_infer.models.loading.model_description import ModelDescription

Values = Mapping[str, Any]
"""What was read of a config, by the names in `Family.fields`."""
Derived = Callable[[Values], Any]
Required = Mapping[str, tuple[tuple[Any, ...], str]]
"""Key -> (the values that are allowed, why others are refused). A key that is absent is allowed."""
ALWAYS = ""
"""In `Family.biases`: no key decides, the linears have biases."""


@dataclass(frozen=True, slots=True)
class Key:
    """The key of config.json that gives a field its value."""

    name: str
    default: Any = None
    """The value where the key is absent, or a function of the values so far. A number without a default is needed."""
    kind: Literal["count", "nullable", "positive", "real", "flag", "activation", "optional", "auto", "range", "any"] = (
        "count"
    )
    """`count` is a positive int, `nullable` one or null, `positive` a positive float, `real` any float. `optional` is a
    count for which null and 0 mean the default, and `auto` one for which null and "auto" do. `range` is a pair (low,
    high), where high is None for infinity. `any` takes the value as it is."""
    null: Any = None
    """The value for a null, or a function of the values so far. None refuses a null number."""


@dataclass(frozen=True, slots=True)
class Rope:
    """How a family reads rope_parameters, or rope_theta and rope_scaling."""

    base: float = 10000.0
    """The base of a config that gives none."""
    percent: float = 1.0
    """The part of a head that rotates in a config that does not say."""
    partial: bool = False
    """Whether less than a whole head may rotate."""
    scaling: Values = field(default_factory=dict)
    """rope_scaling of a config that gives none."""
    mscales: bool = False
    """Whether the description keeps yarn's mscale and mscale_all_dim, of which other families make attention_factor."""
    dim_key: str = ""
    """The key of the number of dims of a head that rotate, in older configs."""
    local_key: str = ""
    """Set where layers with a window have a rope of their own: the key of its base in older configs."""
    local_base: float | None = None
    """Its base in a config that gives none; None: that of the other rope."""


@dataclass(frozen=True, slots=True)
class Window:
    """How a family reads sliding_window. layer_types, where a config has them, say which layers slide."""

    default: int | None = None
    """The window of a config that gives none."""
    switch: str = ""
    """A key that has to be true for any layer to slide."""
    first_layer: tuple[str, int] | None = None
    """(key, its default) of the first layer that slides. With None all layers slide, or those that do not rotate."""
    writes_all: bool = False
    """Whether transformers' models of this family read sliding_window; all of their layers slide then."""
    writes_types: bool = False
    """Whether they also read layer_types."""
    pattern: tuple[str, int] | None = None
    """(key or "", its default) of n: every n-th layer does not slide."""
    flags: str = ""
    """The key of a list with 1 for each layer that slides, which counts before layer_types."""
    before: str = ""
    """The key of the window without the query's own key, which counts before sliding_window."""
    rotates: bool = False
    """Whether in a model with windows the layers without one do not rotate."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """How a hybrid says the kind of each layer: M Mamba, * attention, - MLP, E mixture of experts."""

    types: tuple[str, ...] = ()
    """Keys of a list of layer types. The first key that a config has counts."""
    text: str = ""
    """The key of a string of these symbols, which is read where there are no types."""
    attention: str = ""
    """The key of the indices of the layers that attend; the others are mixers."""
    allowed: str = "M*-E"
    others: str = "M"
    """The symbol of a layer of which no key says what it is."""
    two_blocks: bool = False
    """Whether a layer is two blocks: the named one, then an MLP or a mixture of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Everything that is particular to the models of one architecture."""

    model_type: str
    fields: Mapping[str, Key | Derived | Any]
    """Field -> its key, a function of all that was read, or its value. A field belongs to ModelDescription, to its
    `hybrid`, `scales` or `extensions` (with that prefix) or else to TransformerConfig. A leading _ keeps a value inside
    this row."""
    tensors: Mapping[str, str | tuple[str, ...]]
    """megatron-core's module or bare parameter -> its Hugging Face names, below `layers` for those of a layer. Several
    names are a tensor for each block of rows that megatron-core stacks (q, k and v; gate and up). One name is a tensor
    of all blocks. {expert} stands for an expert's number; a name without it is one tensor of all experts."""
    base: str = "model"
    """The prefix of all tensors but the head."""
    base_in_memory: str = ""
    """The name of the body in transformers' model, where files have another one."""
    layers: str = "model.layers"
    blocks_per_layer: int = 1
    """How many layers of megatron-core one layer of the source is."""
    transposed: bool = False
    """Whether linears are stored as [in, out]."""
    stacked_experts: Literal["rows", "columns", "alternating columns"] = "rows"
    """How a tensor of all experts lies. `rows` are [E, out, in], under the name with .weight. `columns` are [E, in,
    out], under the name itself, gate before up or both in turn; biases are under the name with _bias."""
    reads_mxfp4: bool = False
    """Whether linears may be stored in MXFP4 (`mxfp4`)."""
    by_key_head: tuple[str, ...] = ()
    """Modules whose tensors have the rows of all their blocks for one key head of a delta net, then for the next."""
    in_rows: tuple[str, ...] = ()
    """Modules whose vectors are stored as [1, n]."""
    marks: tuple[str, ...] = ()
    """Parts of tensor names that Llama does not have, nor any family before this one in `FAMILIES`."""
    ignored_tensors: tuple[str, ...] = ()
    """Prefixes of tensors that transformers does not read either; {num_layers} stands for the number of layers."""
    gguf: str = ""
    """The architecture in its GGUF files, whose tensors are named as Llama's."""
    is_written: bool = True
    """Whether `config_of` tries to describe a model as one of this family."""
    written: Mapping[str, Derived] = field(default_factory=dict)
    """Key -> its value from a description's fields, where a key's value is kept in none of them."""
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The key that asks for biases, or ALWAYS -> the linears that have them."""
    biases_by_default: bool = False
    """Whether a config without such a key asks for them."""
    rope: Rope | None = field(default_factory=Rope)
    no_rope: bool = False
    """Whether no_rope_layers or no_rope_layer_interval take the rotation from layers."""
    window: Window | None = None
    pattern: Pattern | None = None
    """Set for a hybrid, and for no other family."""
    ignored_keys: tuple[str, ...] = ()
    """Keys without effect on inference that only this family has."""
    renamed_keys: Mapping[str, str] = field(default_factory=dict)
    """Older name of a key -> its name now."""
    required: Required = field(default_factory=dict)
    required_of_experts: Required = field(default_factory=dict)
    """Required where the model has experts."""
    refusals: tuple[tuple[Callable[[Values], bool], str], ...] = ()
    """(condition, what the error says after "config.json: ", with values in braces)."""


def _same(name: str) -> Derived:
    return lambda values: values[name]


_COMMON: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", "count"),
    "num_attention_heads": ("num_attention_heads", "count"),
    "num_key_value_heads": ("num_query_groups", "count"),
    "head_dim": ("kv_channels", "optional"),
    "max_position_embeddings": ("max_sequence_length", "count"),
    "rms_norm_eps": ("layernorm_epsilon", "positive"),
    "tie_word_embeddings": ("tied_embeddings", "flag"),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), ("num_moe_experts", "count")),
    "num_experts_per_tok": ("moe_router_topk", "count"),
    "moe_intermediate_size": ("moe_ffn_hidden_size", "count"),
    "routed_scaling_factor": ("moe_router_topk_scaling_factor", "real"),
    "norm_topk_prob": ("_normalised", "flag"),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), ("_num_shared", "count")),
    "first_k_dense_replace": ("_num_dense", "any"),
    "n_group": ("_num_groups", "any"),
    "topk_group": ("_group_topk", "any"),
    "q_lora_rank": ("q_lora_rank", "nullable"),
    "qk_nope_head_dim": ("qk_head_dim", "count"),
    "v_head_dim": ("v_head_dim", "count"),
}
"""Key of several families -> (its field, its kind)."""


def _keys(**defaults: Any) -> dict[str, Any]:
    """The fields of these keys, each with the family's default, None: as in `Key`."""
    found = {}
    for name, default in defaults.items():
        field_name, kind = _COMMON[name]
        null = _same("num_attention_heads") if name == "num_key_value_heads" else None
        found[field_name] = Key(name, default, kind, null=null)
    return found


# ---------------------------------------------------------------------- Llama and its like

_DECODER: dict[str, Any] = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "ffn_hidden_size": Key("intermediate_size"),
    "num_layers": Key("num_hidden_layers"),
    "num_attention_heads": Key("num_attention_heads"),
    **_keys(num_key_value_heads=_same("num_attention_heads")),
    "kv_channels": Key("head_dim", lambda v: v["hidden_size"] // v["num_attention_heads"], "optional"),
    "activation": Key("hidden_act", "silu", "activation"),
    "max_sequence_length": Key("max_position_embeddings", 2048),
    "layernorm_epsilon": Key("rms_norm_eps", 1e-6, "positive"),
    "tied_embeddings": Key("tie_word_embeddings", False, "flag"),
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
}
_OUTER = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}
_ATTENTION = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": "self_attn.o_proj",
}
_LLAMA_TENSORS = _OUTER | _ATTENTION | {
    "input_layernorm": "input_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": "mlp.down_proj",
}  # fmt: skip
_GATED_EXPERTS = {
    "mlp.router": "mlp.gate",
    "mlp.experts.linear_fc1": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    "mlp.experts.linear_fc2": "mlp.experts.{expert}.down_proj",
}
_DEEPSEEK_EXPERTS = _GATED_EXPERTS | {
    "mlp.shared_experts.linear_fc1": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
}
_SPARSE_BLOCKS = {name: named for name, named in _LLAMA_TENSORS.items() if not name.startswith("mlp.")} | {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.linear_fc1": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    "mlp.experts.linear_fc2": "block_sparse_moe.experts.{expert}.w2",
}
_ATTENTION_BIAS = {"attention_bias": ("qkv", "proj")}
_MLP_BIAS = {"mlp_bias": ("fc1", "fc2")}
_QWEN_WINDOW = Window(
    default=4096, switch="use_sliding_window", first_layer=("max_window_layers", 28), writes_types=True
)

_LLAMA = Family(
    model_type="llama",
    fields=_DECODER,
    tensors=_LLAMA_TENSORS,
    gguf="llama",
    biases=_ATTENTION_BIAS | _MLP_BIAS,
    window=Window(),
)
_MISTRAL = Family(
    model_type="mistral",
    fields=_DECODER | _keys(num_key_value_heads=8),
    tensors=_LLAMA_TENSORS,
    window=Window(default=4096, writes_all=True),
)
_QWEN2 = Family(
    model_type="qwen2",
    fields=_DECODER | _keys(num_key_value_heads=32),
    tensors=_LLAMA_TENSORS,
    gguf="qwen2",
    biases={ALWAYS: ("qkv",)},
    window=_QWEN_WINDOW,
)
_QWEN3 = replace(
    _QWEN2,
    model_type="qwen3",
    fields=_QWEN2.fields | _keys(head_dim=128) | {"qk_layernorm": True},
    gguf="qwen3",
    biases=_ATTENTION_BIAS,
)
_SMOLLM3 = Family(
    model_type="smollm3",
    fields=_DECODER | _keys(num_key_value_heads=4, tie_word_embeddings=True),
    tensors=_LLAMA_TENSORS,
    written={"no_rope_layers": lambda v: [1 - unrotated for unrotated in v["no_rope_freq"]]},
    biases=_ATTENTION_BIAS | _MLP_BIAS,
    rope=Rope(base=2e6),
    no_rope=True,
    window=Window(switch="use_sliding_window"),
)
_PHI3 = Family(
    model_type="phi3",
    fields=_DECODER | _keys(rms_norm_eps=1e-5),
    tensors=_LLAMA_TENSORS | {"self_attention.linear_qkv": "self_attn.qkv_proj", "mlp.linear_fc1": "mlp.gate_up_proj"},
    marks=("qkv_proj.", "gate_up_proj."),
    rope=Rope(partial=True),
    window=Window(),
    ignored_keys=("original_max_position_embeddings",),  # of the longrope type only, where it is read
)
_GPT2 = Family(
    model_type="gpt2",
    fields={
        "vocab_size": Key("vocab_size"),
        "hidden_size": Key("n_embd"),
        "ffn_hidden_size": Key("n_inner", lambda v: 4 * v["hidden_size"], "optional"),
        "num_layers": Key("n_layer"),
        "num_attention_heads": Key("n_head"),
        "num_query_groups": _same("num_attention_heads"),
        "kv_channels": lambda v: v["hidden_size"] // v["num_attention_heads"],
        "max_sequence_length": Key("n_positions", 1024),
        "activation": Key("activation_function", "gelu_new", "activation"),
        "layernorm_epsilon": Key("layer_norm_epsilon", 1e-5, "positive"),
        "tied_embeddings": Key("tie_word_embeddings", True, "flag"),
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "position_embedding": "learned_absolute",
    },
    tensors={
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    },
    rope=None,
    base="transformer",
    layers="transformer.h",
    transposed=True,
    marks=("transformer.",),
    biases={ALWAYS: ("qkv", "proj", "fc1", "fc2")},
)

# ---------------------------------------------------------------------- norms after attention and MLP

_NORMS_AFTER = {
    "self_attention.linear_proj.post_layernorm": "post_attention_layernorm",
    "mlp.linear_fc2.post_layernorm": "post_feedforward_layernorm",
}


def _query_scalar(v: Values) -> int | float:
    """s of a softmax scale s ** -0.5, a whole number where it is near one."""
    found: float = v["softmax_scale"] ** -2
    return round(found) if abs(found - round(found)) < 1e-6 else found


def _cap(name: str) -> Derived:
    """A softcap that may be null."""
    return lambda values: None if values[name] is None else float(values[name])


_GEMMA_DECODER = (
    _DECODER
    | _keys(head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True)
    | {
        "layernorm_zero_centered_gamma": True,
        "extensions.embedding_scale": lambda v: v["hidden_size"] ** 0.5,
    }
)
_GEMMA = Family(
    model_type="gemma",
    fields=_GEMMA_DECODER
    | _keys(num_key_value_heads=16)
    | {
        "_activation": Key("hidden_act", "gelu_pytorch_tanh", "activation"),
        # the name that the first configs give to the approximation
        "activation": lambda v: "gelu_pytorch_tanh" if v["_activation"] == "gelu" else v["_activation"],
    },
    tensors=_LLAMA_TENSORS,
    written={"hidden_act": _same("activation")},
    biases=_ATTENTION_BIAS,
    ignored_keys=("hidden_activation",),  # the modelling file reads hidden_act
)
_GEMMA2 = Family(
    model_type="gemma2",
    fields=_GEMMA_DECODER
    | _keys(num_key_value_heads=4)
    | {
        "activation": Key("hidden_activation", "gelu_pytorch_tanh", "activation"),
        "_query_scalar": Key("query_pre_attn_scalar", 256, "positive"),
        "softmax_scale": lambda v: v["_query_scalar"] ** -0.5,
        "_attention_cap": Key("attn_logit_softcapping", 50.0, "any"),
        "_logit_cap": Key("final_logit_softcapping", 30.0, "any"),
        "extensions.norms": "both",
        "extensions.attention_softcap": _cap("_attention_cap"),
        "extensions.logit_softcap": _cap("_logit_cap"),
    },
    tensors=_LLAMA_TENSORS | _NORMS_AFTER | {"pre_mlp_layernorm": "pre_feedforward_layernorm"},
    written={
        "query_pre_attn_scalar": _query_scalar,
        "attn_logit_softcapping": _same("extensions.attention_softcap"),
        "final_logit_softcapping": _same("extensions.logit_softcap"),
    },
    biases=_ATTENTION_BIAS,
    window=Window(default=4096, pattern=("", 2), writes_types=True),
    ignored_keys=("hidden_act", "cache_implementation"),
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    fields={
        name: source
        for name, source in _GEMMA2.fields.items()
        if not name.endswith(("attention_cap", "attention_softcap"))
    }
    | _keys(vocab_size=262208, num_attention_heads=8, max_position_embeddings=131072)
    | {
        # a config with an image tower leaves these out
        "_logit_cap": Key("final_logit_softcapping", None, "any"),
        "qk_layernorm": True,
    },
    marks=("pre_feedforward_layernorm.",),
    rope=Rope(base=1e6, local_key="rope_local_base_freq", local_base=1e4),
    window=Window(default=4096, pattern=("sliding_window_pattern", 6), writes_types=True),
    ignored_keys=(*_GEMMA2.ignored_keys, "_sliding_window_pattern", "sliding_window_pattern"),
)
_OLMO2 = Family(
    model_type="olmo2",
    fields=_DECODER
    | _keys(rms_norm_eps=1e-5)
    | {
        "qk_layernorm": True,
        "extensions.norms": "after",
        "extensions.whole_head_norms": True,
    },
    tensors={
        name: named
        for name, named in _LLAMA_TENSORS.items()
        if not name.endswith(("input_layernorm", "pre_mlp_layernorm"))
    }
    | _NORMS_AFTER,
    marks=("post_feedforward_layernorm.",),
    biases=_ATTENTION_BIAS,
)
_OLMO3 = replace(
    _OLMO2,
    model_type="olmo3",
    marks=(),
    rope=Rope(base=5e5, local_key="rope_local_base_freq"),
    window=Window(default=4096, pattern=("", 4), writes_types=True),
)
_EXAONE4 = replace(
    _OLMO2,
    model_type="exaone4",
    fields=_DECODER
    | _keys(num_key_value_heads=32, rms_norm_eps=1e-5)
    | {
        "qk_layernorm": True,
        "extensions.norms": "after",
    },
    marks=(),
    biases={},
    window=Window(default=4096, pattern=("sliding_window_pattern", 4), rotates=True, writes_types=True),
    ignored_keys=("sliding_window_pattern",),
)
_NEMOTRON = Family(
    model_type="nemotron",
    fields=_DECODER
    | _keys(max_position_embeddings=4096)
    | {
        "activation": Key("hidden_act", "relu2", "activation"),
        "layernorm_epsilon": Key("norm_eps", 1e-5, "positive"),
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
        "gated_linear_unit": False,
    },
    tensors=_LLAMA_TENSORS | {"mlp.linear_fc1": "mlp.up_proj"},
    biases=_ATTENTION_BIAS | _MLP_BIAS,
    rope=Rope(percent=0.5, partial=True),
)
_MIMO = replace(
    _QWEN2,
    model_type="mimo",
    gguf="",
    is_written=False,
    ignored_tensors=("model.mtp_layers.",),  # layers that draft
    ignored_keys=("num_nextn_predict_layers",),
)
_GLM4 = Family(
    model_type="glm4",
    fields=_DECODER
    | _keys(num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-7)
    | {
        "rotary_interleaved": True,
        "extensions.norms": "both",
    },
    tensors=_LLAMA_TENSORS
    | {
        "mlp.linear_fc1": "mlp.gate_up_proj",
        "self_attention.linear_proj.post_layernorm": "post_self_attn_layernorm",
        "mlp.linear_fc2.post_layernorm": "post_mlp_layernorm",
    },
    marks=("post_self_attn_layernorm.",),
    biases={"attention_bias": ("qkv",)},
    biases_by_default=True,
    rope=Rope(percent=0.5, partial=True),
)

# ---------------------------------------------------------------------- mixtures of experts

EXPERTS: Mapping[str, Any] = {
    "moe_router_load_balancing_type": "none",
    "moe_router_pre_softmax": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_grouped_gemm": False,
    "moe_aux_loss_coeff": 0.0,
}
"""Fields of TransformerConfig of every model with experts: no loss of training, all tokens on every rank."""
_SOFTMAX_ROUTER = {
    "moe_router_score_function": "softmax",
    # The weights are probabilities among all experts, or are normalised over those that were chosen.
    "moe_router_pre_softmax": lambda v: not v["_normalised"],
}
_ONE_EXPERT = (
    lambda v: v["_has_experts"] and v["_normalised"] and v["moe_router_topk"] == 1,
    "num_experts_per_tok=1 is not supported: the modelling file gives the one expert the weight 1, megatron-core its "
    "probability among all",
)
_NO_BIAS_WITH_EXPERTS: Required = {"attention_bias": ((None, False), "megatron-core biases both")}
_SIGMOID_ROUTER = {
    # Scores chosen with a correction bias, normalised and scaled: what megatron-core's router computes.
    **_keys(routed_scaling_factor=1.0, norm_topk_prob=True),
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
}
_NORMALISED_ALONE = (
    lambda v: v["_has_experts"] and v["_normalised"] == (v["moe_router_topk"] == 1),
    "norm_topk_prob={_normalised} with num_experts_per_tok={moe_router_topk} is not supported: megatron-core "
    "normalises the weights if and only if there are several",
)
_GROUPS = {
    **_keys(n_group=1, topk_group=1),
    "moe_router_num_groups": lambda v: v["_num_groups"] if (v["_num_groups"] or 1) > 1 else None,
    "moe_router_group_topk": lambda v: v["_group_topk"] if (v["_num_groups"] or 1) > 1 else None,
}
_EXPERTS_AND_SHARED = {
    # all layers have both but the first ones, which are dense
    **_keys(n_routed_experts=64, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1),
    "moe_shared_expert_intermediate_size": lambda v: v["_num_shared"] * v["moe_ffn_hidden_size"],
    "_num_dense": Key("first_k_dense_replace", 0, "any"),
    "moe_layer_freq": lambda v: [int(layer >= (v["_num_dense"] or 0)) for layer in range(v["num_layers"])],
    **_GROUPS,
}
_GROUPS_WRITTEN: dict[str, Derived] = {
    "n_group": lambda v: v.get("moe_router_num_groups") or 1,
    "topk_group": lambda v: v.get("moe_router_group_topk") or 1,
}
_NORMALISED: dict[str, Derived] = {"norm_topk_prob": lambda v: not v.get("moe_router_pre_softmax")}
_SIGMOID_NORMALISED: dict[str, Derived] = {"norm_topk_prob": lambda v: v.get("moe_router_topk") != 1}
_DENSE_LAYERS: dict[str, Derived] = {
    "decoder_sparse_step": lambda v: 1,
    "mlp_only_layers": lambda v: [layer for layer, sparse in enumerate(v["moe_layer_freq"]) if not sparse],
}
_FIRST_DENSE: dict[str, Derived] = {
    "first_k_dense_replace": lambda v: v["moe_layer_freq"].index(1) if 1 in v["moe_layer_freq"] else v["num_layers"]
}


def _num_shared(key: str) -> dict[str, Derived]:
    """The key that counts shared experts."""
    return {key: lambda v: (v.get("moe_shared_expert_intermediate_size") or 0) // v["moe_ffn_hidden_size"]}


def _sums_of_groups(num_summed: int) -> tuple[Callable[[Values], bool], str]:
    """The refusal of groups of experts that the modelling file chooses by the sum of so many scores of each."""
    return (
        lambda v: (
            v["_has_experts"]
            and bool(v["moe_router_num_groups"])
            and v["moe_router_topk"] // v["moe_router_group_topk"] != num_summed
        ),
        "n_group={_num_groups}, topk_group={_group_topk} with num_experts_per_tok={moe_router_topk} is not supported: "
        f"the modelling file chooses groups by their largest {num_summed}, megatron-core by num_experts_per_tok // "
        "topk_group",
    )


_ROUTER_LOSSES = ("output_router_logits", "router_aux_loss_coef")

_QWEN_MOE = (
    EXPERTS
    | _SOFTMAX_ROUTER
    | _keys(max_position_embeddings=32768, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    | _keys(norm_topk_prob=False)
    | {
        "_step": Key("decoder_sparse_step", 1),
        "_dense": Key("mlp_only_layers", (), "any"),
        "moe_layer_freq": lambda v: [
            int(layer not in (v["_dense"] or ()) and (layer + 1) % v["_step"] == 0) for layer in range(v["num_layers"])
        ],
    }
)
_QWEN2_MOE = replace(
    _QWEN2,
    model_type="qwen2_moe",
    fields=_DECODER
    | _QWEN_MOE
    | _keys(num_key_value_heads=16, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
    | {
        "moe_shared_expert_intermediate_size": Key("shared_expert_intermediate_size", 5632),
        "moe_shared_expert_gate": True,
        "_slides": Key("use_sliding_window", False, "flag"),
        "_types": Key("layer_types", None, "any"),
    },
    tensors=_LLAMA_TENSORS
    | _GATED_EXPERTS
    | {
        "mlp.shared_experts.linear_fc1": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    },
    marks=("mlp.shared_expert_gate.",),
    gguf="",
    written=_NORMALISED | _DENSE_LAYERS,
    renamed_keys={"num_local_experts": "num_experts"},
    required={"qkv_bias": ((None, True), "queries, keys and values have biases in this family's checkpoints")},
    window=Window(default=4096, switch="use_sliding_window", writes_types=True),
    ignored_keys=(*_ROUTER_LOSSES, "max_window_layers"),
    refusals=(
        _ONE_EXPERT,
        (lambda v: v["_slides"] and v["_types"] is None, "use_sliding_window needs layer_types, which say where"),
    ),
)
_QWEN3_MOE = replace(
    _QWEN3,
    model_type="qwen3_moe",
    fields=_QWEN3.fields
    | _QWEN_MOE
    | _keys(num_key_value_heads=4, head_dim=lambda v: v["hidden_size"] // v["num_attention_heads"]),
    tensors=_LLAMA_TENSORS | _GATED_EXPERTS,
    marks=("mlp.experts.",),
    gguf="",
    written=_NORMALISED | _DENSE_LAYERS,
    window=Window(default=4096, switch="use_sliding_window", writes_all=True),
    ignored_keys=(*_ROUTER_LOSSES, "max_window_layers"),
    renamed_keys={"num_local_experts": "num_experts"},
    required_of_experts=_NO_BIAS_WITH_EXPERTS,
    refusals=(_ONE_EXPERT,),
)
_MIXTRAL = Family(
    model_type="mixtral",
    fields={"_normalised": True}
    | _DECODER
    | EXPERTS
    | _SOFTMAX_ROUTER
    | _keys(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072, num_local_experts=8)
    | _keys(num_experts_per_tok=2)
    | {"moe_ffn_hidden_size": Key("intermediate_size")},
    tensors=_SPARSE_BLOCKS,
    marks=("block_sparse_moe.experts.",),
    rope=Rope(base=1e6),
    window=Window(writes_all=True),
    ignored_keys=(*_ROUTER_LOSSES, "router_jitter_noise"),
    refusals=(_ONE_EXPERT,),
)
_OLMOE = Family(
    model_type="olmoe",
    fields=_DECODER
    | EXPERTS
    | _SOFTMAX_ROUTER
    | _keys(rms_norm_eps=1e-5, max_position_embeddings=4096, num_experts=64, num_experts_per_tok=8)
    | _keys(norm_topk_prob=False)
    | {
        "moe_ffn_hidden_size": Key("intermediate_size"),
        "qk_layernorm": True,
        "extensions.whole_head_norms": True,
    },
    tensors=_LLAMA_TENSORS | _GATED_EXPERTS,
    written=_NORMALISED,
    ignored_keys=_ROUTER_LOSSES,
    renamed_keys={"num_local_experts": "num_experts"},
    required_of_experts=_NO_BIAS_WITH_EXPERTS,
    refusals=(_ONE_EXPERT,),
)

_GLM4_MOE = Family(
    model_type="glm4_moe",
    fields=_DECODER
    | EXPERTS
    | _SIGMOID_ROUTER
    | _EXPERTS_AND_SHARED
    | _keys(num_key_value_heads=8, rms_norm_eps=1e-5, n_routed_experts=128, moe_intermediate_size=1408)
    | _keys(first_k_dense_replace=1, max_position_embeddings=131072)
    | {"qk_layernorm": Key("use_qk_norm", False, "flag")},
    tensors=_LLAMA_TENSORS | _DEEPSEEK_EXPERTS | {"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"},
    marks=("mlp.gate.e_score_correction_bias",),
    ignored_tensors=("model.layers.{num_layers}.",),  # layers that draft
    written=_FIRST_DENSE | _SIGMOID_NORMALISED | _GROUPS_WRITTEN | _num_shared("n_shared_experts"),
    biases={"attention_bias": ("qkv",)},
    rope=Rope(percent=0.5, partial=True),
    ignored_keys=(*_ROUTER_LOSSES, "num_nextn_predict_layers", "num_mtp_layers"),
    refusals=(_NORMALISED_ALONE, _sums_of_groups(2)),
)
_LAYER_TYPES: dict[str, Derived] = {
    "mlp_layer_types": lambda v: ["sparse" if sparse else "dense" for sparse in v["moe_layer_freq"]]
}
_TYPES_OR_FIRST_DENSE = {
    "_types": Key("mlp_layer_types", None, "any"),
    "moe_layer_freq": lambda v: [
        int(v["_types"][layer] == "sparse" if v["_types"] else layer >= (v["_num_dense"] or 0))
        for layer in range(v["num_layers"])
    ],
}
_NO_LINEAR_BIASES: Required = {
    "attention_bias": (
        (None, False),
        "megatron-core's shared experts have no biases, and all linears have them or none",
    ),
    "mlp_bias": ((None, False), "megatron-core's shared experts have no biases"),
}
_EXAONE_MOE = replace(
    _GLM4_MOE,
    model_type="exaone_moe",
    fields=_GLM4_MOE.fields
    | _TYPES_OR_FIRST_DENSE
    | _keys(num_key_value_heads=32, num_experts=64, moe_intermediate_size=1024, routed_scaling_factor=2.5)
    | _keys(num_shared_experts=1, max_position_embeddings=2048)
    | {"qk_layernorm": True},
    tensors=_GLM4_MOE.tensors | {"mlp.router.expert_bias": "mlp.e_score_correction_bias"},
    marks=("mlp.e_score_correction_bias",),
    ignored_tensors=("mtp.",),
    written=_SIGMOID_NORMALISED | _LAYER_TYPES | _GROUPS_WRITTEN | _num_shared("num_shared_experts"),
    biases={},
    rope=Rope(),
    window=Window(default=4096, pattern=("sliding_window_pattern", 4), rotates=True, writes_types=True),
    ignored_keys=(*_GLM4_MOE.ignored_keys, "sliding_window_pattern"),
)
_HY_V3 = replace(
    _GLM4_MOE,
    model_type="hy_v3",
    fields={name: value for name, value in _GLM4_MOE.fields.items() if name not in _GROUPS}
    | _TYPES_OR_FIRST_DENSE
    | _keys(head_dim=128, num_experts=192, moe_intermediate_size=1536, num_shared_experts=1)
    | {
        "qk_layernorm": True,
        "moe_router_topk_scaling_factor": Key("router_scaling_factor", 2.826, "real"),
        "_normalised": True,
    },
    tensors=_GLM4_MOE.tensors
    | {
        "mlp.router": "mlp.router.gate",
        "mlp.router.expert_bias": "mlp.expert_bias",
        "mlp.shared_experts.linear_fc1": ("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        "mlp.shared_experts.linear_fc2": "mlp.shared_mlp.down_proj",
    },
    marks=("mlp.shared_mlp.",),
    written=_LAYER_TYPES | _num_shared("num_shared_experts"),
    biases={},
    rope=Rope(base=11158840.0),
    ignored_keys=(*_GLM4_MOE.ignored_keys, "enable_moe_fp32_combine"),
    renamed_keys={"num_local_experts": "num_experts"},
    required=_NO_LINEAR_BIASES,
    refusals=(_NORMALISED_ALONE,),
)
_DOTS1 = replace(
    _GLM4_MOE,
    model_type="dots1",
    fields=_GLM4_MOE.fields
    | _keys(num_key_value_heads=32, rms_norm_eps=1e-6, norm_topk_prob=False, first_k_dense_replace=0)
    | _keys(max_position_embeddings=2048, n_routed_experts=None, num_experts_per_tok=None)
    | {"qk_layernorm": True},
    marks=(),
    biases={},
    rope=Rope(),
    window=Window(default=4096, first_layer=("max_window_layers", 62), writes_types=True),
    renamed_keys={"num_local_experts": "n_routed_experts"},
    required=_NO_LINEAR_BIASES,
)
_BAILING_MOE_V2 = replace(
    _GLM4_MOE,
    model_type="bailing_moe_v2",
    fields=_GLM4_MOE.fields
    | _keys(num_key_value_heads=_same("num_attention_heads"), rms_norm_eps=1e-6, num_shared_experts=1)
    | _keys(routed_scaling_factor=2.5, num_experts=None, num_experts_per_tok=None, moe_intermediate_size=None)
    | {"qk_layernorm": Key("use_qk_norm", True, "flag")},
    tensors=_GLM4_MOE.tensors
    | {
        "embedding.word_embeddings": "model.word_embeddings",
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "self_attention.q_layernorm": "attention.query_layernorm",
        "self_attention.k_layernorm": "attention.key_layernorm",
        "mlp.router.expert_bias": "mlp.gate.expert_bias",
    },
    marks=("attention.query_key_value.",),
    written=_FIRST_DENSE | _SIGMOID_NORMALISED | _GROUPS_WRITTEN | _num_shared("num_shared_experts"),
    biases={"use_qkv_bias": ("qkv",)},
    ignored_keys=(
        *_GLM4_MOE.ignored_keys, "moe_shared_expert_intermediate_size", "router_dtype", "rotary_dim", "use_rmsnorm",
        "embedding_dropout", "output_dropout", "max_window_layers", "mtp_loss_scaling_factor",
    ),
    required={
        "use_bias": ((None, False), "megatron-core's shared experts have no biases, as other linears then"),
        "score_function": ((None, "sigmoid"), "a correction bias is added to sigmoid scores"),
        "moe_router_enable_expert_bias": ((None, True), "the family's routers have one"),
        "use_sliding_window": ((None, False), "the modelling file has no sliding windows"),
    },
)  # fmt: skip
_SARVAM_MOE = replace(_BAILING_MOE_V2, model_type="sarvam_moe", marks=(), rope=Rope(partial=True))


def _layers_with_experts(v: Values) -> list[int]:
    return [layer for layer, has_experts in enumerate(v["moe_layer_freq"]) if has_experts]


_ERNIE = Family(
    model_type="ernie4_5",
    fields=_DECODER
    | _keys(head_dim=128, num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=131072)
    | _keys(tie_word_embeddings=True)
    | {"rotary_interleaved": True},
    tensors=_LLAMA_TENSORS,
    biases={"use_bias": ("qkv", "proj", "fc1", "fc2")},
    rope=Rope(base=500000.0),
)
_ERNIE_MOE = replace(
    _ERNIE,
    model_type="ernie4_5_moe",
    fields=_ERNIE.fields
    | EXPERTS
    | _SIGMOID_ROUTER
    | _keys(head_dim=lambda v: v["hidden_size"] // v["num_attention_heads"], num_key_value_heads=4)
    | _keys(moe_intermediate_size=1536)
    | {
        "moe_router_topk_scaling_factor": None,
        "extensions.softmax_scores": True,
        "_normalised": True,
        "num_moe_experts": Key("moe_num_experts", 64),
        "moe_router_topk": Key("moe_k", 6),
        "_num_shared": Key("moe_num_shared_experts", 2, "any"),
        "moe_shared_expert_intermediate_size": lambda v: (v["_num_shared"] or 0) * v["moe_ffn_hidden_size"] or None,
        "_first": Key("moe_layer_start_index", 1, "any"),
        "_last": Key("moe_layer_end_index", -1, "any"),
        "_interval": Key("moe_layer_interval", 1),
        "moe_layer_freq": lambda v: [
            int(v["_first"] <= layer <= v["_last"] % v["num_layers"] and (layer + 1) % v["_interval"] == 0)
            for layer in range(v["num_layers"])
        ],
    },
    tensors=_GLM4_MOE.tensors | {"mlp.router.expert_bias": "mlp.moe_statics.e_score_correction_bias"},
    in_rows=("mlp.router.expert_bias",),
    marks=("mlp.moe_statics.",),
    ignored_tensors=("model.mtp_",),
    written=_num_shared("moe_num_shared_experts")
    | {
        "moe_layer_start_index": lambda v: _layers_with_experts(v)[0],
        "moe_layer_end_index": lambda v: _layers_with_experts(v)[-1],
        "moe_layer_interval": lambda v: next((b - a for a, b in pairwise(_layers_with_experts(v))), 1),
    },
    biases={},
    ignored_keys=(*_ROUTER_LOSSES, "num_nextn_predict_layers", "moe_capacity", "moe_gate", "moe_use_aux_free"),
    required={
        "use_bias": ((None, False), "megatron-core's shared experts have no biases, as other linears then"),
        "moe_norm_min": ((None, 1e-12), "megatron-core's router has no such bound of the sum of weights"),
    },
    refusals=(_NORMALISED_ALONE,),
)
_GPT_OSS = Family(
    model_type="gpt_oss",
    fields={"_normalised": True}
    | _DECODER
    | EXPERTS
    | _SOFTMAX_ROUTER
    | _keys(num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, max_position_embeddings=131072)
    | _keys(num_local_experts=128, num_experts_per_tok=4)
    | {
        "activation": "quick_gelu",
        "activation_func_clamp_value": Key("swiglu_limit", 7.0, "positive"),
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "moe_ffn_hidden_size": Key("intermediate_size"),
    },
    tensors=_OUTER
    | _ATTENTION
    | {
        "input_layernorm": "input_layernorm",
        "self_attention.core_attention.softmax_offset": "self_attn.sinks",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.router": "mlp.router",
        "mlp.experts.linear_fc1": "mlp.experts.gate_up_proj",
        "mlp.experts.linear_fc2": "mlp.experts.down_proj",
    },
    stacked_experts="alternating columns",
    reads_mxfp4=True,
    marks=("self_attn.sinks",),
    biases={ALWAYS: ("qkv", "proj", "router", "experts")},
    rope=Rope(
        base=150000.0,
        scaling={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    ),
    window=Window(default=128, pattern=("", 2), writes_types=True),
    ignored_keys=(*_ROUTER_LOSSES, "experts_per_token", "initial_context_length"),
    renamed_keys={"num_experts": "num_local_experts"},
    required={
        "attention_bias": ((None, True), "all linears have biases in this family's checkpoints"),
        "hidden_act": (("silu", "swish"), "the modelling file computes a sigmoid of the gate"),
        "swiglu_alpha": ((None, 1.702), "megatron-core's quick GELU has 1.702"),
    },
    refusals=(_ONE_EXPERT,),
)
_MIMO_V2_FLASH = Family(
    model_type="mimo_v2_flash",
    fields=_DECODER
    | EXPERTS
    | _SIGMOID_ROUTER
    | _GROUPS
    | _keys(num_key_value_heads=4, rms_norm_eps=1e-5, max_position_embeddings=131072, n_routed_experts=256)
    | _keys(num_experts_per_tok=8, moe_intermediate_size=2048)
    | {
        "kv_channels": Key("head_dim", 192),
        "moe_router_topk_scaling_factor": Key("routed_scaling_factor", 1.0, "real", null=1.0),
        "_sparse": Key("moe_layer_freq", None, "any"),
        "_kinds": Key("mlp_layer_types", None, "any"),
        "moe_layer_freq": lambda v: [
            int(v["_sparse"][layer] if v["_sparse"] else v["_kinds"][layer] == "sparse" if v["_kinds"] else layer > 0)
            for layer in range(v["num_layers"])
        ],
        "softmax_type": "learnable",
        "extensions.local_query_groups": Key("swa_num_key_value_heads", lambda v: 2 * v["num_query_groups"]),
        "extensions.local_sinks": True,
        "extensions.value_dim": Key("v_head_dim", 128),
        "extensions.value_scale": Key("attention_value_scale", 0.707, "real", null=1.0),
        "_local_heads": Key("swa_num_attention_heads", _same("num_attention_heads")),
        "_local_dim": Key("swa_head_dim", _same("kv_channels")),
        "_local_value_dim": Key("swa_v_head_dim", _same("extensions.value_dim")),
        "_local": lambda v: [v["_local_heads"], v["_local_dim"], v["_local_value_dim"]],
    },
    tensors={
        **{name: named for name, named in _LLAMA_TENSORS.items() if "k_layernorm" not in name and "q_l" not in name},
        **_GATED_EXPERTS,
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "self_attention.core_attention.softmax_offset": "self_attn.attention_sink_bias",
    },
    marks=("self_attn.attention_sink_bias",),
    ignored_tensors=("model.mtp.",),  # layers that draft
    written=_LAYER_TYPES
    | _SIGMOID_NORMALISED
    | _GROUPS_WRITTEN
    | {
        "moe_layer_freq": _same("moe_layer_freq"),
        "layernorm_epsilon": _same("layernorm_epsilon"),
        "add_swa_attention_sink_bias": lambda v: True,
        "add_full_attention_sink_bias": lambda v: False,
        "swa_head_dim": _same("kv_channels"),
        "swa_v_head_dim": _same("extensions.value_dim"),
        "swa_num_attention_heads": _same("num_attention_heads"),
    },
    rope=Rope(base=5e6, percent=0.334, partial=True, local_key="swa_rope_theta", local_base=1e4),
    window=Window(default=129, writes_types=True, flags="hybrid_layer_pattern", before="sliding_window_size"),
    ignored_keys=(*_ROUTER_LOSSES, "attention_chunk_size", "aux_loss_alpha", "seq_aux"),
    renamed_keys={"layernorm_epsilon": "rms_norm_eps"},
    required={
        "attention_bias": ((None, False), "the modelling file's linears have no biases"),
        "add_swa_attention_sink_bias": ((None, True), "the modelling file's layers with a window have sinks"),
        "add_full_attention_sink_bias": ((None, False), "the modelling file's other layers have no sinks"),
        "scoring_func": ((None, "sigmoid"), "the modelling file's router has sigmoid scores"),
        "topk_method": ((None, "noaux_tc"), "the modelling file's router has a correction bias"),
        "n_shared_experts": ((None, 0), "the modelling file has no shared experts"),
    },
    refusals=(
        _NORMALISED_ALONE,
        _sums_of_groups(2),
        (
            lambda v: v["_local"] != [v["num_attention_heads"], v["kv_channels"], v["extensions.value_dim"]],
            "heads, head_dim and v_head_dim of layers with a window are {_local}: only kv heads may differ",
        ),
        (
            lambda v: v["num_attention_heads"] % v["extensions.local_query_groups"] != 0,
            "{num_attention_heads} attention heads cannot share swa_num_key_value_heads evenly",
        ),
        (lambda v: v["extensions.value_dim"] > v["kv_channels"], "v_head_dim is larger than head_dim"),
        (lambda v: "extensions.local_rotary_base" not in v, "no layer has a window, or there is one rope"),
    ),
)

# ---------------------------------------------------------------------- latent attention

_LATENT = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    # The modelling files norm latents with the default of their norm's class.
    "latent_norm_epsilon": 1e-6,
    **_keys(q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128),
    "kv_lora_rank": Key("kv_lora_rank", 512),
    "qk_pos_emb_head_dim": Key("qk_rope_head_dim", 64),
    "kv_channels": lambda v: v["qk_head_dim"] + v["qk_pos_emb_head_dim"],
    "num_query_groups": _same("num_attention_heads"),
    "_num_kv_heads": Key("num_key_value_heads", None, "any"),
    **_EXPERTS_AND_SHARED,
}
_LATENT_WRITTEN = _GROUPS_WRITTEN | _num_shared("n_shared_experts") | {
    "num_key_value_heads": _same("num_attention_heads"), "q_lora_rank": _same("q_lora_rank"),
}  # fmt: skip
_LATENT_TENSORS = {name: named for name, named in _LLAMA_TENSORS.items() if "linear_qkv" not in name} | {
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
}
_LATENT_IGNORED = (*_ROUTER_LOSSES, "head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha")
_LATENT_REQUIRED: Required = {
    "attention_bias": ((None, False), "megatron-core gives the projections of latents no biases"),
    "rope_interleave": ((None, True), "megatron-core pairs neighbouring dims"),
    "moe_layer_freq": ((None, 1), "the modelling file has experts in every layer behind the dense ones"),
}
_LATENT_KV_HEADS = (
    lambda v: v["_num_kv_heads"] not in (None, v["num_attention_heads"]),
    "num_key_value_heads={_num_kv_heads} is not supported: each of {num_attention_heads} heads has its own",
)


_DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    fields=_DECODER
    | EXPERTS
    | _SIGMOID_ROUTER
    | _LATENT
    | _keys(n_routed_experts=256, routed_scaling_factor=2.5, first_k_dense_replace=3, n_group=8, topk_group=4)
    | _keys(max_position_embeddings=4096),
    tensors=_LATENT_TENSORS | _DEEPSEEK_EXPERTS | {"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"},
    ignored_tensors=("model.layers.{num_layers}.",),  # layers that draft
    written=_LATENT_WRITTEN | _FIRST_DENSE | _SIGMOID_NORMALISED,
    rope=Rope(mscales=True),
    ignored_keys=(*_LATENT_IGNORED, "num_nextn_predict_layers", "num_mtp_layers"),
    required=_LATENT_REQUIRED
    | {
        "scoring_func": ((None, "sigmoid"), "the modelling file has sigmoid scores"),
        "topk_method": ((None, "noaux_tc"), "the modelling file chooses with a correction bias"),
    },
    refusals=(_NORMALISED_ALONE, _LATENT_KV_HEADS, _sums_of_groups(2)),
)
_GLM4_MOE_LITE = replace(
    _DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    written=_LATENT_WRITTEN | _LAYER_TYPES | _SIGMOID_NORMALISED,
    fields=_DEEPSEEK_V3.fields
    | _keys(rms_norm_eps=1e-5, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, n_routed_experts=64)
    | _keys(num_experts_per_tok=4, routed_scaling_factor=1.8, moe_intermediate_size=1536)
    | _keys(max_position_embeddings=202752, first_k_dense_replace=1, n_group=1, topk_group=1)
    | {
        "_types": Key("mlp_layer_types", None, "any"),
        "moe_layer_freq": lambda v: [
            int(kind == "sparse") for kind in v["_types"] or ["dense", *["sparse"] * (v["num_layers"] - 1)]
        ],
    },
    refusals=(
        *_DEEPSEEK_V3.refusals,
        (
            lambda v: v["_num_dense"] != 1,
            "first_k_dense_replace={_num_dense}: the modelling file reads mlp_layer_types",
        ),
    ),
)
_SARVAM_MLA = replace(
    _DEEPSEEK_V3,
    model_type="sarvam_mla",
    is_written=False,  # what it says DeepSeek-V3's directories say too, under the same names of tensors
    fields=_DEEPSEEK_V3.fields
    | _keys(q_lora_rank=None, num_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1)
    | _keys(num_experts=None, num_experts_per_tok=None, moe_intermediate_size=None),
    ignored_keys=(*_DEEPSEEK_V3.ignored_keys, "q_head_dim", "moe_shared_expert_intermediate_size"),
)
_DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    fields=_DECODER
    | EXPERTS
    | _LATENT
    | _keys(routed_scaling_factor=1.0, n_shared_experts=2, moe_intermediate_size=1407)
    | {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        "_method": Key("topk_method", "greedy", "any"),
        "moe_router_num_groups": lambda v: v["_num_groups"] if v["_method"] == "group_limited_greedy" else None,
        "moe_router_group_topk": lambda v: v["_group_topk"] if v["_method"] == "group_limited_greedy" else None,
    },
    tensors=_LATENT_TENSORS | _DEEPSEEK_EXPERTS,
    written=_LATENT_WRITTEN
    | _FIRST_DENSE
    | {"topk_method": lambda v: "group_limited_greedy" if v.get("moe_router_num_groups") else "greedy"},
    rope=Rope(mscales=True),
    ignored_keys=(*_LATENT_IGNORED, "mlp_bias"),  # the modelling file gives MLPs no biases
    required=_LATENT_REQUIRED
    | {
        "scoring_func": ((None, "softmax"), "the modelling file has softmax scores"),
        "topk_method": ((None, "greedy", "group_limited_greedy"), "the modelling file knows no other"),
        "norm_topk_prob": ((None, False), "the modelling file does not read it, so that weights are not normalised"),
    },
    refusals=(_LATENT_KV_HEADS, _sums_of_groups(1)),
)
# ---------------------------------------------------------------------- sparse attention over latents

_SPARSE = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": Key("index_n_heads", 64),
    "dsa_indexer_head_dim": Key("index_head_dim", 128),
    "dsa_indexer_topk": Key("index_topk", 2048),
    "extensions.index_norm_epsilon": 1e-6,
    **_TYPES_OR_FIRST_DENSE,
}
_INDEXER_TENSORS = {
    f"self_attention.core_attention.indexer.{ours}": f"self_attn.indexer.{theirs}"
    for ours, theirs in (
        ("linear_wq_b", "wq_b"),
        ("linear_wk", "wk"),
        ("k_norm", "k_norm"),
        ("linear_weights_proj", "weights_proj"),
    )
}
_NO_LATENT_QUERIES = (
    lambda v: v["q_lora_rank"] is None,
    "q_lora_rank=null is not supported: index queries are made of the latent of queries",
)
_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3,
    model_type="deepseek_v32",
    fields=_DEEPSEEK_V3.fields | _SPARSE | _keys(max_position_embeddings=163840),
    tensors=_DEEPSEEK_V3.tensors | _INDEXER_TENSORS,
    marks=("self_attn.indexer.wq_b",),
    # the modelling file gives MLPs no biases, and all layers indexers
    ignored_keys=(*_DEEPSEEK_V3.ignored_keys, "mlp_bias", "layer_types"),
    refusals=(*_DEEPSEEK_V3.refusals, _NO_LATENT_QUERIES),
)


def _shared_choices(v: Values) -> tuple[bool, ...]:
    """Which layers of a GLM-5 attend to an earlier indexer's choice, as its modelling file finds them."""
    kinds, pattern, num_layers = v["_index_types"], v["_index_pattern"], v["num_layers"]
    if kinds is None and pattern is not None:
        kinds = ["shared" if one in ("S", "shared") else "full" for one in pattern]
    if kinds is None:
        freq, offset = max(v["_index_freq"], 1), v["_index_offset"]
        kinds = ["full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(num_layers)]
    shared = tuple(kind == "shared" for kind in kinds)
    return shared if any(shared) else ()


_GLM_MOE_DSA = replace(
    _DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    fields=_DEEPSEEK_V32.fields
    | _keys(rms_norm_eps=1e-5, q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, max_position_embeddings=202752)
    | _keys(n_group=1, topk_group=1)
    | {
        "dsa_indexer_n_heads": Key("index_n_heads", 32),
        "extensions.index_interleaved": True,
        "_index_types": Key("indexer_types", None, "any"),
        "_index_pattern": Key("index_topk_pattern", None, "any"),
        "_index_freq": Key("index_topk_freq", 1, "any"),
        "_index_offset": Key("index_skip_topk_offset", 2, "any"),
        "extensions.index_shared": _shared_choices,
    },
    written=_DEEPSEEK_V32.written
    | {"indexer_types": lambda v: [("full", "shared")[one] for one in v["extensions.index_shared"]] or None},
    required=_DEEPSEEK_V32.required
    | {"indexer_rope_interleave": ((None, True), "the modelling file pairs neighbouring dims")},
    refusals=(
        *_DEEPSEEK_V32.refusals,
        (
            lambda v: (
                len(v["extensions.index_shared"]) not in (0, v["num_layers"])
                or v["extensions.index_shared"][:1] == (True,)
            ),
            "indexer_types has to name each of {num_layers} layers, the first of them full",
        ),
    ),
)

_MINIMAX_M2 = Family(
    model_type="minimax_m2",
    fields=_DECODER
    | EXPERTS
    | _keys(num_key_value_heads=8, head_dim=128, max_position_embeddings=196608, num_local_experts=256)
    | _keys(num_experts_per_tok=8)
    | {
        "moe_ffn_hidden_size": Key("intermediate_size"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "_attention": Key("attn_type_list", (), "any"),
        "_normalised": True,
        "qk_layernorm": True,
        "extensions.whole_head_norms": True,
    },
    tensors=_SPARSE_BLOCKS | {"mlp.router.expert_bias": "block_sparse_moe.e_score_correction_bias"},
    marks=("block_sparse_moe.e_score_correction_bias",),
    rope=Rope(base=5e6, partial=True, dim_key="rotary_dim"),
    ignored_keys=(*_ROUTER_LOSSES, "router_jitter_noise", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    required={
        "scoring_func": ((None, "sigmoid"), "the modelling file's router has sigmoid scores"),
        "use_routing_bias": ((None, True), "the modelling file's router has a correction bias"),
        "use_qk_norm": ((None, True), "the modelling file norms queries and keys"),
        "qk_norm_type": ((None, "per_layer"), "the modelling file norms all heads together"),
        "shared_intermediate_size": ((None, 0), "the modelling file has no shared experts"),
    },
    refusals=(
        _NORMALISED_ALONE,
        (lambda v: any(kind != 1 for kind in v["_attention"]), "attn_type_list has layers of linear attention"),
    ),
)
_GRANITE_FACTORS = {
    "softmax_scale": Key("attention_multiplier", 1.0, "real", null=1.0),
    "scales.embedding": Key("embedding_multiplier", 1.0, "real", null=1.0),
    "scales.residual": Key("residual_multiplier", 1.0, "real", null=1.0),
    "_logits_scaling": Key("logits_scaling", 1.0, "positive", null=1.0),
    "scales.logits": lambda v: 1.0 / v["_logits_scaling"],
    "scales.head_from_embedding": _same("tied_embeddings"),
}
_GRANITE_EXPERTS = EXPERTS | {
    "num_moe_experts": Key("num_local_experts", 8, "any"),
    "moe_router_topk": Key("num_experts_per_tok", 2, "any"),
    "moe_ffn_hidden_size": Key("intermediate_size"),
    "moe_router_score_function": "softmax",
    "_normalised": True,
}
_GRANITE_EXPERT_TENSORS = {
    "mlp.router": "block_sparse_moe.router.layer",
    "mlp.experts.linear_fc1": "block_sparse_moe.input_linear",
    "mlp.experts.linear_fc2": "block_sparse_moe.output_linear",
}
_GRANITE = Family(
    model_type="granite",
    fields=_DECODER | _GRANITE_FACTORS,
    tensors=_LLAMA_TENSORS,
    is_written=False,
    biases=_ATTENTION_BIAS | _MLP_BIAS,
)
_GRANITE_MOE = Family(
    model_type="granitemoe",
    fields=_DECODER | _GRANITE_FACTORS | _GRANITE_EXPERTS,
    tensors={name: named for name, named in _LLAMA_TENSORS.items() if not name.startswith("mlp.")}
    | _GRANITE_EXPERT_TENSORS,
    is_written=False,
    marks=("block_sparse_moe.input_linear",),
    ignored_keys=_ROUTER_LOSSES,
    required_of_experts=_NO_BIAS_WITH_EXPERTS,
    refusals=(_ONE_EXPERT,),
)

# ---------------------------------------------------------------------- Mamba-2 and hybrids
#
# A layer of megatron-core's MambaModel is one block, a norm and a body. Mamba2 and NemotronH have such layers; a layer
# of Bamba or GraniteMoeHybrid is two blocks, a mixer or attention and then an MLP.

_SILU = (("silu", "swish"), "Mamba mixers use silu")
_MIXER = {
    "is_hybrid_model": True,
    "normalization": "RMSNorm",
    "hybrid.norm_groups": _same("mamba_num_groups"),
    "hybrid.norm_epsilon": _same("layernorm_epsilon"),
}
_ONE_BLOCK_MIXER = {
    "layernorm_epsilon": Key("layer_norm_epsilon", 1e-5, "positive"),
    "mamba_num_groups": Key("n_groups", 8),
    "hybrid.conv_width": Key("conv_kernel", 4),
    "hybrid.conv_bias": Key("use_conv_bias", True, "flag"),
    "hybrid.projection_bias": Key("use_bias", False, "flag"),
    "gated_linear_unit": False,
    "position_embedding": "none",
}
_LIMITS = {
    "_limits": Key("time_step_limit", None, "range"),
    "hybrid.dt_min": lambda v: v["_limits"][0],
    "hybrid.dt_max": lambda v: v["_limits"][1],
}


def _inner_width(key: str) -> dict[str, Derived]:
    """The key of the inner width of mixers / the hidden size, a whole number where it is one."""

    def ratio(v: Values) -> int | float:
        inner = v["mamba_num_heads"] * v["mamba_head_dim"]
        return inner / v["hidden_size"] if inner % v["hidden_size"] else inner // v["hidden_size"]

    return {key: ratio}


_LIMITS_WRITTEN: dict[str, Derived] = {
    "time_step_limit": lambda v: [
        v["hybrid.dt_min"],
        {"__float__": "Infinity"} if v["hybrid.dt_max"] is None else v["hybrid.dt_max"],
    ]
}
# Keys for initialisation, training or other implementations of the same arithmetic. The paged path keeps the residual
# stream in fp32 whatever residual_in_fp32 is. How a scan is cut into chunks changes its rounding, not its result.
_HYBRID_IGNORED = (
    "residual_in_fp32", "rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_rank",
    "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype", "output_router_logits",
    "router_aux_loss_coef", "z_loss_coefficient", "use_associative_scan", "mtp_layers_block_type",
    "mtp_hybrid_override_pattern",
)  # fmt: skip
_ONE_BLOCK_TENSORS = {
    "embedding.word_embeddings": "backbone.embeddings",
    "decoder.final_layernorm": "backbone.norm_f",
    "output_layer": "lm_head",
    "norm": "norm",
    "mixer": "mixer",
}

_MAMBA2 = Family(
    model_type="mamba2",
    fields=_MIXER | _ONE_BLOCK_MIXER
    | _keys(vocab_size=32768, max_position_embeddings=1 << 20, tie_word_embeddings=False) | {
        "hidden_size": Key("hidden_size"),
        "num_layers": Key("num_hidden_layers", 64),
        "mamba_num_heads": Key("num_heads", 128),
        "mamba_head_dim": Key("head_dim", 64),
        "mamba_state_dim": Key("state_size", 128),
        "_expand": Key("expand", 2, "positive"),
        "_inner": Key("intermediate_size", None, "any"),
        # TransformerConfig requires attention. No layer reads these; they divide over ranks where the mixers do.
        "num_attention_heads": _same("mamba_num_heads"),
        "num_query_groups": _same("mamba_num_heads"),
        "kv_channels": _same("mamba_head_dim"),
        "ffn_hidden_size": lambda v: v["mamba_num_heads"] * v["mamba_head_dim"],
        "activation": "silu",
    }
    | _LIMITS,
    tensors=_ONE_BLOCK_TENSORS,
    rope=None,
    base="backbone",
    layers="backbone.layers",
    written=_inner_width("expand") | _LIMITS_WRITTEN,
    pattern=Pattern(),
    ignored_keys=(
        *_HYBRID_IGNORED, "chunk_size", "time_step_min", "time_step_scale", "time_step_init_scheme",
        "norm_before_gate",  # the modelling file does not read it: it gates first
    ),
    required={"rms_norm": ((None, True), "mixers without their norm are not mapped"), "hidden_act": _SILU},
    refusals=(
        (
            lambda v: v["_inner"] not in (None, v["_expand"] * v["hidden_size"]),
            "intermediate_size={_inner!r} is not supported: the inner width is expand x hidden_size",
        ),
    ),
)  # fmt: skip
_NEMOTRON_H = Family(
    model_type="nemotron_h",
    fields=_MIXER | _ONE_BLOCK_MIXER
    | _keys(num_attention_heads=32, num_key_value_heads=8, vocab_size=131072, max_position_embeddings=4096)
    | {
        "hidden_size": Key("hidden_size", 4096),
        "_attention_head_dim": Key("attention_head_dim", 128, "optional"),
        "kv_channels": Key("head_dim", _same("_attention_head_dim"), "optional"),
        "ffn_hidden_size": Key("intermediate_size", 21504),
        "activation": Key("mlp_hidden_act", "relu2", "activation"),
        "mamba_num_heads": Key("mamba_num_heads", 128),
        "mamba_head_dim": Key("mamba_head_dim", 64),
        "mamba_state_dim": Key("ssm_state_size", 128),
        "_mamba_proj_bias": Key("mamba_proj_bias", False, "flag"),
        # The modelling file has no upper limit and takes the lower one from time_step_min.
        "hybrid.dt_min": Key("time_step_min", 0.001, "real"),
        "_limits": Key("time_step_limit", None, "range"),
        "tied_embeddings": False,
        "num_moe_experts": Key("n_routed_experts", 8, "any"),
        "moe_router_topk": Key("num_experts_per_tok", 2, "any"),
        "moe_ffn_hidden_size": Key("moe_intermediate_size", 7688, "any"),
        "moe_shared_expert_intermediate_size": Key("moe_shared_expert_intermediate_size", 7688, "any"),
        "moe_latent_size": Key("moe_latent_size", None, "nullable"),
    }
    | _GROUPS
    | EXPERTS
    | _SIGMOID_ROUTER,
    tensors=_ONE_BLOCK_TENSORS
    | {
        "input_layernorm": "norm",
        "self_attention.linear_qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        "self_attention.linear_proj": "mixer.o_proj",
        "pre_mlp_layernorm": "norm",
        "mlp.linear_fc1": ("mixer.gate_proj", "mixer.up_proj"),
        "mlp.linear_fc2": "mixer.down_proj",
        "mlp.router": "mixer.gate",
        "mlp.router.expert_bias": "mixer.gate.e_score_correction_bias",
        "mlp.fc1_latent_proj": "mixer.fc1_latent_proj",
        "mlp.fc2_latent_proj": "mixer.fc2_latent_proj",
        "mlp.experts.linear_fc1": "mixer.experts.{expert}.up_proj",
        "mlp.experts.linear_fc2": "mixer.experts.{expert}.down_proj",
        "mlp.shared_experts.linear_fc1": "mixer.shared_experts.up_proj",
        "mlp.shared_experts.linear_fc2": "mixer.shared_experts.down_proj",
    },
    rope=None,
    base="backbone",
    base_in_memory="model",
    layers="backbone.layers",
    marks=("backbone.", ".mixer.", "model.embeddings."),
    ignored_tensors=("mtp.",),
    written=_SIGMOID_NORMALISED | _GROUPS_WRITTEN | {
        "hybrid_override_pattern": _same("hybrid.pattern"), "num_hidden_layers": _same("num_layers"),
    },
    biases=_MLP_BIAS,
    pattern=Pattern(types=("layers_block_type", "layer_types"), text="hybrid_override_pattern"),
    ignored_keys=(
        *_HYBRID_IGNORED, "chunk_size", "expand", "num_hidden_layers", "num_nextn_predict_layers",
        "num_local_experts", "moe_shared_expert_overlap",
        "n_shared_experts", "rms_norm_eps",  # the modelling file reads sizes and layer_norm_epsilon
    ),
    renamed_keys={
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_dt_min": "time_step_min",
        "mamba_dt_max": "time_step_max",
        "mamba_dt_limit": "time_step_limit",
        "mamba_dt_init_floor": "time_step_floor",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_chunk_size": "chunk_size",
    },
    required={
        "attention_bias": ((None, False), "the modelling file gives attention no biases"),
        "sliding_window": ((None,), "the modelling file has no sliding windows"),
        "tie_word_embeddings": ((None, False), "the modelling file does not tie them"),
        "mamba_hidden_act": _SILU,
    },
    required_of_experts={"mlp_bias": ((None, False), "experts with biases are not mapped")},
    refusals=(
        (
            lambda v: v["_limits"] != (0.0, None),
            "time_step_limit={_limits} is not supported: the modelling file ignores it",
        ),
        (
            lambda v: v["_mamba_proj_bias"] and not v["hybrid.projection_bias"],
            "mamba_proj_bias=True with use_bias=False: the modelling file reads use_bias only",
        ),
        _NORMALISED_ALONE,
        _sums_of_groups(2),
    ),
)  # fmt: skip
_TWO_BLOCK_MIXER = {
    "mamba_num_heads": Key("mamba_n_heads", 128),
    "_expand": Key("mamba_expand", 2, "positive"),
    "mamba_head_dim": Key(
        "mamba_d_head", lambda v: int(v["_expand"] * v["hidden_size"]) // v["mamba_num_heads"], "auto"
    ),
    "mamba_state_dim": Key("mamba_d_state", 256),
    "mamba_num_groups": Key("mamba_n_groups", 1),
    "hybrid.conv_width": Key("mamba_d_conv", 4),
    "hybrid.conv_bias": Key("mamba_conv_bias", True, "flag"),
    "hybrid.projection_bias": Key("mamba_proj_bias", False, "flag"),
    **_LIMITS,
}
_PARALLEL_FACTORS = tuple(
    f"extensions.{name}_multiplier"
    for name in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
)


def _falcon_width(v: Values) -> int:
    """The width of Falcon-H1's mixers."""
    return int(v["_widening"] * v["hidden_size"]) if v["_inner"] is None else int(v["_inner"])


_BAMBA = Family(
    model_type="bamba",
    fields=_DECODER
    | _MIXER
    | _TWO_BLOCK_MIXER
    | _keys(num_key_value_heads=8, rms_norm_eps=1e-5)
    | {
        "_rotary_dim": lambda v: int(v["kv_channels"] * v["rotary_percent"]),
        "_rotary_dim_given": Key("attn_rotary_emb", None, "any"),
    },
    tensors=_OUTER
    | _ATTENTION
    | {
        "decoder.final_layernorm": "model.final_layernorm",
        "norm": "input_layernorm",
        "mixer": "mamba",
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "pre_ff_layernorm",
        "mlp.linear_fc1": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "mlp.linear_fc2": "feed_forward.down_proj",
    },
    blocks_per_layer=2,
    marks=(".mamba.",),
    written=_inner_width("mamba_expand")
    | _LIMITS_WRITTEN
    | {
        "num_hidden_layers": lambda v: v["num_layers"] // 2,
        "attn_layer_indices": lambda v: [at for at, one in enumerate(v["hybrid.pattern"][::2]) if one == "*"],
    },
    biases=_ATTENTION_BIAS | _MLP_BIAS,
    rope=Rope(percent=0.5, partial=True),
    pattern=Pattern(attention="attn_layer_indices", two_blocks=True),
    ignored_keys=(*_HYBRID_IGNORED, "mamba_chunk_size", "layers_block_type", "layer_types"),
    required={
        "hidden_act": _SILU,
        "partial_rotary_factor": ((None, 0.5), "it must be in rope_parameters; the modelling file assumes 0.5"),
    },
    refusals=(
        (
            lambda v: v["_rotary_dim_given"] not in (None, v["_rotary_dim"]),
            "attn_rotary_emb={_rotary_dim_given!r} is not supported: the rotary part of a head is {_rotary_dim}",
        ),
    ),
)
_UNBIASED = (None, False), "projections with biases are not mapped"
_FALCON_H1 = Family(
    model_type="falcon_h1",
    fields={"_widening": Key("mamba_expand", 2, "positive"), "_inner": Key("mamba_d_ssm", 1024, "nullable")}
    | {name: source for name, source in (_DECODER | _MIXER | _TWO_BLOCK_MIXER).items() if name != "_expand"}
    | {name: Key(name.rpartition(".")[2], 1.0, "real", null=1.0) for name in _PARALLEL_FACTORS}
    | _keys(vocab_size=128000, num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=8192)
    | {
        "mamba_head_dim": Key("mamba_d_head", lambda v: _falcon_width(v) // v["mamba_num_heads"], "auto"),
        "hybrid.gated_norm": Key("mamba_rms_norm", False, "flag"),
        "_gates_last": Key("mamba_norm_before_gate", True, "flag"),
        "extensions.ssm_multipliers": Key("ssm_multipliers", None, "any"),
        "extensions.mlp_multipliers": Key("mlp_multipliers", None, "any"),
    },
    tensors=_BAMBA.tensors,
    blocks_per_layer=2,
    written=_LIMITS_WRITTEN
    | {
        "num_hidden_layers": lambda v: v["num_layers"] // 2,
        "mamba_d_ssm": lambda v: v["mamba_num_heads"] * v["mamba_head_dim"],
        "mamba_norm_before_gate": lambda v: False,
    },
    pattern=Pattern(allowed="P", others="P", two_blocks=True),
    ignored_keys=(
        *_HYBRID_IGNORED, "mamba_chunk_size", "layers_block_type", "layer_types", "mlp_expansion_factor",
        "mamba_use_mlp", "attn_layer_indices",  # the modelling file reads neither: every layer has all three
    ),
    required={
        "hidden_act": _SILU,
        **dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), _UNBIASED),
        "sliding_window": ((None,), "the modelling file has no sliding windows"),
    },
    refusals=(
        (
            lambda v: v["hybrid.gated_norm"] and v["_gates_last"],
            "mamba_norm_before_gate=True with mamba_rms_norm=True is not supported: the norm comes after the gate here",
        ),
        (
            lambda v: v["mamba_num_heads"] * v["mamba_head_dim"] != _falcon_width(v),
            "{mamba_num_heads} heads of {mamba_head_dim} are not the mixer's width (mamba_d_ssm or mamba_expand)",
        ),
    ),
)  # fmt: skip
_GRANITE_MOE_HYBRID = Family(
    model_type="granitemoehybrid",
    fields=_DECODER
    | _MIXER
    | _TWO_BLOCK_MIXER
    | {
        "ffn_hidden_size": Key("shared_intermediate_size", 1024),
        "_position": Key("position_embedding_type", None, "any"),
        "position_embedding": lambda v: "rope" if v["_position"] == "rope" else "none",
        "moe_shared_expert_intermediate_size": _same("ffn_hidden_size"),
    }
    | _GRANITE_FACTORS
    | _GRANITE_EXPERTS,
    tensors=_OUTER
    | _ATTENTION
    | {
        "norm": "input_layernorm",
        "mixer": "mamba",
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "shared_mlp.input_linear",
        "mlp.linear_fc2": "shared_mlp.output_linear",
        "mlp.shared_experts.linear_fc1": "shared_mlp.input_linear",
        "mlp.shared_experts.linear_fc2": "shared_mlp.output_linear",
    }
    | _GRANITE_EXPERT_TENSORS,
    is_written=False,
    blocks_per_layer=2,
    marks=("shared_mlp.",),
    biases=_ATTENTION_BIAS,
    pattern=Pattern(types=("layer_types", "layers_block_type"), allowed="M*", two_blocks=True),
    ignored_keys=(*_HYBRID_IGNORED, "mamba_chunk_size", "init_method"),
    required={
        "hidden_act": _SILU,
        "normalization_function": ((None, "rmsnorm"), "the modelling file has RMS norms only"),
        "position_embedding_type": ((None, "rope", "nope"), "supported are rope and null"),
    },
    required_of_experts=_NO_BIAS_WITH_EXPERTS,
    refusals=(_ONE_EXPERT,),
)

# ---------------------------------------------------------------------- gated delta nets

_DELTA_TYPES = {"linear_attention": 1, "full_attention": 0}
_DELTA = {
    "experimental_attention_variant": "gated_delta_net",
    "attention_output_gate": True,
    "qk_layernorm": True,
    "layernorm_zero_centered_gamma": True,
    **_keys(head_dim=256, max_position_embeddings=32768),
    "linear_conv_kernel_dim": Key("linear_conv_kernel_dim", 4),
    "linear_key_head_dim": Key("linear_key_head_dim", 128),
    "linear_value_head_dim": Key("linear_value_head_dim", 128),
    "linear_num_key_heads": Key("linear_num_key_heads", 16),
    "linear_num_value_heads": Key("linear_num_value_heads", 32),
    "_interval": Key("full_attention_interval", 4),
    "_types": Key("layer_types", None, "any"),
    "linear_attention_freq": lambda v: [
        _DELTA_TYPES.get(one, 0)
        for one in v["_types"]
        or [list(_DELTA_TYPES)[(layer + 1) % v["_interval"] == 0] for layer in range(v["num_layers"])]
    ],
}
_DELTA_TENSORS = {
    f"self_attention.{name}": f"linear_attn.{named}"
    for name, named in {
        "conv1d": "conv1d", "dt_bias": "dt_bias", "A_log": "A_log", "out_norm": "norm", "out_proj": "out_proj",
    }.items()
}  # fmt: skip
_DELTA_REFUSALS = (
    (
        lambda v: v["_types"] is not None and not set(v["_types"]) <= _DELTA_TYPES.keys(),
        "layer_types={_types} is not supported: known are linear_attention and full_attention",
    ),
    (
        lambda v: len(v["linear_attention_freq"]) != v["num_layers"],
        "layer_types={_types} is not supported: it must have {num_layers} entries",
    ),
    (
        lambda v: v["linear_num_value_heads"] % v["linear_num_key_heads"] != 0,
        "{linear_num_value_heads} value heads cannot share {linear_num_key_heads} key heads evenly",
    ),
)
_DELTA_WRITTEN: dict[str, Derived] = {
    "layer_types": lambda v: [list(_DELTA_TYPES)[1 - one] for one in v.get("linear_attention_freq", ())]
}
_QWEN3_5 = Family(
    model_type="qwen3_5_text",
    fields=_DECODER | _keys(num_key_value_heads=4) | _DELTA,
    tensors=_LLAMA_TENSORS
    | _DELTA_TENSORS
    | {
        "self_attention.in_proj": (
            *("linear_attn.in_proj_qkv",) * 3,
            *(f"linear_attn.in_proj_{part}" for part in "zba"),
        )
    },
    marks=("linear_attn.in_proj_qkv.",),
    ignored_tensors=("mtp.",),
    written=_DELTA_WRITTEN,
    biases=_ATTENTION_BIAS,
    rope=Rope(percent=0.25, partial=True),
    ignored_keys=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    refusals=_DELTA_REFUSALS,
)
_DELTA_EXPERTS = {
    **_keys(num_key_value_heads=2, moe_intermediate_size=512),
    "moe_shared_expert_intermediate_size": Key("shared_expert_intermediate_size", 512),
    "moe_shared_expert_gate": True,
}
_SHARED_QWEN_EXPERTS = {name: named for name, named in _QWEN2_MOE.tensors.items() if name.startswith("mlp.shared")}
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_type="qwen3_5_moe_text",
    fields={"_normalised": True}
    | _QWEN3_5.fields
    | EXPERTS
    | _SOFTMAX_ROUTER
    | _DELTA_EXPERTS
    | _keys(num_experts=256, num_experts_per_tok=8)
    | {"ffn_hidden_size": Key("moe_intermediate_size", 512)},
    tensors=_QWEN3_5.tensors | _GATED_EXPERTS | _SHARED_QWEN_EXPERTS,
    marks=(),  # those of the dense models
    ignored_keys=(*_QWEN3_5.ignored_keys, *_ROUTER_LOSSES, "intermediate_size"),  # every layer has experts
    renamed_keys={"num_local_experts": "num_experts"},
    required_of_experts=_NO_BIAS_WITH_EXPERTS,
    refusals=(*_DELTA_REFUSALS, _ONE_EXPERT),
)
_QWEN3_NEXT = replace(
    _QWEN3_5,
    model_type="qwen3_next",
    fields=_QWEN3_5.fields
    | _QWEN_MOE
    | _DELTA_EXPERTS
    | _keys(num_experts=512, num_experts_per_tok=10, norm_topk_prob=True),
    tensors=_QWEN3_5.tensors
    | _GATED_EXPERTS
    | _SHARED_QWEN_EXPERTS
    | {"self_attention.in_proj": (*("linear_attn.in_proj_qkvz",) * 4, *("linear_attn.in_proj_ba",) * 2)},
    by_key_head=("self_attention.in_proj",),
    marks=("linear_attn.in_proj_qkvz.",),
    written=_DELTA_WRITTEN | _NORMALISED | _DENSE_LAYERS,
    ignored_keys=(*_QWEN3_5.ignored_keys, *_ROUTER_LOSSES),
    renamed_keys={"num_local_experts": "num_experts"},
    required_of_experts=_NO_BIAS_WITH_EXPERTS,
    refusals=(*_DELTA_REFUSALS, _ONE_EXPERT),
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "SmolLM3ForCausalLM": _SMOLLM3,
    "GemmaForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma2ForCausalLM": _GEMMA2,
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO3,
    "Exaone4ForCausalLM": _EXAONE4,
    "Glm4ForCausalLM": _GLM4,
    "MiniMaxM2ForCausalLM": _MINIMAX_M2,
    "MixtralForCausalLM": _MIXTRAL,
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "GptOssForCausalLM": _GPT_OSS,
    "ExaoneMoeForCausalLM": _EXAONE_MOE,
    "ExaoneMoEForCausalLM": _EXAONE_MOE,  # K-EXAONE's spelling
    "HYV3ForCausalLM": _HY_V3,
    "Dots1ForCausalLM": _DOTS1,
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_MoeForCausalLM": _ERNIE_MOE,
    "NemotronForCausalLM": _NEMOTRON,
    "MiMoForCausalLM": _MIMO,
    "MiMoV2FlashForCausalLM": _MIMO_V2_FLASH,
    "BailingMoeV2ForCausalLM": _BAILING_MOE_V2,
    "SarvamMoEForCausalLM": _SARVAM_MOE,
    "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": _GLM4_MOE_LITE,
    "SarvamMLAForCausalLM": _SARVAM_MLA,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "DeepseekV32ForCausalLM": _DEEPSEEK_V32,
    "GlmMoeDsaForCausalLM": _GLM_MOE_DSA,
    "Qwen2MoeForCausalLM": _QWEN2_MOE,
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "OlmoeForCausalLM": _OLMOE,
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": _GRANITE_MOE_HYBRID,
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "BambaForCausalLM": _BAMBA,
    "FalconH1ForCausalLM": _FALCON_H1,
    "NemotronHForCausalLM": _NEMOTRON_H,
    "Mamba2ForCausalLM": _MAMBA2,
    "Phi3ForCausalLM": _PHI3,
    "GPT2LMHeadModel": _GPT2,
}
"""By the architecture that config.json names."""

OF_TEXT_AND_IMAGES = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
}
"""Architecture with an image tower -> that of its language model, which is served alone. Of text the three positions of
an mrope are equal, so that it is a rope."""

_LLAMA4 = (
    "its layers with rotation attend within chunks and norm queries and keys after it, the others scale queries by "
    "their position, which SelfAttention does not"
)
REFUSED = {
    "DeciLMForCausalLM": "its layers have different shapes, which no model description says; give a live model",
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "Gemma4ForCausalLM": "its layers have embeddings of their own, and heads of another size where there is no window",
    "Step3p5ForCausalLM": "its layers with a window have other numbers of heads than the others, and heads have gates",
    "DeepseekV4ForCausalLM": "megatron-core has no attention of its variant (dsv4_hybrid)",
    "Zamba2ForCausalLM": "its attention blocks are shared between layers, adapted by LoRA and fed the embedding beside "
    "the hidden state, which MambaModel does not do",
    "ZambaForCausalLM": "its attention blocks are shared between layers and its mixers are Mamba-1",
    "JambaForCausalLM": "its mixers are Mamba-1",
    "MambaForCausalLM": "its mixers are Mamba-1",
    "FalconMambaForCausalLM": "its mixers are Mamba-1",
}
"""Architecture -> why it is refused."""

MODEL_TYPES = {family.model_type: name for name, family in FAMILIES.items()} | {
    "zamba2": "Zamba2ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}
"""model_type of a config.json that names no architecture -> the architecture."""


def family_of(description: ModelDescription) -> Family:
    """The row of a description. An architecture without a row, such as megatron-core's own, has Llama's, or with latent
    attention DeepSeek-V3's."""
    is_latent = bool(description.transformer.get("multi_latent_attention"))
    return FAMILIES.get(description.architecture, _DEEPSEEK_V3 if is_latent else _LLAMA)


def is_hf_name(name: str) -> bool:
    """Whether a tensor's name is a Hugging Face one rather than megatron-core's."""
    return not name.startswith(("embedding.", "decoder.", "output_layer."))


def architecture_named_by(names: Iterable[str]) -> str | None:
    """The architecture whose `Family.marks` occur in tensor names. None: the names may be Llama's."""
    text = "\n".join(names)
    return next((name for name, family in FAMILIES.items() if any(mark in text for mark in family.marks)), None)


def name_in_files(name: str, description: ModelDescription) -> str:
    """A tensor's name in the family's files: models in memory call the body `model`, files may use another prefix."""
    base = family_of(description).base
    return f"{base}.{name.removeprefix('model.')}" if name.startswith("model.") else name
