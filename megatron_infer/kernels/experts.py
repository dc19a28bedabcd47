"""The protocol for mixture-of-experts layers: all experts of this rank as one call on live weights.

Legend: kernels/base.py, and E experts of all ranks, of which this rank has neighbouring ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_infer.kernels.activations import SWIGLU, Activation, form_of

Parameters = Mapping[str, Tensor | None]
MAX_REMEMBERED = 1024
"""Numbers of tokens that a backend keeps something for."""


class Addresses(NamedTuple):
    """The addresses of one tensor of each expert."""

    table: Tensor
    """int64, on the device."""
    aligned: bool
    """All are multiples of 16 bytes, so that wide loads can be used."""


class ExpertWeights:
    """This rank's experts [first, first + len): fc1, an activation, fc2, read through the modules' own mappings.

    Tables on the device hold their addresses, and are written again when a weight moved.
    """

    def __init__(
        self,
        *,
        fc1: Sequence[Parameters],
        fc2: Sequence[Parameters],
        first: int,
        top_k: int,
        activation: Activation | None,
    ) -> None:
        """activation: between fc1 and fc2, row by row; None: SwiGLU."""
        self._parts = {"fc1": fc1, "fc2": fc2}
        self.num_experts, self.first, self.top_k = len(fc1), first, top_k
        self.activation, self.form = activation, SWIGLU if activation is None else form_of(activation)
        self._tables: dict[tuple[str, str], tuple[tuple[int, ...], Tensor, Addresses]] = {}
        self._seen: tuple[tuple[int, ...], torch.dtype | None, str | None] = ((), None, None)
        self._is_watched = False
        self._known_uneven: tuple[torch.dtype, str | None] | None = None
        self.remembered: dict[Any, Any] = {}
        """What a backend has derived from addresses and shapes, by whatever it likes; empty but for watched weights."""

    def watched(self) -> None:
        """Somebody else looks before each step whether a weight was replaced or moved, and calls this when one may have
        been: until then nothing is compared again. 256 addresses take 30 us, more than the rest of a layer's calls."""
        self._is_watched, self._known_uneven = True, None
        self.remembered.clear()

    def remember(self, key: Any, derived: Any) -> None:
        """Cache what was derived from the weights' addresses until `watched` is called again; unwatched, do nothing."""
        if self._is_watched:
            if len(self.remembered) >= MAX_REMEMBERED:
                self.remembered.clear()
            self.remembered[key] = derived

    def tensors(self, part: str, name: str) -> list[Tensor | None]:
        """Each expert's tensor, by its module's mapping now."""
        return [parameters[name] for parameters in self._parts[part]]

    def shape(self, part: str) -> tuple[int, int]:
        """[outputs, inputs] of an expert's weight."""
        weight = self._parts[part][0]["weight"]
        assert weight is not None
        return weight.shape[0], weight.shape[1]

    def addresses(self, part: str, name: str) -> Addresses | None:
        """The address of each expert's tensor; None where the experts have no such tensor. Does not wait."""
        tensors = self.tensors(part, name)
        if tensors[0] is None:
            return None
        now = tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])
        if (known := self._tables.get((part, name))) is None or known[0] != now:
            host = torch.tensor(now, dtype=torch.int64)
            if tensors[0].device.type == "cuda":
                host = host.pin_memory()
            # The host copy is kept: a graph that captures this reads it in every replay.
            device = host.to(tensors[0].device, non_blocking=True)
            known = self._tables[part, name] = now, host, Addresses(device, not any(number % 16 for number in now))
        return known[2]

    def uneven(self, dtype: torch.dtype) -> str | None:
        """Why one kernel cannot run all experts; None: they have the same shapes, are contiguous and of `dtype`."""
        known = self._known_uneven
        if known is not None and known[0] is dtype:
            return known[1]
        weights = [parameters["weight"] for experts in self._parts.values() for parameters in experts]
        now = tuple([weight.data_ptr() for weight in weights if weight is not None])
        if self._seen[:2] != (now, dtype):
            self._seen = now, dtype, self._look_for_uneven(dtype)
        if self._is_watched:
            self._known_uneven = dtype, self._seen[2]
        return self._seen[2]

    def _look_for_uneven(self, dtype: torch.dtype) -> str | None:
        for part, experts in self._parts.items():
            for name in ("weight", "bias"):
                tensors = [parameters[name] for parameters in experts]
                if all(tensor is None for tensor in tensors):
                    continue
                present = [tensor for tensor in tensors if tensor is not None]
                kinds = {(tensor.shape, tensor.dtype) for tensor in present}
                if len(present) < len(tensors) or len(kinds) > 1 or not all(t.is_contiguous() for t in present):
                    return f"experts that differ in shape or layout of {part}'s {name}"
                if present[0].dtype is not dtype:
                    return f"needs {part}'s {name} in {dtype}, got {present[0].dtype}"
        return None


class RoutingRules(NamedTuple):
    """How a router chooses: arguments of megatron-core's topk_routing_with_score_function, without the bias."""

    top_k: int
    score_function: str
    """"softmax" or "sigmoid"."""
    pre_softmax: bool = False
    """Softmax over all experts, before the choice; else over the chosen ones."""
    num_groups: int = 1
    group_topk: int = 0
    """Experts come from this many groups: those with the highest sums of their best top_k // group_topk scores; 0: from
    all groups."""
    scaling_factor: float = 0.0
    """Factor of all weights; 0: none."""
    rounds_scores: bool = True
    """Scores are rounded to the router's dtype before the choice; else only the weights are."""

    def unroutable(self, num_experts: int) -> str | None:
        """Why no kernel can follow these rules; None: a kernel can."""
        if self.score_function not in ("softmax", "sigmoid"):
            return f"score function {self.score_function!r}"
        if not 1 <= self.top_k <= num_experts:
            return f"top_k {self.top_k} of {num_experts} experts"
        if not self.group_topk:
            return None
        size, best = num_experts // self.num_groups, self.top_k // self.group_topk
        if num_experts % self.num_groups or not 1 <= best <= size or self.group_topk > self.num_groups:
            return f"{self.num_groups} groups of {num_experts} experts"
        return f"{self.group_topk} groups of {size} experts" if self.group_topk * size < self.top_k else None


class ExpertChoice(NamedTuple):
    """The experts of each token, among those of all ranks, the weights of their outputs, and counts for a sort."""

    numbers: Tensor
    """int32: ids, the bits of weights, counts, one behind the other: an allocation for each takes the host longer."""
    num_tokens: int
    top_k: int
    num_runs: int
    num_experts: int

    @property
    def ids_TK(self) -> Tensor:
        """int32, ascending; -1 behind the last expert of a token with fewer than K."""
        return self.numbers[: self.num_tokens * self.top_k].view(self.num_tokens, self.top_k)

    @property
    def weight_TK(self) -> Tensor:
        """fp32, rounded as the router's dtype is."""
        pairs = self.num_tokens * self.top_k
        return self.numbers[pairs : 2 * pairs].view(torch.float32).view(self.num_tokens, self.top_k)

    @property
    def count_CE(self) -> Tensor:
        """int32: how many tokens of each run of tokens chose an expert; the backend knows the length of a run."""
        return self.numbers[2 * self.num_tokens * self.top_k :].view(self.num_runs, self.num_experts)


class ExpertsBackend(Protocol):
    """All of a rank's experts at once, for all tokens that chose them, and the choice itself.

    The launches depend on shapes alone and nothing waits: a step can be captured once and replayed, as long as the
    weights do not move.
    """

    name: str

    def supports(self, weights: ExpertWeights, dtype: torch.dtype) -> str | None:
        """None when it can run them on inputs of this dtype, else the reason."""
        ...

    def choose(self, logits_TE: Tensor, bias_E: Tensor | None, rules: RoutingRules) -> ExpertChoice | None:
        """The choice that megatron-core's router makes for these logits; None: no kernel for these rules or this dtype.

        bias_E: added to sigmoid scores for the choice, but not to weights. The lower id wins among equal scores; NaN
        counts as the largest score. Weights may differ from torch's by rounding.
        """
        ...

    def listed(self, chosen_TE: Tensor, probs_TE: Tensor, top_k: int) -> ExpertChoice:
        """A choice made elsewhere, from chosen_TE (bool, at most top_k per row) and the weights probs_TE."""
        ...

    def token_counts(self, num_experts: int, top_k: int, dtype: torch.dtype) -> Sequence[int]:
        """Numbers of tokens from which on a step runs other kernels than a smaller one. num_experts: of all ranks."""
        ...

    def add(self, x_TD: Tensor, choice: ExpertChoice, weights: ExpertWeights, out_TD: Tensor | None) -> Tensor:
        """The sum over a token's experts on this rank of weight * expert(x), added to out_TD, contiguous, if given."""
        ...
