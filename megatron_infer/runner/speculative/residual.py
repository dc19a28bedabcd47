"""Rejection sampling: drafts are kept as often as two distributions allow, and tokens follow the model's.

A draft x, drawn from the draft model's distribution q, is kept with probability min(1, p(x) / q(x)), where p is what
the model draws from at that place. Else the token is drawn from max(0, p - q), scaled to a sum of 1. What comes out
follows p (Leviathan et al., arXiv:2211.17192). With `same_tokens` one random number makes the draft and the draw; here
a draft, its test and the token in its place each have a number of their own, so other tokens come out than one by one.

A kept draft is written as the drawn token, one that was not as another token: the verifier compares as always.
Legend: S drawn positions of a step, N drafts, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.runner.sampling.draw_groups import make_draw_group
from megatron_infer.runner.sampling.filters import DrawResult
from megatron_infer.runner.sampling.returned_details import TOKEN_DETAILS
from megatron_infer.runner.sampling.rng import uniform
from megatron_infer.runner.sampling.row_params import RowFlags
from megatron_infer.runner.sampling.sampler import Sampler, SamplerInput, SamplerOutput

_TEST, _INSTEAD = np.uint64(0x8CB92BA72F3D8DD7), np.uint64(0xA24BAED4963EE407)
"""Change a request's seed to that of its tests and of the tokens in the place of drafts."""
_BELOW_ONE = 1.0 - 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """A step's drafts with the distributions that they were drawn from."""

    places: np.ndarray
    """[N] number of the draw, among those of the step, that verifies each."""
    token_N: Tensor
    probs_NV: Tensor
    """fp32; of greedy rows without a meaning."""
    bad_N: Tensor
    """The draft model's logits were not finite: its token is a guess without a distribution."""


class DraftSampler(Sampler):
    """Draws drafts as the model's sampler would; gives neither log probabilities nor details."""

    kept: list[tuple[Tensor, Tensor]] | None = None
    """(distributions fp32 [R, V], bad [R]) of each call since it was emptied; None: they are not kept."""

    def flags_of(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return super().flags_of(rows, positions) & ~int(RowFlags.LOGPROBS | TOKEN_DETAILS)

    def _output(self, logits_SV: Tensor, inputs: SamplerInput, drawn: DrawResult, bad_S: Tensor) -> SamplerOutput:
        if self.kept is not None:
            self.kept.append((_probs(self, np.arange(len(inputs.rows)), logits_SV, inputs, drawn), bad_S))
        return super()._output(logits_SV, inputs, drawn, bad_S)


class ResidualSampler(Sampler):
    """Draws what verifies drafts by rejection, and everything else as `Sampler` does."""

    def __init__(self, *args: Any, proposals: Callable[[], Proposals | None], **kwargs: Any) -> None:
        """proposals: those of the step that is drawn; None: it has none."""
        super().__init__(*args, **kwargs)
        self._proposals = proposals

    def _output(self, logits_SV: Tensor, inputs: SamplerInput, drawn: DrawResult, bad_S: Tensor) -> SamplerOutput:
        found = self._proposals()
        if found is not None:
            is_random = self.flags_of(inputs.rows, inputs.positions)[found.places] & RowFlags.DRAW
            if len(chosen := np.flatnonzero(is_random)):  # a greedy row keeps what equals its argmax
                self._verify(found, chosen, logits_SV, inputs, drawn, bad_S)
        return super()._output(logits_SV, inputs, drawn, bad_S)

    def _verify(
        self,
        found: Proposals,
        chosen: np.ndarray,
        logits_SV: Tensor,
        inputs: SamplerInput,
        drawn: DrawResult,
        bad_S: Tensor,
    ) -> None:
        """Replace the tokens drawn at the places of the chosen drafts."""
        stage, places, at_N = self.ops.to_device, found.places[chosen], self.ops.to_device(chosen)
        places_N = stage(places)
        token_N, q_NV = found.token_N.index_select(0, at_N), found.probs_NV.index_select(0, at_N)
        p_NV = _probs(self, places, logits_SV, inputs, drawn)
        seeds, positions = self.params.seed[inputs.rows[places]], inputs.positions[places]
        test_N, instead_N = (stage(uniform(seeds ^ stream, positions)) for stream in (_TEST, _INSTEAD))
        p_N, q_N = (probs.gather(1, token_N.unsqueeze(1)).squeeze(1).double() for probs in (p_NV, q_NV))
        cumulative_NV = (p_NV - q_NV).clamp_(min=0.0).cumsum(-1, dtype=torch.float64)
        rest_N = cumulative_NV[:, -1]
        target_N1 = (instead_N.clamp(max=_BELOW_ONE) * rest_N).unsqueeze(1)
        other_N = torch.searchsorted(cumulative_NV, target_N1, right=True).squeeze(1)
        keeps_N = (test_N * q_N < p_N) | (rest_N <= 0.0)
        token_N = torch.where(keeps_N, token_N, other_N.clamp_(max=self.vocab_size - 1))
        unknown_N = found.bad_N.index_select(0, at_N) | bad_S.index_select(0, places_N)
        token_N = torch.where(unknown_N, drawn.token_M.index_select(0, places_N), token_N)
        drawn.token_M = drawn.token_M.index_copy(0, places_N, token_N)
        drawn.own_M = drawn.raw_M = None  # they were of the tokens before


def _probs(sampler: Sampler, places: np.ndarray, logits_SV: Tensor, inputs: SamplerInput, drawn: DrawResult) -> Tensor:
    """The distributions that the draws at `places` are made from, fp32 [N, V]."""
    flags = sampler.flags_of(inputs.rows, inputs.positions)
    group = make_draw_group(sampler.params, inputs.rows, flags, places, sampler.ops)
    temperature = sampler.params.table[0, inputs.rows[places]]
    temperature[(flags[places] & RowFlags.DRAW) == 0] = 1.0
    temperature_N = sampler.ops.to_device(temperature)
    return group.drawn_from(group.take(logits_SV), inputs, drawn, temperature_N).softmax(-1)
