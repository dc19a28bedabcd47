"""The coordinator at scale: its own code on a simulated clock, before thousands of simulated replicas.

    python tools/bench/simulate.py [--replicas 16,256,4096] [--requests 250] [--trace FILE] [--roles] [--chaos]

Messages are encoded and decoded as on the wire; sockets are left out (`coordinator.py` has them). A simulated replica
has rows, a prefix cache and a speed. Traffic are conversations after shared system prompts, with heavy-tailed lengths;
--trace reads a recorded one in Mooncake's format (a JSON object a line: input_length, output_length, hash_ids of 512
tokens each). Replicas get LOAD of the requests that they can answer. --chaos: a tenth of the replicas are lost,
half of them by silence, and all get new weights again and again, in waves that are drained with move. Each token must
come once.

"core MB" is what the coordinator keeps besides the prefix tables, at the start, at each quarter and after the last
answer. "table MB" are the prefix tables at the end, "RSS MB" the process with all simulated replicas at its largest.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import os
import random
import resource
import statistics
import sys
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterator
from itertools import cycle
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec

from megatron_infer.config.coordinator_options import CoordinatorOptions, ReplicaRole
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.core import CoordinatorCore
from megatron_infer.coordinator.router import PrefixIndex, PrefixTable
from megatron_infer.coordinator.served_engine import stats_of
from megatron_infer.outputs.schema import Piece
from megatron_infer.scheduler.context.block_digest import digest_of, root_of, salted
from megatron_infer.utils.process_memory import full_collections_by_hand

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from echo import EchoEngine

BLOCK, ROWS, BLOCKS = 64, 64, 8192
"""Of a replica: tokens of a block, requests at once, blocks of the cache."""
STEP_S, PREFILL_PER_S, MOVE_S, OUTPUT_S = 0.03, 20_000, 0.05, 4.0
"""Seconds of a token, prompt tokens a second, seconds of a move, seconds between two outputs of a request."""
RESTART_S, TICK_S, BEAT_S, THINK_S, PREFILL_SHARE = 15.0, 0.1, 0.5, 10.0, 0.25
LOAD = 0.6
"""Share of what the replicas can do."""
LOAD_S, UPDATE_S = 2.0, 20.0
"""Seconds that an empty replica takes for other weights; from the end of an update to the next one, at least."""
FIGURES = stats_of(EchoEngine())
SHARED = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, int, float)


class Talk:
    """A conversation: its tokens so far, and the turns that follow, each with the tokens asked and answered."""

    def __init__(self, prefix: bytes, turns: list[tuple[int, int]]) -> None:
        self.tokens, self.turns = prefix, turns
        self._root, self._digests = b"", [b""]

    def chain(self, root: bytes, count: int) -> list[bytes]:
        """Digests of the full blocks of its first `count` tokens."""
        if root != self._root:
            self._root, self._digests = root, [salted(root, "")]
        while len(self._digests) <= count // BLOCK:
            start = 4 * BLOCK * (len(self._digests) - 1)
            self._digests.append(digest_of(self._digests[-1] + self.tokens[start : start + 4 * BLOCK]))
        return self._digests[1 : 1 + count // BLOCK]


def chat(rng: random.Random) -> Iterator[Talk]:
    """A few turns after one of 200 system prompts, of which some are far more common than others."""
    systems = [rng.randbytes(4 * rng.randrange(128, 2048)) for _ in range(200)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    while True:
        turns = [
            (int(rng.lognormvariate(4, 1)) + 8, min(2000, int(rng.lognormvariate(5, 1)) + 1))
            for _ in range(min(20, 1 + int(rng.expovariate(1 / 3))))
        ]
        yield Talk(rng.choices(systems, weights)[0], turns)


def recorded(path: Path) -> Iterator[Talk]:
    """The requests of a trace, again and again as those of other users; equal hashes are equal tokens."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, one in enumerate(cycle(lines)):
        users = number // len(lines)
        tokens = b"".join(random.Random(f"{users} {name}").randbytes(4 * 512) for name in one["hash_ids"])
        yield Talk(tokens[: 4 * max(0, one["input_length"] - 1)], [(1, max(1, one["output_length"]))])


def leading(chain: list[bytes], held: Container[bytes]) -> int:
    """How many leading blocks are held."""
    return next((count for count, digest in enumerate(chain) if digest not in held), len(chain))


class Request:
    def __init__(self, talk: Talk, answer: bytes, now: float) -> None:
        self.talk, self.prompt, self.answer, self.came = talk, talk.tokens, answer, now
        self.num_got = 0
        self.waited_s = self.first_s = -1.0


class SimReplica:
    """Rows, a prefix cache whose least recently used blocks are dropped, and a queue."""

    def __init__(self, world: World, name: str, role: ReplicaRole) -> None:
        self.world, self.name, self.peer, self.role = world, name, name.encode(), role
        self.version = self.num_starts = 0
        self.begin()

    def begin(self) -> None:
        """Start, or start again: another incarnation with an empty cache."""
        self.runs: dict[int, Request] = {}
        self.drawn: dict[int, tuple[int, float]] = {}
        """Of the runs that have begun: tokens sent, and when."""
        self.queue: deque[protocol.Run] = deque()
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        self.busy, self.prompts_until, self.is_up = 0, 0.0, True
        self.num_starts += 1
        self.incarnation = self.world.core.enter(self.peer, "replica", self.name, os.urandom(8))
        sizes = {"block_size": BLOCK, "capacity": ROWS, "model": "m", "policy": "longest_prefix", "alpha": 0.5}
        info = protocol.EngineInfo(now=self.now(), **sizes)
        more = {"role": self.role, "parcels": "tcp://10.0.0.1:1", "takes_commands": True}
        self.send(protocol.Register(self.incarnation, info, **more))
        self.beat(self.num_starts)

    def now(self) -> protocol.EngineNow:
        return protocol.EngineNow(root=root_of(model="m", weight_version=self.version), weight_version=self.version)

    def send(self, message: protocol.Message) -> None:
        if self.is_up:
            self.world.to_core(self.peer, message)

    def beat(self, start: int) -> None:
        if self.is_up and start == self.num_starts:
            free_rows = max(0, ROWS - len(self.runs))
            self.send(protocol.Beat(self.incarnation, self.now(), free_rows, 0, 0.01, FIGURES))
            self.world.after(BEAT_S, self.beat, start)

    def receive(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Run) and message.incarnation == self.incarnation:
            self.runs[message.number] = self.world.requests[message.seed]
            self.queue.append(message)
            self.start()
        elif isinstance(message, protocol.HandOut) and message.number in self.runs:
            sent, when = self.drawn.get(message.number, (0, self.world.clock))
            left = len(self.runs[message.number].answer) // 4 - sent
            if (count := min(left - 1, int((self.world.clock - when) / STEP_S))) > 0:
                self.output(message.number, sent, sent + count)
            self.hand_out(message.number)
        elif isinstance(message, protocol.Command):
            self.send(protocol.Done(message.number, self.incarnation, protocol.Answer(ok=True)))

    def start(self) -> None:
        while self.queue and self.busy < ROWS:
            run = self.queue.popleft()
            if run.number not in self.runs:
                continue
            self.busy += 1
            request, world = self.runs[run.number], self.world
            drawn = len(run.kept[0].tokens) // 4 if run.kept else 0
            length = len(request.prompt) // 4 + drawn
            chain = request.talk.chain(self.now().root, length - 1)
            num_cached = leading(chain, self.cache)
            self.hold(chain[:num_cached])
            if not drawn:
                ideal = leading(chain, world.published)
                world.tokens.update(prompt=length, cached=num_cached * BLOCK, ideal=ideal * BLOCK)
                request.waited_s = world.clock - request.came
            ready = world.clock + MOVE_S
            if run.parcel is None:
                ready = max(world.clock, self.prompts_until) + (length - num_cached * BLOCK) / PREFILL_PER_S
                self.prompts_until = ready
            world.after(ready - world.clock, self.draw, self.num_starts, run, drawn, 1)

    def hold(self, chain: list[bytes]) -> None:
        """These blocks are used now; parents stay longer than children. The coordinator hears what is new or gone."""
        new = [digest for digest in chain if digest not in self.cache]
        for digest in reversed(chain):
            self.cache[digest] = None
            self.cache.move_to_end(digest)
        gone = [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - BLOCKS)]
        if new or gone:
            self.world.published.update(new)
            root = self.now().root
            self.send(protocol.PrefixNews(self.incarnation, root, False, b"".join(gone), b"".join(new)))

    def draw(self, start: int, run: protocol.Run, drawn: int, count: int) -> None:
        """Send the next `count` tokens."""
        request = self.runs.get(run.number)
        if start != self.num_starts or request is None:
            return
        total = len(request.answer) // 4
        end = min(total, drawn + count)
        if end == total or count == 1:
            self.hold(request.talk.chain(self.now().root, len(request.prompt) // 4 + end - 1))
        self.output(run.number, drawn, end)
        if end == total:
            self.leave(run.number)
        elif run.hands_out:
            self.hand_out(run.number)
        else:
            more = min(int(OUTPUT_S / STEP_S), total - end)
            self.world.after(more * STEP_S, self.draw, start, run, end, more)

    def output(self, number: int, start: int, end: int) -> None:
        answer = self.runs[number].answer
        has_ended = 4 * end == len(answer)
        self.drawn[number] = end, self.world.clock
        piece = Piece(0, start, answer[4 * start : 4 * end], "", "length" if has_ended else None)
        self.send(protocol.Output(number, self.incarnation, [piece], has_ended))

    def hand_out(self, number: int) -> None:
        self.send(protocol.HandedOut(number, self.incarnation, "parcel"))
        self.leave(number)

    def leave(self, number: int) -> None:
        del self.runs[number]
        self.drawn.pop(number, None)
        self.busy -= all(run.number != number for run in self.queue)
        self.start()

    def lose(self, by_silence: bool) -> None:
        self.is_up = False
        self.runs.clear()
        self.drawn.clear()
        self.queue.clear()
        if not by_silence:
            self.world.timed("loss", self.world.core.unreachable, self.peer)
        self.world.after(RESTART_S, self.begin)

    def update(self, version: int) -> None:
        """Other weights: nothing that is cached holds."""
        self.version = version
        self.cache.clear()
        self.send(protocol.PrefixNews(self.incarnation, self.now().root, True, b"", b""))
        self.send(protocol.Beat(self.incarnation, self.now(), ROWS, 0, 0.0, FIGURES))


class World:
    """The coordinator's core, its peers, a queue of events, and the conversations that begin at random times."""

    def __init__(self, num_replicas: int, talks: Iterator[Talk], args: argparse.Namespace) -> None:
        self.clock, self.rng, self.talks = 0.0, random.Random(num_replicas), talks
        self._events: list[Any] = []
        self._num_events = self._num_asked = 0
        self._is_delivering = False
        self._sent: deque[tuple[bytes, protocol.Message]] = deque()
        self.ns: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.published: set[bytes] = set()
        self.num_updated = 0
        """Replicas that have got other weights, each time."""
        self.requests: dict[int, Request] = {}
        self.waited_s, self.first_s = array("d"), array("d")
        """Of the requests that have ended."""
        options = CoordinatorOptions(policy="longest_prefix", alpha=0.5, max_queue=10**7, max_attempts=100)
        self.core = CoordinatorCore(options, self._send, clock=lambda: self.clock)
        self.clients = [f"client{index}".encode() for index in range(8)]
        for peer in self.clients:
            self.core.enter(peer, "client", peer.decode(), os.urandom(8))
        num_prefill = int(num_replicas * PREFILL_SHARE) if args.roles else 0
        roles = [ReplicaRole.PREFILL] * num_prefill
        roles += [ReplicaRole.DECODE if args.roles else ReplicaRole.BOTH] * (num_replicas - num_prefill)
        self.replicas: dict[bytes, SimReplica] = {}
        for index, role in enumerate(roles):
            replica = SimReplica(self, f"r{index}", role)
            self.replicas[replica.peer] = replica
        self.left = args.requests * num_replicas
        sample = [next(talks) for _ in range(300)]
        drawn = statistics.mean(sum(count for _, count in one.turns) for one in sample) * STEP_S / ROWS
        read = statistics.mean(len(one.tokens) // 8 + sum(asked for asked, _ in one.turns) for one in sample)
        num_readers = num_prefill or num_replicas
        self.rate = LOAD / max(drawn / (num_replicas - num_prefill), read / PREFILL_PER_S / num_readers)
        self.seconds = self.left / self.rate / statistics.mean(len(one.turns) for one in sample)

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.clock + seconds, self._num_events, call, args))

    def run(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.clock, _, call, args = heapq.heappop(self._events)
            call(*args)

    def timed(self, kind: str, call: Callable[..., Any], *args: Any) -> None:
        """CPU time of the coordinator, with decoding and encoding; then its messages are delivered."""
        began = time.thread_time_ns()
        call(*args)
        self.ns[kind] += time.thread_time_ns() - began
        self.calls[kind] += 1
        if self._is_delivering:
            return
        self._is_delivering = True
        while self._sent:
            peer, message = self._sent.popleft()
            if peer in self.replicas and self.replicas[peer].is_up:
                self.replicas[peer].receive(message)
            elif isinstance(message, protocol.Output):
                self._collect(message)
        self._is_delivering = False

    def to_core(self, peer: bytes, message: protocol.Message) -> None:
        data = protocol.encode(message)
        self.timed(type(message).__name__, lambda: self.core.receive(peer, protocol.decode(data)))

    def _send(self, peer: bytes, message: protocol.Message) -> None:
        protocol.encode(message)
        self._sent.append((peer, message))

    def _collect(self, output: protocol.Output) -> None:
        request = self.requests[output.number]
        assert output.refused is None and output.error is None, output
        for piece in output.pieces:
            assert piece.offset == request.num_got, f"token {piece.offset} after {request.num_got}"
            request.num_got += len(piece.tokens) // 4
        if request.first_s < 0:
            request.first_s = self.clock - request.came
        if output.finished:
            assert request.num_got * 4 == len(request.answer), "an answer has ended early"
            del self.requests[output.number]
            self.waited_s.append(request.waited_s)
            self.first_s.append(request.first_s)
            if request.talk.turns:
                self.after(self.rng.expovariate(1 / THINK_S), self.ask, request.talk)

    def begin_talks(self) -> None:
        if self.left:
            self.ask(next(self.talks))
            self.after(self.rng.expovariate(self.rate), self.begin_talks)

    def ask(self, talk: Talk) -> None:
        if not self.left:
            return
        self.left -= 1
        self._num_asked += 1
        asked, drawn = talk.turns.pop(0)
        talk.tokens += self.rng.randbytes(4 * asked)
        number, answer = self._num_asked, self.rng.randbytes(4 * drawn)
        request = self.requests[number] = Request(talk, answer, self.clock)
        talk.tokens += answer
        params = {"max_tokens": drawn, "temperature": 1.0, "top_p": 0.95}
        submit = protocol.Submit(number, request.prompt, None, "", params, number, False, f"user{number % 997}")
        self.to_core(self.clients[number % len(self.clients)], submit)

    def tick(self) -> None:
        self.timed("tick", self.core.tick)
        for peer in self.clients:
            self.core.receive(peer, protocol.Ping())
        self.after(TICK_S, self.tick)

    def lose_some(self) -> None:
        for one in self.rng.sample(list(self.replicas.values()), max(1, len(self.replicas) // 10)):
            self.after(self.rng.uniform(0.2, 0.8) * self.seconds, one.lose, self.rng.random() < 0.5)

    def update_in_waves(self, version: int) -> None:
        """Empty a wave of replicas, give it other weights, and go on with the next. Then the version is in force."""
        replicas, size = list(self.replicas.values()), max(1, len(self.replicas) // 16)
        self._update_wave(version, [replicas[start : start + size] for start in range(0, len(replicas), size)])

    def _update_wave(self, version: int, waves: list[list[SimReplica]]) -> None:
        if not waves:
            self.to_core(self.clients[0], protocol.Control(0, "set_weight_version", {"version": version}, 60.0))
            self.after(max(UPDATE_S, self.seconds / 8), self.update_in_waves, version + 1)
            return
        for one in waves[0]:
            self.to_core(self.clients[0], protocol.Drain(0, one.name, move=True))
        self._end_wave(version, waves)

    def _end_wave(self, version: int, waves: list[list[SimReplica]]) -> None:
        if any(one.runs for one in waves[0]):
            self.after(TICK_S, self._end_wave, version, waves)
        else:
            self.after(LOAD_S, self._load, version, waves)

    def _load(self, version: int, waves: list[list[SimReplica]]) -> None:
        for one in waves[0]:
            one.update(version)
            self.to_core(self.clients[0], protocol.Drain(0, one.name, end=True))
        self.num_updated += len(waves[0])
        self._update_wave(version, waves[1:])


def bytes_of(root: Any, *, without: tuple[type, ...] = ()) -> int:
    """Of all objects that can be reached from `root`. without: and not through objects of these classes."""
    seen, todo, total = {id(root)}, [root], 0
    while todo:
        one = todo.pop()
        total += sys.getsizeof(one)
        is_struct = isinstance(one, msgspec.Struct)
        for part in [getattr(one, name) for name in one.__struct_fields__] if is_struct else gc.get_referents(one):
            if id(part) not in seen and not isinstance(part, SHARED + without):
                seen.add(id(part))
                todo.append(part)
    return total


def core_bytes_of(world: World) -> int:
    return bytes_of(world.core, without=(PrefixIndex, PrefixTable))


def simulate(num_replicas: int, talks: Iterator[Talk], args: argparse.Namespace) -> dict[str, Any]:
    world = World(num_replicas, talks, args)
    start_ms = sum(world.ns.values()) / 1e6
    world.ns.clear()
    world.tick()
    world.begin_talks()
    if args.chaos:
        world.lose_some()
        world.after(world.seconds / 8, world.update_in_waves, 1)
    core_bytes = [core_bytes_of(world)]
    for quarter in (3, 2, 1, 0):
        world.run(lambda: world.left <= quarter * args.requests * num_replicas // 4)  # noqa: B023
        core_bytes.append(core_bytes_of(world))
    world.run(lambda: not world.requests)
    world.core.check()
    core_bytes.append(core_bytes_of(world))
    ns, tokens, counts = world.ns, world.tokens, world.core.counts
    waited, first = sorted(world.waited_s), sorted(world.first_s)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total, upkeep, busy_s = len(first), ns["Beat"] + ns["tick"], world.clock
    return {
        "replicas": num_replicas,
        "requests": total,
        "per_s": total / busy_s,
        "us_a_request": (sum(ns.values()) - upkeep) / total / 1e3,
        "us_submit": ns["Submit"] / total / 1e3,
        "us_output": ns["Output"] / world.calls["Output"] / 1e3,
        "upkeep": upkeep / 1e9 / busy_s,
        "busy": sum(ns.values()) / 1e9 / busy_s,
        "start_ms": start_ms,
        "hit": tokens["cached"] / tokens["prompt"],
        "ideal": tokens["ideal"] / tokens["prompt"],
        "wait_p99": waited[total * 99 // 100],
        "first_p50": first[total // 2],
        "first_p99": first[total * 99 // 100],
        "core MB": " ".join(f"{count / 1e6:.1f}" for count in core_bytes),
        "table MB": (bytes_of(world.core) - core_bytes[-1]) / 1e6,
        "blocks": sum(one["cached_blocks"] for one in world.core.stats()["replicas"]),
        "RSS MB": rss / 1e3,
        "moved": counts.moved,
        "resent": counts.resent,
        "lost": counts.replicas_lost,
        "updated": world.num_updated,
        "ms": " ".join(f"{kind} {value / 1e6:,.0f}" for kind, value in ns.most_common()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="16,256", help="one or several; default: %(default)s")
    parser.add_argument("--requests", type=int, default=250, help="for each replica; default: %(default)s")
    parser.add_argument("--trace", type=Path, metavar="FILE")
    parser.add_argument("--roles", action="store_true", help="a quarter are prefill_only, the others decode_only")
    parser.add_argument("--chaos", action="store_true")
    args = parser.parse_args()
    for count in (int(one) for one in args.replicas.split(",")):
        talks = recorded(args.trace) if args.trace else chat(random.Random(0))
        with full_collections_by_hand():  # as in the coordinator's process
            row = simulate(count, talks, args)
        print(*(f"{name} {value if isinstance(value, str) else format(value, ',.4g')}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
