"""What some families have and TransformerConfig cannot say: norms, caps, a scale, a second rope. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """Each field is off by default."""

    norms: Literal["before", "both", "after"] = "before"
    """Where attention and MLP have their norm: before them, after them (before the residual is added), or both."""
    whole_head_norms: bool = False
    """The norms of queries and keys (`qk_layernorm`) run over all heads together, not over each."""
    embedding_scale: float | None = None
    """Multiplies embeddings. It is rounded to their dtype first, as transformers does."""
    attention_softcap: float | None = None
    """c: the softmax takes c * tanh(score / c)."""
    logit_softcap: float | None = None
    """c: logits are c * tanh(logit / c)."""
    local_rotary_base: float | None = None
    """The base of a second rope, unscaled, for the layers with a window."""
    local_query_groups: int | None = None
    """KV heads of the layers with a window; None: as many as of the others."""
    local_sinks: bool = False
    """Only the layers with a window have the sinks of `softmax_type`."""
    value_dim: int | None = None
    """Width of a value; None: that of a key."""
    value_scale: float = 1.0
    """Multiplies values."""
    index_interleaved: bool = False
    """The indexers of sparse attention turn neighbouring dims, else dim i with dim i + half."""
    index_norm_epsilon: float | None = None
    """Of the norm of index keys; None: that of the layers' norms."""
    index_shared: tuple[bool, ...] = ()
    """Which layers attend to the keys that the indexer of an earlier layer chose, and have none; () none."""
    softmax_scores: bool = False
    """Routers add their correction bias to softmax scores, which the config calls sigmoid scores."""
    embedding_multiplier: float = 1.0
    """Multiplies embeddings, not rounded."""
    lm_head_multiplier: float = 1.0
    """Multiplies logits."""
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    """Of parallel layers: multiply keys, the input and the output of attention."""
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    """Of parallel layers: multiply the input and the output of the mixer."""
    ssm_multipliers: tuple[float, ...] = (1.0,) * 5
    """Of parallel layers: multiply the parts z, x, B, C and dt of what the mixer's first projection gives."""
    mlp_multipliers: tuple[float, ...] = (1.0,) * 2
    """Multiply the gate of an MLP before its activation, and the output of the MLP."""

    def __post_init__(self) -> None:
        for name, length in (("index_shared", None), ("ssm_multipliers", 5), ("mlp_multipliers", 2)):
            values = tuple(getattr(self, name) or (1.0,) * (length or 0))  # JSON has lists, and null
            if length not in (None, len(values)):
                raise ValueError(f"{name} has {len(values)} numbers, it must have {length}")
            object.__setattr__(self, name, values)

    @property
    def mixes_heads(self) -> bool:
        """Whether layers differ in their heads, or keys and values do."""
        names = ("local_query_groups", "local_sinks", "value_dim", "value_scale")
        return replace(self, **{name: getattr(Extensions(), name) for name in names}) != self

    def has_only(self, names: Iterable[str]) -> bool:
        """Whether no other field than these is on."""
        return self == replace(Extensions(), **{name: getattr(self, name) for name in names})


OF_INDEXERS = ("index_interleaved", "index_norm_epsilon", "index_shared")
MULTIPLIERS = tuple(one.name for one in fields(Extensions) if "_multiplier" in one.name)
"""Falcon-H1's factors, by the names that its config and Megatron-Bridge's have for them."""


def extensions_of(config: Any) -> Extensions:
    """Those of a TransformerConfig; all off where it has none."""
    found = getattr(config, "extensions", None)
    return found if isinstance(found, Extensions) else Extensions()


def multipliers_of(config: Any) -> Extensions:
    """The factors of a TransformerConfig that has `Extensions`, or of Megatron-Bridge's config of Falcon-H1; all 1 of
    another."""
    found = extensions_of(config)
    if found == Extensions() and hasattr(config, "key_multiplier"):
        return Extensions(**{name: getattr(config, name) for name in MULTIPLIERS})
    return found
