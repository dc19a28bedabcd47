"""Loss functions of the Tinker API: each is a sum over the tokens of a datum.

Source: the formulas of the API's documentation. Legend: x log probabilities of the targets [tokens], with gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_infer.errors import RequestError, check_known, unknown_name

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]


class LossFunction(NamedTuple):
    compute: Callable[[Tensor, Inputs, Settings], Tensor]
    inputs: tuple[str, ...]
    """Tensors that a datum has besides target_tokens, one number a token."""
    settings: Mapping[str, float | None]
    """loss_fn_config and its defaults; None: it has to be given."""


def _cross_entropy(x: Tensor, given: Inputs, _: Settings) -> Tensor:
    return -(x * given["weights"]).sum()


def _ratio(x: Tensor, given: Inputs) -> Tensor:
    return torch.exp(x - given["logprobs"])


def _importance_sampling(x: Tensor, given: Inputs, _: Settings) -> Tensor:
    return -(_ratio(x, given) * given["advantages"]).sum()


def _clipped(ratio: Tensor, how: Settings) -> Tensor:
    return ratio.clamp(how["clip_low_threshold"], how["clip_high_threshold"])


def _ppo(x: Tensor, given: Inputs, how: Settings) -> Tensor:
    ratio, advantages = _ratio(x, given), given["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, how) * advantages).sum()


def _cispo(x: Tensor, given: Inputs, how: Settings) -> Tensor:
    return -(_clipped(_ratio(x, given), how).detach() * x * given["advantages"]).sum()


def _dro(x: Tensor, given: Inputs, how: Settings) -> Tensor:
    return -(x * given["advantages"] - 0.5 * how["beta"] * (x - given["logprobs"]).square()).sum()


def _gspo(x: Tensor, given: Inputs, how: Settings) -> Tensor:
    """The ratio of a sequence, with each token's own gradient (GSPO-token, arXiv:2507.18071)."""
    mean = (x.detach() - given["logprobs"])[given["sequence_ratio_mask"] != 0].mean()
    ratio, advantages = torch.exp(mean + x - x.detach()), given["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, how) * advantages).sum()


_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_POLICY = ("logprobs", "advantages")

LOSSES = {
    "cross_entropy": LossFunction(_cross_entropy, ("weights",), {}),
    "importance_sampling": LossFunction(_importance_sampling, _POLICY, {}),
    "ppo": LossFunction(_ppo, _POLICY, _CLIPS),
    "cispo": LossFunction(_cispo, _POLICY, _CLIPS),
    "gspo": LossFunction(_gspo, (*_POLICY, "sequence_ratio_mask"), dict.fromkeys(_CLIPS)),
    "dro": LossFunction(_dro, _POLICY, {"beta": 0.05}),
}

HOSTED = {
    "stable_reinforce": "the hosted service computes it from records of its samples (record_stability_info)",
    "custom": "the hosted service runs code of create_custom_loss; give forward_backward_custom a function of yours",
}
"""Losses of the API that are not computed here, and why."""


def loss_named(name: str) -> LossFunction:
    """Raises RequestError for a name that is not of LOSSES."""
    if name not in LOSSES:
        why = f"{name} is not supported: {HOSTED[name]}" if name in HOSTED else unknown_name("loss", name, LOSSES)
        raise RequestError(f"loss_fn: {why}; one of {', '.join(LOSSES)}")
    return LOSSES[name]


def settings_of(function: LossFunction, given: Mapping[str, float]) -> dict[str, float]:
    """loss_fn_config with defaults. Raises RequestError for a name that the function does not have, and for a missing
    one."""
    check_known("setting", given, function.settings, error=RequestError, where="loss_fn_config: ")
    found = {name: given.get(name, default) for name, default in function.settings.items()}
    if missing := [name for name, value in found.items() if value is None]:
        raise RequestError(f"loss_fn_config: {missing[0]} is missing, for which this loss has no default")
    return {name: value for name, value in found.items() if value is not None}
