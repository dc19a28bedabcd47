"""Where the coordinator's requests are: waiting, on a replica, moved to another one, ended.

submit --> unassigned --route--> seat.backlog --room--> seat.running --last output--> ended
               ^                      |                      |
               +------ the replica is lost (tokens so far are kept) ------+

Those that wait stand by priority, and then as they came.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from megatron_infer.config.sampling_params import MAX_N
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.peers import (
    ClientState,
    CoordinatorOptions,
    Counts,
    PendingRequest,
    Progress,
    ReplicaState,
)
from megatron_infer.coordinator.router import Availability, Route, Router


class Dispatcher:
    """Spreads requests over the replicas of `seats`, which its owner keeps."""

    def __init__(
        self,
        options: CoordinatorOptions,
        send: Callable[[bytes, protocol.Message], None],
        seats: Mapping[bytes, ReplicaState],
    ) -> None:
        self._options, self._send, self._seats = options, send, seats
        self.router: Router | None = None
        """None until somebody has said how to route."""
        if options.policy is not None:
            self.router = Router(options.policy, 0.5 if options.alpha is None else options.alpha)
        self.counts = Counts()
        self.num_waiting = 0
        self._unassigned: deque[PendingRequest] = deque()
        self._num_numbers = self._num_seeds = 0

    # ------------------------------------------------------------------ clients

    def submit(self, client: ClientState, submit: protocol.Submit) -> None:
        num_samples, priority = submit.params.get("n", 1), submit.params.get("priority", 0)
        refusal: protocol.Failure | None = None
        if submit.id in client.entries:
            refusal = protocol.Failure("DuplicateRequest", f"request {submit.id} is under way already")
        elif (submit.prompt is None) == (submit.text is None) or len(submit.prompt or b"") % 4:
            refusal = protocol.Failure("InvalidPrompt", "a request has token ids (int32) or a text, and not both")
        elif not isinstance(num_samples, int) or not 1 <= num_samples <= MAX_N:
            refusal = protocol.Failure("RequestError", f"n is {num_samples!r}, it must be 1 to {MAX_N}")
        elif not isinstance(priority, int):
            refusal = protocol.Failure("RequestError", f"priority is {priority!r}, it must be an integer")
        elif self.num_waiting >= self._options.max_queue:
            self.counts.refused += 1
            message = (
                f"{self.num_waiting:,} requests wait here, the limit is {self._options.max_queue:,} (max_queue); "
                "wait and submit it again"
            )
            refusal = protocol.Failure("Overloaded", message)
        if refusal is not None:
            self._send(client.peer, protocol.Output(submit.id, 0, [], True, refused=refusal))
            return
        seed = self._next_seed() if submit.seed is None else submit.seed
        samples = [Progress() for _ in range(num_samples)]
        entry = PendingRequest(client, submit, seed, samples, submit.prompt)
        client.entries[submit.id] = entry
        self.counts.submitted += 1
        self._place(entry)

    def _next_seed(self) -> int:
        self._num_seeds += 1
        words = f"{self._options.seed} {self._num_seeds}".encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")

    def abort(self, client: ClientState, request_id: int) -> None:
        entry = client.entries.get(request_id)
        if entry is None:
            return  # it has ended while the abort was on its way
        if not entry.number:
            self._end_here(entry)
        elif not entry.aborted:
            entry.aborted = True
            self._send(self._seat_of(entry).peer, protocol.Cancel(entry.number, silent=False))

    def drop(self, entry: PendingRequest) -> None:
        """Nobody waits for it any more."""
        if entry.number:
            self._send(self._seat_of(entry).peer, protocol.Cancel(entry.number, silent=True))
        self._forget(entry)

    # ------------------------------------------------------------------ replicas come and go

    def reopen(self, seat: ReplicaState | None = None) -> None:
        """A replica takes requests (again): those that waited for one are placed."""
        waiting, self._unassigned = self._unassigned, deque()
        self._replace(waiting)
        if seat is not None:
            self._pump(seat)

    def clear_backlog(self, seat: ReplicaState) -> None:
        """What has not been sent to a replica that leaves goes elsewhere."""
        backlog, seat.backlog = seat.backlog, deque()
        for entry in backlog:
            if not entry.ended and entry.route is not None and self.router is not None:
                self.router.release(entry.route)
        self._replace(backlog)

    def lose(self, seat: ReplicaState) -> None:
        """A replica is out of `seats`: all it had goes elsewhere, with the tokens that were sent."""
        if self.router is not None:
            self.router.leave(seat.peer)
        self._replace(list(chain(seat.running.values(), seat.backlog)))

    # ------------------------------------------------------------------ outputs

    def output(self, seat: ReplicaState, output: protocol.Output) -> bool:
        """News of a request from the replica it is on, to its client. False: they do not follow what came before."""
        entry = seat.running.get(output.number)
        if entry is None:
            self.counts.fenced += 1
            return True
        if not all(_follows(piece, entry) for piece in output.pieces):
            return False
        for piece in output.pieces:
            entry.samples[piece.index].take(piece)
        if output.prompt is not None and entry.prompt is None:
            entry.prompt = output.prompt
        client, request_id = entry.client.peer, entry.submit.id
        if output.finished:
            if output.refused is None:
                self.counts.finished += 1
                self.counts.prompt_tokens += len(entry.prompt or b"") // 4
                self.counts.cached_tokens += output.num_cached
            self._forget(entry)
        self._send(client, _readdressed(output, request_id))
        return True

    def _end_here(self, entry: PendingRequest, error: protocol.Failure | None = None) -> None:
        """End a request that is on no replica, with the tokens its client has."""
        reason = "abort" if error is None else "error"
        pieces = [
            protocol.Piece(index, len(one.tokens) // 4, b"", "", finish_reason=reason)
            for index, one in enumerate(entry.samples)
            if one.finish_reason is None
        ]
        output = protocol.Output(entry.submit.id, 0, pieces, True, error=error)
        client = entry.client.peer
        self._forget(entry)
        self._send(client, output)

    def _forget(self, entry: PendingRequest) -> None:
        """Take a request out of the books, wherever it is."""
        assert not entry.ended, f"request {entry.submit.id} has ended before"
        entry.ended = True
        del entry.client.entries[entry.submit.id]
        if entry.route is not None and self.router is not None:
            self.router.release(entry.route)
        if not entry.number:
            self.num_waiting -= 1
            return
        seat = self._seat_of(entry)
        del seat.running[entry.number]
        self._pump(seat)

    # ------------------------------------------------------------------ spreading

    def _place(self, entry: PendingRequest) -> None:
        """Choose a replica; where there is none it waits for the first that comes."""
        self.num_waiting += 1
        entry.number, entry.route = 0, None
        if self.router is not None:
            entry.route = self.router.choose(entry.prompt or b"", salt=entry.submit.salt)
        if entry.route is None:
            entry.stand_in(self._unassigned)
            return
        assert self.router is not None
        self.router.assign(entry.route)
        seat = self._seat_of(entry)
        entry.stand_in(seat.backlog)
        self._pump(seat)

    def _pump(self, seat: ReplicaState) -> None:
        """Send what the replica has room for; one with little to do takes over what waits for others."""
        if seat.view is None or seat.peer not in self._seats:
            return
        while len(seat.running) < seat.limit:
            entry = self._next_for(seat)
            if entry is None:
                return
            self.num_waiting -= 1
            self._num_numbers += 1
            entry.number = self._num_numbers
            entry.attempts += 1
            seat.running[entry.number] = entry
            submit = entry.submit
            kept = [one.kept() for one in entry.samples] if any(one.tokens for one in entry.samples) else []
            text = submit.text if entry.prompt is None else None
            self._send(
                seat.peer,
                protocol.Run(
                    entry.number,
                    seat.incarnation,
                    entry.prompt,
                    text,
                    submit.salt,
                    submit.params,
                    entry.seed,
                    submit.stream,
                    kept,
                ),
            )

    def _next_for(self, seat: ReplicaState) -> PendingRequest | None:
        while seat.backlog:
            entry = seat.backlog.popleft()
            if not entry.ended:
                return entry
        assert seat.about is not None and seat.view is not None
        if seat.view.standing is not Availability.OPEN or 2 * len(seat.running) > seat.about.capacity:
            return None
        richest = max(self._seats.values(), key=lambda other: len(other.backlog))
        while richest.backlog:
            entry = richest.backlog.pop()  # the last: the others are about to begin where their prefix is
            if not entry.ended:
                self._move(entry, seat)
                return entry
        return None

    def _move(self, entry: PendingRequest, seat: ReplicaState) -> None:
        assert self.router is not None and entry.route is not None
        self.router.release(entry.route)
        entry.route = Route(key=seat.peer)
        self.router.assign(entry.route)

    def _replace(self, entries: Iterable[PendingRequest]) -> None:
        """Requests whose replica is lost, in their order, before all that came later."""
        for entry in entries:
            if entry.ended:
                continue
            if entry.number:
                self.num_waiting += 1
                self.counts.resent += 1
            entry.number, entry.route = 0, None
            if entry.aborted:
                self._end_here(entry)
            elif entry.attempts >= self._options.max_attempts:
                text = f"{entry.attempts} replicas were lost while they served it (limit: max_attempts)"
                self._end_here(entry, protocol.Failure("ReplicaLost", text))
            else:
                self.num_waiting -= 1
                self._place(entry)

    def _seat_of(self, entry: PendingRequest) -> ReplicaState:
        assert entry.route is not None
        return self._seats[entry.route.key]  # type: ignore[index]

    def check(self, clients: Iterable[ClientState]) -> None:
        """Assert that the books agree: every request is in one place, and counted once."""
        seats = self._seats.values()
        waiting = [*self._unassigned, *(entry for seat in seats for entry in seat.backlog)]
        waiting = [entry for entry in waiting if not entry.ended]
        running = [entry for seat in seats for entry in seat.running.values()]
        held = [entry for client in clients for entry in client.entries.values()]
        assert len(waiting) == self.num_waiting, f"{len(waiting)} requests wait, {self.num_waiting} are counted"
        assert {id(entry) for entry in held} == {id(entry) for entry in waiting + running}, "a request is lost"
        assert len(held) == len(waiting) + len(running), "a request is in two places"
        for seat in seats:
            backlog = sum(not entry.ended for entry in seat.backlog)
            assert seat.view is None or seat.view.load == len(seat.running) + backlog, f"load of {seat.name}"


def _follows(piece: protocol.Piece, entry: PendingRequest) -> bool:
    """Whether it goes on exactly where the client's tokens end."""
    if not 0 <= piece.index < len(entry.samples) or len(piece.tokens) % 4:
        return False
    return piece.offset * 4 == len(entry.samples[piece.index].tokens)


def _readdressed(output: protocol.Output, request_id: int) -> protocol.Output:
    return protocol.Output(
        request_id,
        0,
        output.pieces,
        output.finished,
        output.refused,
        output.error,
        output.prompt,
        output.num_cached,
        output.prompt_logprobs,
        output.pooled,
    )
