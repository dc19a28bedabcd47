"""TCP connections between the leader and every other rank of an engine: one for calls, one for heartbeats.

The host decisions of an engine are sent here, and not over the process groups of the model: every wait has a deadline
whatever the groups' backend, a dead peer is an end of file, and a round trip takes a tenth of gloo's.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_infer.distributed.wire import Link, LinkClosed
from megatron_infer.errors import RankFailure

_ACCEPT_SLICE_S = 0.2
HELLO_TIMEOUT_S = 5.0
"""Seconds that a connection has to show the token."""
MAX_HELLO_BYTES = 4096
"""Largest first message of a connection that has not shown the token."""

Gather = Callable[[str], list[str]]
"""Own text -> the texts of all ranks, by rank of the engine; over the process group, before there are connections."""


class RankLink(Link):
    """A link over TCP."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(connection)


@dataclass(frozen=True, slots=True)
class RankLinks:
    """This rank's connections by peer: the leader (rank 0) has both to every other rank, the others to the leader."""

    rank: int
    size: int
    calls: dict[int, RankLink]
    heartbeats: dict[int, RankLink]

    def close(self) -> None:
        for link in (*self.calls.values(), *self.heartbeats.values()):
            link.close()


def connect(rank: int, size: int, gather: Gather, *, timeout_s: float, hosts: Sequence[str] = ()) -> RankLinks:
    """Connect the ranks of an engine; every rank calls it. The port closes once all have connected with the token.

    hosts: addresses that other machines may reach this process by. Raises RankFailure if a rank does not connect.
    """
    machines = gather(_machine())
    token = secrets.token_hex(16)
    if rank:
        leader = json.loads(gather("")[0])
        local = machines[rank] == machines[0]
        return _connect_to_leader(rank, size, leader, local=local, deadline=time.monotonic() + timeout_s)
    is_one_machine = all(machine == machines[0] for machine in machines)
    with socket.create_server(("127.0.0.1" if is_one_machine else "", 0), backlog=max(128, 2 * size)) as server:
        offer = {"port": server.getsockname()[1], "token": token, "hosts": list(dict.fromkeys(hosts))}
        gather(json.dumps(offer))
        return _accept_ranks(server, size, token, deadline=time.monotonic() + timeout_s)


def _accept_ranks(server: socket.socket, size: int, token: str, *, deadline: float) -> RankLinks:
    links = RankLinks(0, size, {}, {})
    waiting: dict[RankLink, float] = {}  # connections without a hello, and when they are closed
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(links.calls) + len(links.heartbeats) < 2 * (size - 1):
            if time.monotonic() > deadline:
                missing = next(r for r in range(1, size) if r not in links.calls or r not in links.heartbeats)
                raise RankFailure(missing, "start", "it did not connect")
            ready = [key.fileobj for key, _ in selector.select(_ACCEPT_SLICE_S)]
            if server in ready:
                link = RankLink(server.accept()[0])
                waiting[link] = time.monotonic() + HELLO_TIMEOUT_S
                selector.register(link, selectors.EVENT_READ)
            for link, until in list(waiting.items()):
                hello = _hello_of(link, token) if link in ready else None
                if hello is None and time.monotonic() < until:
                    continue
                selector.unregister(link)
                del waiting[link]
                if not hello:  # not a rank of this engine
                    link.close()
                    continue
                (links.calls if hello["for"] == "calls" else links.heartbeats)[hello["rank"]] = link
                link.send("welcome")
    for link in waiting:
        link.close()
    return links


def _hello_of(link: RankLink, token: str) -> dict[str, Any] | None:
    """The first message of a connection; {} if it does not hold the token, None: it has not come."""
    try:
        hello = link.receive(0.0, max_bytes=MAX_HELLO_BYTES)
    except LinkClosed:
        return {}
    if hello is None:
        return None
    shown = str(hello.get("token")) if isinstance(hello, dict) else ""
    return hello if hmac.compare_digest(shown.encode("utf-8", "replace"), token.encode()) else {}


def _connect_to_leader(rank: int, size: int, leader: dict[str, Any], *, local: bool, deadline: float) -> RankLinks:
    hosts = (["127.0.0.1"] if local else []) + leader["hosts"]
    links = {}
    for purpose in ("calls", "heartbeats"):
        link = None
        while link is None:
            link = _dial(hosts, leader["port"], {"token": leader["token"], "rank": rank, "for": purpose})
            if link is None and time.monotonic() > deadline:
                raise RankFailure(0, "start", f"cannot be reached at {', '.join(hosts)}, port {leader['port']}")
        links[purpose] = link
    return RankLinks(rank, size, {0: links["calls"]}, {0: links["heartbeats"]})


def _dial(hosts: Sequence[str], port: int, hello: dict[str, Any]) -> RankLink | None:
    for host in hosts:
        try:
            link = RankLink(socket.create_connection((host, port), timeout=5.0))
            link.send(hello)
            if link.receive(5.0) == "welcome":
                return link
            link.close()
        except (OSError, LinkClosed):
            continue
    time.sleep(_ACCEPT_SLICE_S)
    return None


def _machine() -> str:
    """Equal for processes that share a loopback interface."""
    name = socket.gethostname()
    try:
        return (
            f"{name} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
        )
    except OSError:
        return name  # not Linux
