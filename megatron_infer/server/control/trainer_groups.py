"""Groups of the engines with a trainer, and where the engines may meet it.

A caller names an address and a port, to which the processes of the engines then connect. Without a rule a caller could
have them knock at any service that this machine reaches.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence

from megatron_infer.server.body_types import Body
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.control.weight_updates import WeightUpdates
from megatron_infer.server.endpoint import Call
from megatron_infer.server.http_errors import ApiError, bad_request

MAX_NAME_CHARS = 128
LEAST_PORT = 1024
"""Services of a system listen below."""


class GroupFields(Body, kw_only=True):
    """How all dialects name a group's members and where they meet."""

    master_address: str
    master_port: int | str
    rank_offset: int
    world_size: int
    backend: str | None = None
    """None: what the engines' devices have, gloo or nccl."""


class TrainerGroups:
    """Has the engines join groups."""

    def __init__(self, machine: ControlMachine, updates: WeightUpdates, hosts: Sequence[str]) -> None:
        """hosts: `ServerConfig.trainer_host`."""
        self._machine = machine
        self._updates = updates
        self._hosts = hosts

    async def join(self, call: Call, name: str, given: GroupFields, *, kind: str) -> None:
        """name: of the group in later calls. kind: `rl.trainer_group.KINDS`. Raises ApiError."""
        client = self._machine.client
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise bad_request(f"group_name has {len(name)} characters, 1 to {MAX_NAME_CHARS}", "group_name")
        port = checked_port(given.master_port)
        host = given.master_address
        address = await client.run_in_thread(trainer_address, host, call.caller, self._hosts)
        await client.refresh()
        where = {
            "address": address,
            "port": port,
            "world_size": given.world_size,
            "rank_offset": given.rank_offset,
            "backend": given.backend or "",
            "kind": kind,
            "prefix": name if kind == "torch" else f"tcp://{host if ':' not in host else f'[{host}]'}:{port}",
        }
        await self._updates.join(name, where, sum(self._machine.ranks))


def checked_port(given: int | str) -> int:
    """Raises ApiError 400. Some clients send it as text."""
    port = int(given) if isinstance(given, int) or (given.isascii() and given.isdigit() and len(given) < 6) else 0
    if not LEAST_PORT <= port < 1 << 16:
        text = f"master_port is {str(given)[:40]!r}; a number from {LEAST_PORT} to {(1 << 16) - 1}"
        raise bad_request(text, "master_port", "invalid_value")
    return port


def trainer_address(given: str, caller: str, hosts: Sequence[str]) -> str:
    """The IP address that engines may connect to. Raises ApiError: 400 for no host, 403 for one that is not allowed.

    Allowed are the caller's own address, all of this machine for a caller on this machine, and `hosts`. The name is
    looked up here, once: engines get the address that was checked.
    """
    found = [one for one in _addresses_of(given.strip("[]")) if not (one.is_unspecified or one.is_multicast)]
    if not found:
        raise bad_request(f"master_address is {given[:80]!r}, which is no host", "master_address", "invalid_value")
    asking, networks = _addresses_of(caller), [network for host in hosts for network in _networks_of(host)]
    for address in found:
        is_own = address in asking or (_is_here(address) and any(map(_is_here, asking)))
        if is_own or any(address.version == network.version and address in network for network in networks):
            return str(address)
    text = f"master_address {given[:80]!r} is not the address that asks; start with --trainer-host to allow others"
    raise ApiError(403, text, param="master_address", code="trainer_host_not_allowed")


def _addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = {str(one[4][0]).partition("%")[0] for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return []
    addresses = [ipaddress.ip_address(one) for one in sorted(found)]
    return [getattr(address, "ipv4_mapped", None) or address for address in addresses]


def _networks_of(host: str) -> Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    if "/" in host:
        return [ipaddress.ip_network(host)]
    return [ipaddress.ip_network(address) for address in _addresses_of(host)]


def _is_here(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether it is an address of this machine."""
    with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as one:
        try:
            one.bind((str(address), 0))
        except OSError:
            return False
    return True
