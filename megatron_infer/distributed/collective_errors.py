"""Errors after which ranks that compute together cannot go on together."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from megatron_infer.errors import InferenceError


class StageLost(InferenceError, RuntimeError):
    """A pipeline stage cannot be reached: its process has ended, or did not answer within its group's timeout."""


class CollectiveAbandoned(InferenceError, RuntimeError):
    """This rank raised in the middle of a step that it computes with other ranks: they wait for it in a collective."""


def has_abandoned_collective(error: BaseException) -> bool:
    """Whether other ranks wait for this one in a collective, and can do nothing else."""
    return any(isinstance(one, CollectiveAbandoned) for one in causes(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or on top of, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def is_of_collective(error: BaseException) -> bool:
    """Whether the error comes from torch.distributed, itself or by its cause.

    The group cannot be used any more then: its ranks are at different places, and gloo closes a connection that timed
    out. gloo raises plain RuntimeErrors of many wordings, so what counts is where an error comes from.
    """
    for found in causes(error):
        if isinstance(found, StageLost | dist.DistError):
            return True
        frame = found.__traceback__
        while frame is not None:
            if frame.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed."):
                return True
            frame = frame.tb_next
    return False
