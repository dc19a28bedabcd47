"""What some families have and TransformerConfig cannot say: norms, caps, a scale, a second rope. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    index_interleaved: bool = False
    """The indexers of sparse attention turn neighbouring dims, else dim i with dim i + half."""
    index_norm_epsilon: float | None = None
    """Of the norm of index keys; None: that of the layers' norms."""
    index_shared: tuple[bool, ...] = ()
    """Which layers attend to the keys that the indexer of an earlier layer chose, and have none; () none."""
    softmax_scores: bool = False
    """Routers add their correction bias to softmax scores, which the config calls sigmoid scores."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "index_shared", tuple(self.index_shared))  # JSON has lists

    @property
    def of_indexers_alone(self) -> bool:
        """Nothing but the fields of indexers is on."""
        off = Extensions()
        return self == replace(
            off,
            index_interleaved=self.index_interleaved,
            index_norm_epsilon=self.index_norm_epsilon,
            index_shared=self.index_shared,
        )


def extensions_of(config: Any) -> Extensions:
    """Those of a TransformerConfig; all off where it has none."""
    found = getattr(config, "extensions", None)
    return found if isinstance(found, Extensions) else Extensions()
