"""Errors after which ranks that compute together cannot go on together."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch.distributed as dist

from megatron_infer.errors import InferenceError, LockstepError, OtherRankFailed, RankFailure

_GLOO = re.compile(r"/gloo/|caused pair closure")


class StageLost(InferenceError, RuntimeError):
    """A pipeline stage cannot be reached: its process has ended, or did not answer within its group's timeout."""


class CollectiveAbandoned(InferenceError, RuntimeError):
    """This rank raised in the middle of a step that it computes with other ranks: they wait for it in a collective."""


def has_abandoned_collective(error: BaseException) -> bool:
    """Whether other ranks wait for this one in a collective, and can do nothing else."""
    return any(isinstance(one, CollectiveAbandoned) for one in causes(error))


def mark_shared(error: BaseException) -> None:
    """All ranks that compute together know of the error, and raise too."""
    vars(error)["is_shared"] = True


def is_shared(error: BaseException) -> bool:
    """Whether all ranks that compute together raise, this error or one that names its rank."""
    return isinstance(error, RankFailure | LockstepError | OtherRankFailed) or vars(error).get("is_shared", False)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or on top of, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def is_of_collective(error: BaseException) -> bool:
    """Whether the error comes from torch.distributed, itself or by its cause.

    The group cannot be used any more then: its ranks are at different places, and gloo closes a connection that timed
    out. gloo raises plain RuntimeErrors of many wordings: what counts is where an error comes from, or that its text
    names gloo, as the errors of a work's wait() do. An error raised by a function that torch.distributed has called
    comes from that function.
    """
    return any(_is_of_collective(found) for found in causes(error))


def _is_of_collective(error: BaseException) -> bool:
    if isinstance(error, StageLost | dist.DistError):
        return True
    if type(error) is RuntimeError and _GLOO.search(str(error)):
        return True
    frame, within = error.__traceback__, False
    while frame is not None:
        module = frame.tb_frame.f_globals.get("__name__", "")
        within = module.startswith("torch.distributed.") or (within and module.startswith("torch."))
        frame = frame.tb_next
    return within
