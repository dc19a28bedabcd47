"""Rollouts on an engine of several ranks: the leader decides, the others step along and receive its groups."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from megatron_infer.engine.command_relay import ROLLOUT
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.given_prompts import GivenPrompts
from megatron_infer.errors import LockstepError, RankFailure, RequestError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.rl import sample_file
from megatron_infer.rl.group_tracker import PREFIX
from megatron_infer.rl.samples import RolloutGroup, group_of


class RolloutRanks:
    """One rank's side of rollouts; in an engine of one rank it only calls on_delivered."""

    def __init__(
        self, engine: DynamicInferenceEngine, *, on_delivered: Callable[[Sequence[RolloutGroup]], None] | None = None
    ) -> None:
        self._engine, self._on_delivered = engine, on_delivered
        self._outputs: dict[str, RequestOutput] = {}
        """On ranks other than the leader: finished groups that the leader has not delivered."""

    @property
    def is_leader(self) -> bool:
        return self._engine.relay.is_leader

    def deliver(
        self,
        groups: Sequence[RolloutGroup],
        *,
        aborted: Collection[str] = (),
        end: bool = False,
        keep: Sequence[str] = (),
        error: str = "",
    ) -> None:
        """On the leader: deliver these groups now, on every rank.

        aborted: ids of groups that the other ranks have no output of; they are sent whole. end: the call ends.
        keep: with `end`, ids of finished groups that a later call delivers.
        """
        self.delivered(groups)
        if not self._engine.rank_group.groups.shares_requests:
            if end:
                self._engine.serve_others()
            return
        sent = [
            [
                group.group_id,
                group.index,
                group.info,
                group.begun_version,
                _encoded(group) if group.group_id in aborted else None,
            ]
            for group in groups
        ]
        given = {"groups": sent, "end": end, "keep": list(keep), "error": error}
        self._engine.relay.meet(ROLLOUT, given, compare=False)

    def delivered(self, groups: Sequence[RolloutGroup]) -> None:
        """On the leader: the caller has these groups."""
        if self._on_delivered is not None:
            self._on_delivered(groups)

    def follow(self, own: GivenPrompts | None = None) -> Iterator[RolloutGroup]:
        """On the other ranks: take part until the leader ends its call -> the groups it delivers.

        own: the prompts of this rank's caller, see `CommandRelay.comparing`.
        """
        ended = False
        try:
            with self._engine.relay.comparing(own):
                while not ended:
                    received = self._receive()
                    ended = received["end"]
                    for group_id, index, info, version, encoded in received["groups"]:
                        if encoded is not None:
                            yield sample_file.decode(base64.b85decode(encoded))[0]
                        else:
                            output = self._outputs.pop(group_id)
                            yield group_of(output, index=index, info=info, begun_version=version)
                    if ended:
                        self._outputs = {name: out for name, out in self._outputs.items() if name in received["keep"]}
                    if received["error"]:
                        raise RequestError(f"rank 0: {received['error']}")
        except (LockstepError, RankFailure):
            ended = True
            raise
        finally:
            while not ended:  # the caller stops early here, and therefore on the leader
                ended = self._receive()["end"]

    def _receive(self) -> dict[str, Any]:
        """Step along with the leader until it delivers groups or ends its call."""
        calls = self._engine.followed() | {"step()": lambda _: self._step()}
        received: dict[str, Any] = self._engine.relay.follow(calls, until=ROLLOUT)
        return received

    def _step(self) -> None:
        outputs = self._engine.step()
        self._outputs |= {out.request_id: out for out in outputs if out.request_id.startswith(PREFIX)}
        self._engine.loop.backlog[:0] = [out for out in outputs if not out.request_id.startswith(PREFIX)]


def _encoded(group: RolloutGroup) -> str:
    return base64.b85encode(sample_file.encode([group])).decode()
