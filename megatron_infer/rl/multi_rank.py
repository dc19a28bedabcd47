"""Rollouts on an engine of several ranks: the leader decides, the others step along and hear of its groups."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from megatron_infer.engine.command_relay import ROLLOUT
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import LockstepError, RankFailure, RequestError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.rl import sample_file
from megatron_infer.rl.group_tracker import PREFIX
from megatron_infer.rl.samples import RolloutGroup, group_of


class Ranks:
    """One rank's side of rollouts; alone in the engine it has nothing to do."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine
        self._outputs: dict[str, RequestOutput] = {}
        """On ranks beside the leader: finished groups that the leader has not spoken of."""

    @property
    def is_leader(self) -> bool:
        return self._engine.relay.is_leader

    def tell(
        self,
        groups: Sequence[RolloutGroup],
        *,
        cut: Collection[str] = (),
        end: bool = False,
        keep: Sequence[str] = (),
        error: str = "",
    ) -> None:
        """On the leader: these groups are handed out now, on every rank.

        cut: those that the other ranks have no output of. keep: at an end, those of a later call.
        """
        if self._engine.rank_group.size == 1:
            return
        told = [
            [
                group.group_id,
                group.index,
                group.info,
                group.begun_version,
                _whole(group) if group.group_id in cut else None,
            ]
            for group in groups
        ]
        given = {"groups": told, "end": end, "keep": list(keep), "error": error}
        self._engine.relay.meet(ROLLOUT, given, compare=False)

    def hear(self) -> Iterator[RolloutGroup]:
        """On the others: take part until the leader ends its call -> the groups it hands out."""
        ended = False
        try:
            while not ended:
                given = self._follow()
                ended = given["end"]
                for group_id, index, info, version, whole in given["groups"]:
                    if whole is not None:
                        yield sample_file.decode(base64.b85decode(whole))[0]
                    else:
                        output = self._outputs.pop(group_id)
                        yield group_of(output, index=index, info=info, begun_version=version)
                if ended:
                    self._outputs = {name: out for name, out in self._outputs.items() if name in given["keep"]}
                if given["error"]:
                    raise RequestError(f"rank 0: {given['error']}")
        except (LockstepError, RankFailure):
            ended = True
            raise
        finally:
            while not ended:  # the caller leaves early here, and so on the leader
                ended = self._follow()["end"]

    def _follow(self) -> dict[str, Any]:
        calls = self._engine.followed() | {"step()": lambda _: self._step()}
        given: dict[str, Any] = self._engine.relay.follow(calls, until=ROLLOUT)
        return given

    def _step(self) -> None:
        outputs = self._engine.step()
        self._outputs |= {out.request_id: out for out in outputs if out.request_id.startswith(PREFIX)}
        self._engine.loop.backlog[:0] = [out for out in outputs if not out.request_id.startswith(PREFIX)]


def _whole(group: RolloutGroup) -> str:
    return base64.b85encode(sample_file.encode([group])).decode()
