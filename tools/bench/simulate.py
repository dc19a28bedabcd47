"""The coordinator at scale: its own code on a simulated clock, before thousands of simulated replicas.

    python tools/bench/simulate.py [--replicas 16,256,4096] [--requests 250] [--traffic chat] [--roles] [--chaos]

Messages are encoded and decoded as on the wire; sockets are left out (`coordinator.py` has them). A simulated replica
has rows, a prefix cache and a speed. Traffic: `chat` are conversations after shared system prompts, with heavy-tailed
lengths; `families` are single prompts after shared prefixes; --trace reads a recorded one in Mooncake's format (a JSON
object a line: input_length, output_length, hash_ids of 512 tokens each). --chaos: a tenth of the replicas are lost,
half of them by silence, and all get new weights in waves that are drained with move. Each token must come once.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import os
import random
import statistics
import sys
import time
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
from megatron_infer.coordinator.served_engine import stats_of
from megatron_infer.outputs.schema import Piece
from megatron_infer.scheduler.context.block_digest import digest_of, root_of, salted
from megatron_infer.testing.echo import EchoEngine

BLOCK, ROWS, BLOCKS = 64, 64, 8192
"""Of a replica: tokens of a block, requests at once, blocks of the cache."""
STEP_S, PREFILL_PER_S, MOVE_S, OUTPUT_S = 0.03, 20_000, 0.05, 4.0
"""Seconds of a token, prompt tokens a second, seconds of a move, seconds between two outputs of a request."""
RESTART_S, TICK_S, BEAT_S, THINK_S, PREFILL_SHARE = 15.0, 0.1, 0.5, 10.0, 0.25
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


def families(rng: random.Random) -> Iterator[Talk]:
    """One prompt of 64 tokens after one of 1,000 prefixes of 512 tokens; 128 tokens are drawn."""
    prefixes = [rng.randbytes(4 * 512) for _ in range(1000)]
    while True:
        yield Talk(rng.choice(prefixes), [(64, 128)])


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
        piece = Piece(0, drawn, request.answer[4 * drawn : 4 * end], "", "length" if end == total else None)
        if end == total or count == 1:
            self.hold(request.talk.chain(self.now().root, len(request.prompt) // 4 + end - 1))
        self.send(protocol.Output(run.number, self.incarnation, [piece], end == total))
        if end == total:
            self.leave(run.number)
        elif run.hands_out:
            self.hand_out(run.number)
        else:
            more = min(int(OUTPUT_S / STEP_S), total - end)
            self.world.after(more * STEP_S, self.draw, start, run, end, more)

    def hand_out(self, number: int) -> None:
        self.send(protocol.HandedOut(number, self.incarnation, "parcel"))
        self.leave(number)

    def leave(self, number: int) -> None:
        del self.runs[number]
        self.busy -= all(run.number != number for run in self.queue)
        self.start()

    def lose(self, by_silence: bool) -> None:
        self.is_up = False
        self.runs.clear()
        self.queue.clear()
        if not by_silence:
            self.world.timed("loss", self.world.core.unreachable, self.peer)
        self.world.after(RESTART_S, self.begin)

    def update(self) -> None:
        """Other weights: nothing that is cached holds."""
        self.version = 1
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
        self.requests: dict[int, Request] = {}
        self.ended: list[Request] = []
        options = CoordinatorOptions(policy=args.policy, alpha=args.alpha, max_queue=10**7, max_attempts=100)
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
        self.rate = args.load / max(drawn / (num_replicas - num_prefill), read / PREFILL_PER_S / num_readers)
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
            self.ended.append(self.requests.pop(output.number))
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

    def update_in_waves(self, waves: list[list[SimReplica]]) -> None:
        """Empty a wave, give it other weights, and go on with the next. At the end the version is in force."""
        if not waves:
            self.to_core(self.clients[0], protocol.Control(0, "set_weight_version", {"version": 1}, 60.0))
            return
        for one in waves[0]:
            self.to_core(self.clients[0], protocol.Drain(0, one.name, move=True))
        self.end_wave(waves)

    def end_wave(self, waves: list[list[SimReplica]]) -> None:
        if any(one.runs for one in waves[0]):
            self.after(TICK_S, self.end_wave, waves)
            return
        for one in waves[0]:
            one.update()
            self.to_core(self.clients[0], protocol.Drain(0, one.name, end=True))
        self.update_in_waves(waves[1:])


def bytes_of(root: Any) -> int:
    """Of all objects that can be reached from `root`."""
    seen, todo, total = {id(root)}, [root], 0
    while todo:
        one = todo.pop()
        total += sys.getsizeof(one)
        is_struct = isinstance(one, msgspec.Struct)
        for part in [getattr(one, name) for name in one.__struct_fields__] if is_struct else gc.get_referents(one):
            if id(part) not in seen and not isinstance(part, SHARED):
                seen.add(id(part))
                todo.append(part)
    return total


def simulate(num_replicas: int, talks: Iterator[Talk], args: argparse.Namespace) -> dict[str, Any]:
    world = World(num_replicas, talks, args)
    start_ms = sum(world.ns.values()) / 1e6
    world.ns.clear()
    world.tick()
    world.begin_talks()
    if args.chaos:
        world.lose_some()
        replicas, size = list(world.replicas.values()), max(1, num_replicas // 16)
        waves = [replicas[start : start + size] for start in range(0, num_replicas, size)]
        world.after(world.seconds / 4, world.update_in_waves, waves)
    world.run(lambda: not world.left)
    memory = bytes_of(world.core)
    world.run(lambda: not world.requests)
    world.core.check()
    ns, tokens, counts, ended = world.ns, world.tokens, world.core.counts, world.ended
    total, upkeep, busy_s = len(ended), ns["Beat"] + ns["tick"], world.clock
    first = sorted(one.first_s for one in ended)
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
        "wait_p99": sorted(one.waited_s for one in ended)[total * 99 // 100],
        "first_p50": first[total // 2],
        "first_p99": first[total * 99 // 100],
        "MB": memory / 1e6,
        "moved": counts.moved,
        "resent": counts.resent,
        "lost": counts.replicas_lost,
        "ms": " ".join(f"{kind} {value / 1e6:,.0f}" for kind, value in ns.most_common()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="16,256", help="one or several; default: %(default)s")
    parser.add_argument("--requests", type=int, default=250, help="for each replica; default: %(default)s")
    parser.add_argument("--traffic", choices=["chat", "families"], default="chat")
    parser.add_argument("--trace", type=Path, metavar="FILE")
    parser.add_argument("--policy", default="longest_prefix")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--load", type=float, default=0.6, help="share of what replicas can do; default: %(default)s")
    parser.add_argument("--roles", action="store_true", help="a quarter are prefill_only, the others decode_only")
    parser.add_argument("--chaos", action="store_true")
    args = parser.parse_args()
    for count in (int(one) for one in args.replicas.split(",")):
        rng = random.Random(0)
        talks = recorded(args.trace) if args.trace else {"chat": chat, "families": families}[args.traffic](rng)
        row = simulate(count, talks, args)
        print(*(f"{name} {value if isinstance(value, str) else format(value, ',.4g')}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
