"""What the ranks of a job say of themselves in its rendezvous store, for those whose collective has failed.

An engine's ranks have links (`heartbeat`). Data-parallel replicas have none: a rank learns of another replica's failure
by a collective that breaks or times out, and reads here whose failure that was.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Collection
from typing import NamedTuple

import torch.distributed as dist

_KEY = "megatron_infer/report/"
CONNECT_S = 1.0
"""Seconds that a connection may take."""
BACKLOG = 512
"""Connections that wait at a port: no one takes them."""


class Report(NamedTuple):
    """A failure of a rank of the job, as that rank or another one that has found it reports it."""

    rank: int
    phase: str
    reason: str


class PeerReports:
    """This rank's report, and those of the job's other ranks that have made one of these.

    A process that ends cannot report: each rank has a port that no one reads, whose connections are refused once the
    process has ended.
    """

    def __init__(self, address: str, linked: Collection[int]) -> None:
        """address: of this machine, where the other ranks can reach it. linked: ranks that `Heartbeat` tells of, this
        one too."""
        self._store = dist.distributed_c10d._get_default_store()
        self.rank = dist.get_rank()
        self._others = [rank for rank in range(dist.get_world_size()) if rank not in linked]
        self._own = [address, 0]
        with contextlib.suppress(OSError):  # not an address of this process: it has no port, and is not found gone
            self._socket = socket.create_server((address, 0), backlog=BACKLOG)
            self._own = [address, self._socket.getsockname()[1]]
        self._failure: Report | None = None
        self._has_met = False
        self._known: dict[int, tuple[str, int]] = {}
        self._write(None)

    @property
    def has_told(self) -> bool:
        return self._failure is not None

    def tell(self, report: Report | None) -> None:
        """report: for the other ranks; None: this rank computes again."""
        if report != self._failure:
            self._write(report)

    def meet(self) -> None:
        """Learn the ports of the others, once: the process that has the store may be the one that ends."""
        if not self._has_met:
            self._has_met = True
            self._read()

    def find(self) -> Report | None:
        """The failure of a rank that is not linked; None: none has reported or ended yet."""
        if reports := self._read():
            return min(reports, key=lambda one: (one[0] != one[1].rank, one[0]))[1]
        gone = next((rank for rank, address in self._known.items() if _refuses(address)), None)
        return None if gone is None else Report(gone, "", "its process has ended")

    def _write(self, failure: Report | None) -> None:
        self._failure = failure
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._store.set(f"{_KEY}{self.rank}", json.dumps([*self._own, failure]))

    def _read(self) -> list[tuple[int, Report]]:
        """The failures that are reported, each with the rank that reports it."""
        found = []
        with contextlib.suppress(RuntimeError):
            for rank in self._others:
                if self._store.check([f"{_KEY}{rank}"]):
                    address, port, failure = json.loads(self._store.get(f"{_KEY}{rank}"))
                    self._known[rank] = address, port
                    if failure is None:
                        continue
                    del self._known[rank]  # it has named a rank, and may end
                    if failure[0] in self._others:
                        found.append((rank, Report(*failure)))
        return found


def _refuses(address: tuple[str, int]) -> bool:
    if not address[1]:
        return False
    try:
        socket.create_connection(address, timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # a network that is slow or does not let it through
        return False
    return False
