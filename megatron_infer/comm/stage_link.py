"""What travels between the stages of a pipeline.

    stage 0 ──residual stream──▶ stage 1 ──▶ ... ──▶ last stage      one message a step and boundary
       ▲                            ▲                     │
       └────────── drawn ───────────┴─────────────────────┘          tokens, and logprobs where somebody asked

What a step sends has a size that both ends know from its plan, so nobody waits to hear how much is coming; a stage that
failed sends as much as one that did not, and says so, so that nobody waits in vain either. No pickle.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.comm.backends import backend_on
from megatron_infer.errors import InferenceError

_T = TypeVar("_T")
_HIDDEN, _DRAWN, _EXTRA = 1, 2, 3
"""Message tags, where the backend has tags."""
FAILED = -1


class StageLost(InferenceError, RuntimeError):
    """A pipeline stage could not be reached: its process ended, or did not answer in its group's time."""


class BrokenOff(InferenceError, RuntimeError):
    """This rank raised in the middle of what it computes together with others, and they wait for it in a collective."""


def is_broken_off(error: BaseException) -> bool:
    """Whether the ranks that this one computes with wait for it, and can do nothing else."""
    return any(isinstance(one, BrokenOff) for one in causes(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or on top of, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def is_of_collective(error: BaseException) -> bool:
    """Whether the error comes from torch.distributed, itself or by its cause.

    The group is of no use then: its ranks are at different places, and gloo closes a connection that timed out. gloo
    raises plain RuntimeErrors of many wordings, so what counts is where an error comes from.
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


@dataclass(frozen=True, slots=True)
class Message:
    """What the last stage tells the others of a step."""

    tokens: np.ndarray
    """int64 [S]; -1 where nothing could be drawn."""
    failed_stage: int | None
    extra: Sequence[np.ndarray] = ()
    """Logprobs and prompt scores, where somebody asked for them."""


class OrderedThread:
    """A thread that carries out what it is given, in that order: for a CPU what a stream is for a device.

    It ends with the process; an idle one waits for work only.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, action: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._work.put((future, action))
        return future

    def _run(self) -> None:
        while True:
            future, action = self._work.get()
            try:
                future.set_result(action())
            except BaseException as error:  # whoever reads the future gets it
                future.set_exception(error)
            del future, action  # an idle thread holds no tensors


class _Pending(NamedTuple):
    """A message on its way to or from a stage."""

    work: Any
    stage: int
    limit: timedelta | None


class StageLink:
    """One rank's ends of the pipeline: its neighbours, and the last stage. Sends are asynchronous, in order."""

    def __init__(self, group: dist.ProcessGroup, *, hidden_size: int, device: torch.device, timeout_s: float) -> None:
        """group: the ranks that hold this rank's share of the stages, first stage first. timeout_s: how long a message
        may take once it is waited for, over gloo (NCCL has its own watchdog, and a wait on the host would stall it).

        What was drawn goes from host to host, over gloo: a group of its own if `group` has none for the host, which all
        of its members make here.
        """
        self.rank, self.num_stages = group.rank(), group.size()
        self.is_first, self.is_last = self.rank == 0, self.rank == self.num_stages - 1
        self._ranks = dist.get_process_group_ranks(group)
        self._group, self._device, self._hidden_size = group, device, hidden_size
        limit = timedelta(seconds=timeout_s)
        # gloo's sends and receives go by the group's own timeout, which cannot be lowered: they are told each time
        self._limits = {"cpu": limit, device.type: limit if backend_on(group, device.type) == "gloo" else None}
        gloo = backend_on(group, "cpu") == "gloo"
        self._host_group = group if gloo else dist.new_group(self._ranks, "gloo", use_local_synchronization=True)
        self._sent: deque[tuple[_Pending, Tensor]] = deque()

    def compare(self, numbers: Sequence[int]) -> np.ndarray:
        """Everyone's numbers, int64 [stages, len(numbers)]; all stages call it."""
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        everyones = [torch.empty_like(mine) for _ in range(self.num_stages)]
        dist.all_gather(everyones, mine, group=self._host_group)
        found: np.ndarray = torch.stack(everyones).numpy()
        return found

    # ------------------------------------------------------------------ stage to stage

    def nothing_received(self, num_tokens: int) -> Tensor:
        """Zeros in the place of a residual stream."""
        return torch.zeros(num_tokens, self._hidden_size, device=self._device)

    def receive(self, num_tokens: int, *, notes: int = 0) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(residual stream of the stage before, fp32 [T, D]; its notes, fp32 [T, notes]; the stage that failed, [1]).

        notes: numbers that come with each token. None: there is no stage before. The first stage that failed is FAILED
        where none did; the residual stream is zeros then. On a GPU nobody waits: what is received is ordered on the
        stream, the failure is a number on the device like the others. gloo's receive waits for the stage before.
        """
        if self.is_first:
            return None, None, None
        split = num_tokens * self._hidden_size
        buffer = torch.empty(split + num_tokens * notes + 1, device=self._device)
        self._wait(self._irecv(buffer, self.rank - 1, self._group, _HIDDEN))
        residual_TD = buffer[:split].view(num_tokens, self._hidden_size)
        return residual_TD, buffer[split:-1].view(num_tokens, notes), buffer[-1:]

    def send(
        self,
        residual_TD: Tensor | None,
        num_tokens: int,
        *,
        notes: int = 0,
        notes_TN: Tensor | None = None,
        failed_before: Tensor | None = None,
    ) -> None:
        """Hand the residual stream to the next stage, or word that this one failed (None); does nothing in the last.

        notes, notes_TN: see `receive`; whole numbers below 2**24, which fp32 holds. failed_before: as received.
        """
        if self.is_last:
            return
        split = num_tokens * self._hidden_size
        buffer = torch.empty(split + num_tokens * notes + 1, device=self._device)
        if residual_TD is None:
            buffer.zero_()  # computed with by the stages behind, to no end
            buffer[-1:].fill_(self.rank)
        else:
            buffer[-1:].fill_(FAILED)
            buffer[:split].view(num_tokens, self._hidden_size).copy_(residual_TD)
        if failed_before is not None:
            torch.where(failed_before == FAILED, buffer[-1:], failed_before, out=buffer[-1:])
        if notes_TN is not None:
            buffer[split:-1].view(num_tokens, notes).copy_(notes_TN)
        self._post(buffer, self.rank + 1, self._group, _HIDDEN)

    # ------------------------------------------------------------------ last stage to all

    def send_drawn(self, message: Message) -> None:
        """Tell every other stage of a step; the last stage does, once for each step it was sent."""
        extra = _pack(message.extra)
        failed = FAILED if message.failed_stage is None else message.failed_stage
        head = torch.from_numpy(np.concatenate([np.array([failed, len(extra)], dtype=np.int64), message.tokens]))
        tail = torch.frombuffer(bytearray(extra), dtype=torch.uint8) if extra else None
        for stage in range(self.num_stages - 1):
            self._post(head, stage, self._host_group, _DRAWN)
            if tail is not None:
                self._post(tail, stage, self._host_group, _EXTRA)

    def receive_drawn(self, num_sampled: int) -> Message:
        """What the last stage says of the next step; blocks."""
        last = self.num_stages - 1
        head = torch.empty(num_sampled + 2, dtype=torch.int64)
        self._wait(self._irecv(head, last, self._host_group, _DRAWN))
        failed, num_bytes = head[:2].tolist()
        extra: list[np.ndarray] = []
        if num_bytes:
            tail = torch.empty(num_bytes, dtype=torch.uint8)
            self._wait(self._irecv(tail, last, self._host_group, _EXTRA))
            extra = _unpack(tail.numpy().tobytes())
        return Message(head[2:].numpy(), None if failed == FAILED else failed, extra)

    def _irecv(self, tensor: Tensor, stage: int, group: dist.ProcessGroup, tag: int) -> _Pending:
        return _Pending(
            dist.irecv(tensor, self._ranks[stage], group=group, tag=tag), stage, self._limits[tensor.device.type]
        )

    def _post(self, tensor: Tensor, stage: int, group: dist.ProcessGroup, tag: int) -> None:
        """Send without waiting; a neighbour that falls far behind is waited for."""
        try:
            work = dist.isend(tensor, self._ranks[stage], group=group, tag=tag)
        except RuntimeError as error:
            raise self._lost(stage, error) from error
        self._sent.append((_Pending(work, stage, self._limits[tensor.device.type]), tensor))
        while len(self._sent) > 4 * self.num_stages:
            self._wait(self._sent.popleft()[0])

    def _wait(self, pending: _Pending) -> None:
        try:
            if pending.limit is None:
                pending.work.wait()
            else:
                pending.work.wait(pending.limit)
        except RuntimeError as error:
            raise self._lost(pending.stage, error) from error

    def _lost(self, stage: int, error: RuntimeError) -> StageLost:
        return StageLost(
            f"pipeline stage {stage} (rank {self._ranks[stage]}) cannot be reached from stage {self.rank}: {error}"
        )


def _pack(arrays: Sequence[np.ndarray]) -> bytes:
    if not arrays:
        return b""
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _unpack(content: bytes) -> list[np.ndarray]:
    file, arrays = io.BytesIO(content), []
    while file.tell() < len(content):
        arrays.append(np.load(file, allow_pickle=False))
    return arrays
