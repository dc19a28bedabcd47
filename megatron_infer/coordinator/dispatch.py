"""Where each request is: waiting, at a replica, moved to another replica, ended.

submit --> unassigned --route--> replica.backlog --room--> replica.running --last output--> ended
               ^                      |                         |
               +------ the replica is lost (the tokens so far are kept) ------+

The order of waiting requests is that of `FairQueue`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from megatron_infer.config.coordinator_options import CoordinatorOptions, ReplicaRole
from megatron_infer.config.sampling_params import MAX_N
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.fair_queue import Caller, FairQueue
from megatron_infer.coordinator.peers import ClientState, Counts, PendingRequest, ReplicaState, caller_share
from megatron_infer.coordinator.router import (
    MAX_LOOKED_AT,
    Availability,
    Rank,
    Ranking,
    ReplicaView,
    Route,
    Router,
)
from megatron_infer.outputs.schema import Failure, Piece

HANDED_IN_AGAIN = 8
"""Times max_queue that may wait when clients hand their requests in again after a coordinator was lost: what waited
there, and what ran at its replicas."""


class Dispatcher:
    """Distributes requests over `replicas`, which its owner changes."""

    def __init__(
        self,
        options: CoordinatorOptions,
        send: Callable[[bytes, protocol.Message], None],
        replicas: Mapping[Any, ReplicaState],
    ) -> None:
        self._options, self._send, self._replicas = options, send, replicas
        self.router: Router | None = None
        """None until the options or the first replica set the policy."""
        if options.policy is not None:
            self.router = Router(options.policy, 1.0 if options.alpha is None else options.alpha)
        self.counts = Counts()
        self.num_waiting = 0
        self._waiting_of: Counter[Caller] = Counter()
        """Waiting requests by caller."""
        self._unassigned = FairQueue()
        self._backlogged: dict[bytes, ReplicaState] = {}
        """Replicas with a backlog, and some that have had one."""
        self._prefills = Ranking(self._share_of_limit)
        """Replicas that take prompts and have room, the least busy first."""
        self._num_sent = self._num_seeds = 0

    # ------------------------------------------------------------------ clients

    def submit(self, client: ClientState, submit: protocol.Submit) -> None:
        num_sequences, priority = submit.params.get("n", 1), submit.params.get("priority", 0)
        refusal: Failure | None = None
        if submit.id in client.requests:
            refusal = Failure("DuplicateRequest", f"request {submit.id} is under way already")
        elif submit.kept and any(len(one.tokens) % 4 for one in submit.kept):
            refusal = Failure("InvalidPrompt", "the output so far is no token ids (int32)")
        elif (submit.prompt is None) == (submit.text is None) or len(submit.prompt or b"") % 4:
            refusal = Failure("InvalidPrompt", "a request has token ids (int32) or a text, and not both")
        elif not isinstance(num_sequences, int) or not 1 <= num_sequences <= MAX_N:
            refusal = Failure("RequestError", f"n is {num_sequences!r}, it must be 1 to {MAX_N}")
        elif submit.kept and (len(submit.kept) != num_sequences or submit.prompt is None):
            text = f"output of {len(submit.kept)} sequences so far; it takes n of them, and the prompt's token ids"
            refusal = Failure("RequestError", text)
        elif not isinstance(priority, int):
            refusal = Failure("RequestError", f"priority is {priority!r}, it must be an integer")
        elif (full := self._full_for(client.caller(submit.caller), is_new=submit.kept is None)) is not None:
            self.counts.refused += 1
            refusal = Failure("Overloaded", f"{full}; wait and submit it again")
        if refusal is not None:
            self._send(client.peer, protocol.Output(submit.id, 0, [], True, refused=refusal))
            return
        seed = self._next_seed() if submit.seed is None else submit.seed
        sequences = submit.kept or [protocol.Kept() for _ in range(num_sequences)]
        request = PendingRequest(client, submit, seed, sequences, submit.prompt)
        client.requests[submit.id] = request
        self.counts.submitted += 1
        self._count_waiting(request, +1)
        self._assign(request)

    def _full_for(self, caller: Caller, *, is_new: bool) -> str | None:
        """Why a caller's next request cannot wait here; None: it can. is_new: it is not handed in again."""
        limit = self._options.max_queue
        most = limit if is_new else limit * HANDED_IN_AGAIN
        if self.num_waiting >= most:
            times = "" if is_new else f", {HANDED_IN_AGAIN} times that for requests handed in again"
            return f"{self.num_waiting:,} requests wait here, the limit is {limit:,} (max_queue){times}"
        if not is_new:
            return None
        own, share = self._waiting_of[caller], caller_share(limit)
        if own >= share:
            return f"{own:,} requests of this caller wait here, the limit is {share:,} of max_queue, {limit:,}"
        return None

    def _count_waiting(self, request: PendingRequest, change: int) -> None:
        self.num_waiting += change
        self._waiting_of[request.caller] += change
        if not self._waiting_of[request.caller]:
            del self._waiting_of[request.caller]

    def _next_seed(self) -> int:
        self._num_seeds += 1
        words = f"{self._options.seed} {self._num_seeds}".encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")

    def abort(self, client: ClientState, request_id: int) -> None:
        """End a request; its last output has the tokens so far."""
        request = client.requests.get(request_id)
        if request is None:
            return  # it ended before the abort arrived
        if not request.number:
            self._finish(request)
        elif not request.aborted:
            request.aborted = True
            self._send(self._replica_of(request).peer, protocol.Cancel(request.number, silent=False))

    def cancel(self, request: PendingRequest) -> None:
        """End a request without an output: its client is gone."""
        if request.number:
            self._send(self._replica_of(request).peer, protocol.Cancel(request.number, silent=True))
        self._remove(request)

    # ------------------------------------------------------------------ replicas come and go

    def reopen(self, replica: ReplicaState | None = None) -> None:
        """Assign the unassigned requests, as a replica takes requests again; fill `replica`, which has just joined."""
        if self.router is not None and self.router.takes_requests:
            unassigned, self._unassigned = self._unassigned, FairQueue()
            self._reassign(_drained(unassigned))
        if replica is not None:
            self._fill(replica)

    def move_away(self, replica: ReplicaState) -> None:
        """Have a replica hand out as many of its requests as other replicas have room for; the rest stay for now."""
        room = self._room_elsewhere(replica)
        moving = sum(request.is_moving for request in replica.running.values())
        for request in list(replica.running.values()):
            if moving >= room:
                return
            if not request.is_moving and not request.aborted and request.leaving is None:
                request.is_moving = True
                moving += 1
                self._send(replica.peer, protocol.HandOut(request.number))

    def relieve(self, replica: ReplicaState, numbers: Sequence[int]) -> None:
        """Have a replica hand out the first of some requests for which another replica is at most half full with it.

        A request leaves a replica so once at most: no two replicas hand it back and forth.
        """
        for number in numbers[: protocol.MAX_NAMED]:
            request = replica.running.get(number)
            if request is None or request.is_relieved or request.is_moving or request.aborted or request.leaving:
                continue
            place = self._half_empty(replica, request)
            if place is not None:
                self._move(request, place)
                request.leaving, request.is_moving, request.is_relieved = replica.peer, True, True
                place.placed.add(request)
                self._send(replica.peer, protocol.HandOut(number))
                return

    def _half_empty(self, replica: ReplicaState, request: PendingRequest) -> ReplicaState | None:
        """Another replica that can use the memory of a request, and has half of its rows and blocks free with it: of
        those that can use the memory and have the rows the MAX_LOOKED_AT with the most room are looked at."""
        assert self.router is not None and replica.view is not None
        root, size = replica.view.root, replica.view.block_size

        def is_usable(view: ReplicaView) -> bool:
            is_alike = (view.root, view.block_size) == (root, size) and _has_adapter(view, request)
            return is_alike and view is not replica.view

        for view in islice(filter(is_usable, self.router.with_room(0.5)), MAX_LOOKED_AT):
            one = self._replicas[view.key]
            held = (*one.running.values(), *one.placed, request)
            num_rows = sum(len(each.sequences) for each in held)
            num_blocks = num_rows + sum(each.num_tokens // size for each in held)
            has_rows = 2 * (view.foreign + num_rows) <= view.capacity
            if has_rows and 2 * num_blocks <= one.info.limits.get("num_blocks", 0):
                return one
        return None

    def _room_elsewhere(self, replica: ReplicaState) -> int:
        """How many of a replica's requests others have room for."""
        room = 0
        for view in () if self.router is None else self.router.with_room():
            one = self._replicas[view.key]
            if room >= len(replica.running):
                break
            if one is not replica:
                room += max(0, one.info.capacity - one.num_taken - len(one.backlog))
        return room

    def handed_out(self, replica: ReplicaState, message: protocol.HandedOut) -> None:
        """A replica has let a request go: another one goes on with it."""
        request = replica.running.pop(message.number, None)
        if request is None:
            self.counts.fenced += 1
            return
        self.rank_prefill(replica)
        self.counts.moved += 1
        request.num_moves += 1
        request.number, request.parcel, request.is_moving = 0, replica.place_of(message.parcel), False
        self._count_waiting(request, +1)
        place = self._place_of(request)
        self.counts.relieved += request.is_relieved and place is not None
        if request.aborted:
            self._leave(request)
            self._finish(request)
        elif place is not None and place.view is not None and place.view.availability is not Availability.CLOSED:
            self._start(request, place)
        else:
            self._leave(request)
            self._assign(request)
        self._fill(replica)
        if place is not None:
            self._fill(place)

    def clear_backlog(self, replica: ReplicaState) -> None:
        """Reassign what has not been sent to a replica that takes no more requests."""
        backlog, replica.backlog = _drained(replica.backlog), FairQueue()
        for request in backlog:
            if not request.ended and request.route is not None and self.router is not None:
                self.router.release(request.route)
        self._reassign(backlog)

    def lose(self, replica: ReplicaState) -> None:
        """Reassign all requests of a replica that is gone from `replicas` and the router, with the tokens it sent."""
        for request in replica.placed:
            request.route = None  # its place is gone; where it is it goes on
        self._backlogged.pop(replica.peer, None)
        if replica.view is not None:
            self._prefills.discard(replica.view)
        running = list(replica.running.values())
        places = [place for request in running if (place := self._place_of(request)) is not None]
        self._reassign([*running, *_drained(replica.backlog)])
        for place in places:  # they are free
            self._fill(place)

    # ------------------------------------------------------------------ outputs

    def output(self, replica: ReplicaState, output: protocol.Output) -> bool:
        """Forward an output to its client. False: it does not continue where the client's tokens end."""
        request = replica.running.get(output.number)
        if request is None:
            self.counts.fenced += 1
            return True
        if not all(_continues(piece, request) for piece in output.pieces) or len(output.prompt or b"") % 4:
            return False
        for piece in output.pieces:
            request.sequences[piece.index].add(piece)
        if output.prompt is not None and request.prompt is None:
            request.prompt = output.prompt
        client, request_id = request.client.peer, request.submit.id
        if output.times is not None:
            output.times.replica, output.times.attempt = replica.name, request.attempts
        if output.finished:
            if output.refused is None:
                self.counts.finished += 1
                self.counts.prompt_tokens += len(request.prompt or b"") // 4
                self.counts.cached_tokens += max(0, min(output.num_cached, len(request.prompt or b"") // 4))
            self._remove(request)
        self._send(client, msgspec.structs.replace(output, number=request_id, incarnation=0, seed=request.seed))
        return True

    def _finish(self, request: PendingRequest, error: Failure | None = None) -> None:
        """End a request that is at no replica, with the tokens that its client has."""
        reason = "abort" if error is None else "error"
        pieces = [
            Piece(index, len(one.tokens) // 4, b"", "", finish_reason=reason)
            for index, one in enumerate(request.sequences)
            if one.finish_reason is None
        ]
        output = protocol.Output(request.submit.id, 0, pieces, True, error=error)
        client = request.client.peer
        self._remove(request)
        self._send(client, output)

    def _remove(self, request: PendingRequest) -> None:
        """Remove an ended request from its client, router and replica."""
        assert not request.ended, f"request {request.submit.id} has ended before"
        request.ended = True
        del request.client.requests[request.submit.id]
        replica = self._replica_of(request) if request.number else None
        place = self._place_of(request)
        self._leave(request)
        if replica is None:
            self._count_waiting(request, -1)
            return
        del replica.running[request.number]
        self.rank_prefill(replica)
        self._fill(replica)
        if place is not None:
            self._fill(place)

    def _leave(self, request: PendingRequest) -> None:
        """Give back its route, and its place at the replica that is to decode it."""
        if (place := self._place_of(request)) is not None:
            place.placed.remove(request)
        if request.route is not None and self.router is not None:
            self.router.release(request.route)
        request.route = request.leaving = None

    def _place_of(self, request: PendingRequest) -> ReplicaState | None:
        """The replica that keeps a place for a request which leaves another one."""
        if request.leaving is None or request.route is None:
            return None
        return self._replicas.get(request.route.key)

    def _share_of_limit(self, view: ReplicaView) -> Rank:
        return len(self._replicas[view.key].running) / view.capacity, 0, view.index

    def rank_prefill(self, replica: ReplicaState) -> None:
        """A replica has more or fewer requests, or begins or ends to take prompts."""
        view = replica.view
        if view is not None and view.takes_prompts and len(replica.running) < replica.limit:
            self._prefills.put(view)
        elif view is not None:
            self._prefills.discard(view)

    # ------------------------------------------------------------------ assignment

    def _assign(self, request: PendingRequest) -> None:
        """Choose a replica for a waiting request; if none takes requests, the request stays unassigned."""
        request.number, request.route = 0, None
        if self.router is not None:
            request.route = self.router.choose(request.prompt or b"", salt=request.submit.salt, adapter=request.adapter)
        if request.route is None:
            self._unassigned.push(request)
            return
        assert self.router is not None
        self.router.assign(request.route)
        replica = self._replica_of(request)
        replica.backlog.push(request)
        self._backlogged[replica.peer] = replica
        self._fill(replica)

    def _fill(self, replica: ReplicaState) -> None:
        """Send a replica the requests it has room for."""
        if replica.view is None or replica.peer not in self._replicas:
            return
        while (request := self._next_for(replica)) is not None:
            prefill = self._prefill_for(request, replica)
            if prefill is not None:
                request.leaving = prefill.peer
                replica.placed.add(request)
            self._start(request, prefill or replica)

    def _prefill_for(self, request: PendingRequest, replica: ReplicaState) -> ReplicaState | None:
        """The prefill_only replica that computes a request's prompt before `replica` goes on; None: `replica` does."""
        if replica.role is ReplicaRole.PREFILL or request.parcel is not None or request.num_moves:
            return None
        length, route = request.num_prompt_tokens, request.route
        cached = 0 if route is None else route.matched * replica.info.block_size
        if length - cached < self._options.role_min_prompt_tokens or any(one.tokens for one in request.sequences):
            return None
        found = (self._replicas[view.key] for view in self._prefills if _has_adapter(view, request))
        return next(found, None)

    def _start(self, request: PendingRequest, replica: ReplicaState) -> None:
        """Send a waiting request to a replica; its prompt alone where it keeps a place at another one."""
        if request.leaving is not None and replica.peer != request.leaving:
            replica.placed.remove(request)
            request.leaving = None
        self._count_waiting(request, -1)
        self._num_sent += 1
        request.number = self._num_sent
        request.attempts += 1
        replica.running[request.number] = request
        self.rank_prefill(replica)
        submit = request.submit
        has_tokens = any(one.tokens for one in request.sequences)
        run = protocol.Run(
            request.number,
            replica.incarnation,
            request.prompt,
            submit.text if request.prompt is None else None,
            submit.salt,
            submit.params,
            request.seed,
            submit.stream,
            [one.copy() for one in request.sequences] if has_tokens else [],
            request.caller_number,
            request.parcel,
            request.leaving is not None,
        )
        request.parcel = None
        self._send(replica.peer, run)

    def _next_for(self, replica: ReplicaState) -> PendingRequest | None:
        """The next of its backlog; a replica that is at most half full takes over from the longest backlog."""
        may = _below_share(replica) if replica.backlog else None
        while (request := replica.backlog.pop(may)) is not None:
            if not request.ended:
                return request
        assert replica.view is not None
        is_open = replica.view.availability is Availability.OPEN
        if not is_open or 2 * replica.num_taken > replica.info.capacity:
            return None
        self._backlogged = {peer: one for peer, one in self._backlogged.items() if one.backlog}
        longest = max(self._backlogged.values(), key=lambda other: len(other.backlog), default=replica)
        while longest.backlog:
            request = longest.backlog.pop_last()  # the last: those before it start soon, where their prefix is cached
            if not request.ended and request.adapter is not None and request.adapter not in replica.view.adapters:
                longest.backlog.push(request)
                return None
            if not request.ended:
                self._move(request, replica)
                return request
        return None

    def _move(self, request: PendingRequest, replica: ReplicaState) -> None:
        assert self.router is not None and request.route is not None
        self.router.release(request.route)
        request.route = Route(key=replica.peer)
        self.router.assign(request.route)

    def _reassign(self, requests: Iterable[PendingRequest]) -> None:
        """Assign requests again, in their order."""
        for request in requests:
            if request.ended:
                continue
            if request.number:
                self._count_waiting(request, +1)
                self.counts.resent += 1
            if request.leaving is not None:
                self._leave(request)
            request.number, request.route, request.is_moving = 0, None, False
            if request.aborted:
                self._finish(request)
            elif request.attempts - request.num_moves >= self._options.max_attempts:
                text = f"{request.attempts} replicas were lost while they served it (limit: max_attempts)"
                self._finish(request, Failure("ReplicaLost", text))
            else:
                self._assign(request)

    def _replica_of(self, request: PendingRequest) -> ReplicaState:
        if request.leaving is not None:
            return self._replicas[request.leaving]
        assert request.route is not None
        return self._replicas[request.route.key]

    def check(self, clients: Iterable[ClientState]) -> None:
        """Assert that every request is in one place, and counted once."""
        replicas = self._replicas.values()
        waiting = [*self._unassigned, *(request for replica in replicas for request in replica.backlog)]
        waiting = [request for request in waiting if not request.ended]
        running = [request for replica in replicas for request in replica.running.values()]
        held = [request for client in clients for request in client.requests.values()]
        assert self._waiting_of == Counter(request.caller for request in waiting), "callers are counted wrong"
        assert len(waiting) == self.num_waiting, f"{len(waiting)} requests wait, {self.num_waiting} are counted"
        assert {id(one) for one in held} == {id(one) for one in waiting + running}, "a request is lost"
        assert len(held) == len(waiting) + len(running), "a request is in two places"
        for replica in replicas:
            backlog = sum(not request.ended for request in replica.backlog)
            own = sum(request.leaving is None for request in replica.running.values())
            leaving = ((one, one.route) for one in running if one.leaving is not None)
            placed = {one for one, route in leaving if route is not None and route.key == replica.peer}
            assert replica.placed == placed, f"places of {replica.name}"
            is_counted = replica.view is None or replica.view.load == own + len(replica.placed) + backlog
            assert is_counted, f"load of {replica.name}"


def _below_share(replica: ReplicaState) -> Callable[[Caller], bool] | None:
    """Whether a caller may have another request at a replica; None: every caller may.

    Where it is full, a caller below an even share of the limit may, so that none waits for the requests of others to
    end: the replica then has twice its limit at most, and shares its rows.
    """
    num_taken, limit = replica.num_taken, replica.limit
    if num_taken < limit:
        return None
    taken = Counter(request.caller for request in (*replica.running.values(), *replica.placed))
    share = limit // (len(taken) + 1) if num_taken < 2 * limit else 0
    return lambda caller: taken[caller] < share


def _has_adapter(view: ReplicaView, request: PendingRequest) -> bool:
    return request.adapter is None or request.adapter in view.adapters


def _drained(queue: FairQueue) -> list[PendingRequest]:
    """Its requests in the order in which they would be served."""
    return [request for _ in range(len(queue)) if (request := queue.pop()) is not None]


def _continues(piece: Piece, request: PendingRequest) -> bool:
    """Whether a piece begins exactly where the client's tokens end."""
    if not 0 <= piece.index < len(request.sequences) or len(piece.tokens) % 4:
        return False
    return piece.offset * 4 == len(request.sequences[piece.index].tokens)
