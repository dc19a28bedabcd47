"""Messages between the stages of a pipeline.

    stage 0 ──residual stream──▶ stage 1 ──▶ ... ──▶ last stage      one message a step and boundary
       ▲                            ▲                     │
       ├────────── drafts ──────────┼─────────────────────┤          what a model there drafted for a step, before it
       └────────── result ──────────┴─────────────────────┘          tokens, and logprobs where a request asked

Both ends derive the size of a step's message from its plan, so no size is exchanged first. A stage that failed sends a
message of the same size that says so: no stage waits for a message that never comes. No pickle.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.distributed.backends import backend_on
from megatron_infer.distributed.collective_errors import StageLost
from megatron_infer.outputs.schema import ArrayRecord, decode_arrays, encode_arrays

_T = TypeVar("_T")
_HIDDEN, _TOKENS, _ARRAYS, _DRAFTS = 1, 2, 3, 4
"""Message tags, where the backend has tags."""
NO_FAILURE = -1
"""In the place of a failure's code."""
END_S = 5.0
"""Seconds that the end of the process waits for threads in a wait of gloo, together."""
_Work = SimpleQueue[tuple[Future[Any], Callable[[], Any]]]
_THREADS: weakref.WeakKeyDictionary[Thread, tuple[_Work, Event]] = weakref.WeakKeyDictionary()
"""Threads that run: those whose owner is gone as well, which may still wait in gloo."""


class StageFailure(NamedTuple):
    """A step raised on a stage. In messages it is one number, `code`."""

    stage: int
    is_out_of_memory: bool

    @property
    def code(self) -> int:
        return 2 * self.stage + self.is_out_of_memory

    @staticmethod
    def of_code(code: float) -> StageFailure | None:
        return None if code == NO_FAILURE else StageFailure(int(code) // 2, bool(int(code) % 2))


@dataclass(frozen=True, slots=True)
class StepMessage:
    """A step's result, which the last stage sends to the others."""

    tokens: np.ndarray
    """int64 [S]; -1 where nothing could be drawn."""
    failure: StageFailure | None
    arrays: Mapping[str, Tensor | np.ndarray] = field(default_factory=dict)
    """Logprobs and other per-token outputs on the host, by name, where a request asked for them."""


class OrderedThread:
    """A thread that runs the actions it is given in order: on the host what a stream is on a device.

    A daemon thread; it ends when its owner is no longer used, and with the process.
    """

    def __init__(self, name: str) -> None:
        self._work: _Work = SimpleQueue()
        self._ending = Event()
        self._thread = Thread(target=_run_in_order, args=(self._work, self._ending), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._work, self._ending).atexit = False
        _THREADS[self._thread] = self._work, self._ending

    def submit(self, action: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._work.put((future, action))
        return future


def _run_in_order(work: _Work, ending: Event) -> None:
    while not ending.is_set():
        future, action = work.get()
        try:
            future.set_result(action())
        except BaseException as error:  # raised where the future is read
            future.set_exception(error)
        del future, action  # an idle thread holds no tensors


def _end(work: _Work, ending: Event) -> None:
    ending.set()
    work.put((Future(), lambda: None))  # wakes the thread


@atexit.register
def _end_threads() -> None:
    """A wait in gloo that ends while the interpreter is being taken down ends the process with SIGABRT: Python ends the
    thread inside a destructor of C++. What waits for a rank that is gone ends at about the time at which that is found.
    """
    threads = list(_THREADS.items())
    for _, (work, ending) in threads:
        _end(work, ending)
    until = time.monotonic() + END_S
    for thread, _ in threads:
        thread.join(max(0.0, until - time.monotonic()))


class _Pending(NamedTuple):
    """A message on its way to or from a stage."""

    work: Any
    stage: int
    limit: timedelta | None


class StageLink:
    """One rank's connections to its neighbours and to the last stage. Sends are asynchronous, in order."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        hidden_size: int,
        device: torch.device,
        timeout_s: float,
        num_chunks: int = 1,
    ) -> None:
        """group: the ranks that hold this rank's share of the stages, first stage first. timeout_s: how long a message
        may take once it is waited for, over gloo (NCCL has its own watchdog, and a wait on the host would stall it).
        num_chunks: parts of the model on each rank; between them the residual stream goes from the last rank to the
        first.

        Results go from host to host, over gloo: in a group of their own if `group` has no gloo for the host, which all
        of its members create here.
        """
        self.rank = group.rank()
        self.num_stages = group.size()
        self.num_chunks = num_chunks
        self.is_first, self.is_last = self.rank == 0, self.rank == self.num_stages - 1
        self._ranks = dist.get_process_group_ranks(group)
        self._group, self._device, self._hidden_size = group, device, hidden_size
        limit = timedelta(seconds=timeout_s)
        # gloo's sends and receives use the group's own timeout, which cannot be lowered: each wait gets a limit instead
        self._limits = {"cpu": limit, device.type: limit if backend_on(group, device.type) == "gloo" else None}
        gloo = backend_on(group, "cpu") == "gloo"
        self._host_group = group if gloo else dist.new_group(self._ranks, "gloo", use_local_synchronization=True)
        self._sent: deque[tuple[_Pending, Tensor]] = deque()

    def compare(self, numbers: Sequence[int]) -> np.ndarray:
        """The numbers of every stage, int64 [stages, len(numbers)]; all stages call it."""
        own = torch.tensor(list(numbers), dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in range(self.num_stages)]
        dist.all_gather(gathered, own, group=self._host_group)
        found: np.ndarray = torch.stack(gathered).numpy()
        return found

    # ------------------------------------------------------------------ stage to stage

    def nothing_received(self, num_tokens: int) -> Tensor:
        """Zeros in the place of a residual stream."""
        return torch.zeros(num_tokens, self._hidden_size, device=self._device)

    def receive(
        self, num_tokens: int, *, routing_width: int = 0, chunk: int = 0
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(residual stream of the stage before, fp32 [T, D]; its routing, fp32 [T, routing_width]; the code of the
        failure of the first stage that failed, fp32 [1], else NO_FAILURE). All None in the first stage's first chunk.

        Where a stage failed the residual stream is zeros. On a GPU the host does not wait: what is received is ordered
        on the stream, the code is a number on the device. gloo's receive waits for the stage before.
        """
        if self.is_first and chunk == 0:
            return None, None, None
        split = num_tokens * self._hidden_size
        buffer = torch.empty(split + num_tokens * routing_width + 1, device=self._device)
        self._wait(self._irecv(buffer, (self.rank - 1) % self.num_stages, self._group, _HIDDEN))
        residual_TD = buffer[:split].view(num_tokens, self._hidden_size)
        return residual_TD, buffer[split:-1].view(num_tokens, routing_width), buffer[-1:]

    def send(
        self,
        residual_TD: Tensor | None,
        num_tokens: int,
        *,
        failure: StageFailure | None = None,
        routing_width: int = 0,
        routing_TN: Tensor | None = None,
        failed_before: Tensor | None = None,
        chunk: int = 0,
    ) -> None:
        """Send the residual stream to the next stage (None: zeros); does nothing in the last stage's last chunk.

        failure: this stage's. failed_before: as received. routing_width, routing_TN: see `receive`; whole numbers below
        2**24, which fp32 holds.
        """
        if self.is_last and chunk == self.num_chunks - 1:
            return
        split = num_tokens * self._hidden_size
        buffer = torch.empty(split + num_tokens * routing_width + 1, device=self._device)
        if residual_TD is None:
            buffer.zero_()  # later stages compute with it; their results are dropped
        else:
            buffer[:split].view(num_tokens, self._hidden_size).copy_(residual_TD)
        buffer[-1:].fill_(NO_FAILURE if failure is None else failure.code)
        if failed_before is not None:
            torch.where(failed_before == NO_FAILURE, buffer[-1:], failed_before, out=buffer[-1:])
        if routing_TN is not None:
            buffer[split:-1].view(num_tokens, routing_width).copy_(routing_TN)
        self._post(buffer, (self.rank + 1) % self.num_stages, self._group, _HIDDEN)

    # ------------------------------------------------------------------ last stage to all

    def send_drafts(self, tokens: np.ndarray) -> None:
        """Send what was drafted for a step, int64 [N], to every other stage; the last stage does, before the step."""
        for stage in range(self.num_stages - 1):
            self._post(torch.from_numpy(tokens), stage, self._host_group, _DRAFTS)

    def receive_drafts(self, num_drafts: int) -> list[int]:
        """The drafts of the next step that has some; blocks."""
        tokens = torch.empty(num_drafts, dtype=torch.int64)
        self._wait(self._irecv(tokens, self.num_stages - 1, self._host_group, _DRAFTS))
        found: list[int] = tokens.tolist()
        return found

    def send_result(self, message: StepMessage) -> None:
        """Send a step's result to every other stage; the last stage does, once for each step."""
        packed = _pack(message.arrays)
        failed = NO_FAILURE if message.failure is None else message.failure.code
        head = torch.from_numpy(np.concatenate([np.array([failed, len(packed)], dtype=np.int64), message.tokens]))
        tail = torch.frombuffer(bytearray(packed), dtype=torch.uint8) if packed else None
        for stage in range(self.num_stages - 1):
            self._post(head, stage, self._host_group, _TOKENS)
            if tail is not None:
                self._post(tail, stage, self._host_group, _ARRAYS)

    def receive_result(self, num_sampled: int) -> StepMessage:
        """The result of the next step; blocks."""
        last = self.num_stages - 1
        head = torch.empty(num_sampled + 2, dtype=torch.int64)
        self._wait(self._irecv(head, last, self._host_group, _TOKENS))
        failed, num_bytes = head[:2].tolist()
        arrays = {}
        if num_bytes:
            tail = torch.empty(num_bytes, dtype=torch.uint8)
            self._wait(self._irecv(tail, last, self._host_group, _ARRAYS))
            arrays = _unpack(tail.numpy().tobytes())
        return StepMessage(head[2:].numpy(), StageFailure.of_code(failed), arrays)

    def _irecv(self, tensor: Tensor, stage: int, group: dist.ProcessGroup, tag: int) -> _Pending:
        return _Pending(
            dist.irecv(tensor, self._ranks[stage], group=group, tag=tag), stage, self._limits[tensor.device.type]
        )

    def _post(self, tensor: Tensor, stage: int, group: dist.ProcessGroup, tag: int) -> None:
        """Send without waiting; waits for the oldest message where a neighbour falls far behind."""
        try:
            work = dist.isend(tensor, self._ranks[stage], group=group, tag=tag)
        except RuntimeError as error:
            raise self._lost(stage, error) from error
        self._sent.append((_Pending(work, stage, self._limits[tensor.device.type]), tensor))
        while len(self._sent) > 4 * self.num_stages * self.num_chunks:
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


def _pack(arrays: Mapping[str, Tensor | np.ndarray]) -> bytes:
    """As `outputs.schema` writes arrays; b"" where there are none."""
    records = []
    for name, one in arrays.items():
        array = one.numpy() if isinstance(one, Tensor) else one
        content = bytearray(np.ascontiguousarray(array))
        records.append(ArrayRecord(name, isinstance(one, Tensor), array.dtype.name, list(array.shape), content))
    return encode_arrays(records) if records else b""


def _unpack(content: bytes) -> dict[str, Tensor | np.ndarray]:
    """What `_pack` was given. Raises StageLost for anything else."""
    arrays = {}
    try:
        for record in decode_arrays(content):
            array = np.frombuffer(record.content, record.dtype).reshape(record.shape)
            arrays[record.name] = torch.from_numpy(array) if record.is_tensor else array
    except Exception as error:  # numpy reads a dtype with several parsers, each with its own errors
        raise StageLost(f"the last stage has sent a damaged result: {error}") from error
    return arrays
