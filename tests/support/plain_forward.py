"""The full forward of a built GPTModel, as training runs it: no cache, no paging; and outputs held against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from unittest import mock

import torch
from torch import Tensor, nn

from megatron_infer.outputs.request_output import RequestOutput


def full_logits(model: nn.Module, ids: list[int]) -> Tensor:
    """[len(ids), padded vocabulary] in fp32. MTP layers are left out: megatron-core's forward asks for labels then."""
    tokens = torch.tensor([ids])
    positions = torch.arange(len(ids))[None]
    with torch.inference_mode(), ExitStack() as patches:
        if getattr(getattr(model, "config", None), "mtp_num_layers", None):
            patches.enter_context(mock.patch.object(model.config, "mtp_num_layers", None))
            patches.enter_context(mock.patch.object(model, "mtp_process", False))
        return model(tokens, positions, None)[0].float()


def worst_error(
    outputs: Iterable[RequestOutput], logits_of: Callable[[list[int]], Tensor], *, greedy: bool = True
) -> float:
    """The largest difference to log probabilities of a full forward `logits_of`; infinite for another greedy token, and
    for what is no number."""
    worst = 0.0
    for output in outputs:
        for one in output.outputs:
            logits = logits_of(output.prompt_token_ids + one.token_ids)[len(output.prompt_token_ids) - 1 : -1].float()
            if greedy and logits.argmax(-1).tolist() != one.token_ids:
                return float("inf")
            for row, token, entry in zip(logits.log_softmax(-1), one.token_ids, one.logprobs, strict=True):
                error = abs(entry[token].logprob - float(row[token]))
                worst = max(worst, float("inf") if math.isnan(error) else error)
    return worst
