"""Rollouts of several engines within one replica of the trainer: ranks that train on the same data, and whose engines
divide the prompts of a call.

Context parallelism has such engines, and a model that generates in a smaller layout than the trainer's. With
`dp_attention` they are parts of engines, see `RankGroup.context_parts`.

    digests of all ranks' prompts ─▶ equal: engine i draws prompts i, i + size, ... ─▶ all groups on all ranks
                                     other: each engine draws its own prompts, and its ranks have those groups
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed.lockstep import digest_of
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.given_prompts import digests_of
from megatron_infer.errors import ConfigError, LockstepError, OtherRankFailed, PromptsDiffer
from megatron_infer.rl import sample_file
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.multi_rank import Shares
from megatron_infer.rl.oversampling import PromptFeed, RolloutShortage
from megatron_infer.rl.prompts import as_batch, group_requests_of
from megatron_infer.rl.rollout import Params, Progress, Rollout
from megatron_infer.rl.samples import RolloutError, RolloutGroup, checked_groups
from megatron_infer.rl.shared_prefill import SharedPrefill


@dataclass
class OwnPrompts:
    """Every `size`-th of some prompts, from `index` on, read as they are wanted."""

    prompts: Iterable[Any]
    params: SamplingParams
    index: int
    size: int
    read: list[str] = field(default_factory=list)
    """Digests of what was read, of `size` prompts each."""

    def __iter__(self) -> Iterator[Any]:
        given = iter(self.prompts)
        while part := [prompt for _, prompt in zip(range(self.size), given, strict=False)]:
            self.read.append(_digest(part, self.params))
            if self.index < len(part):
                yield part[self.index]


class ContextRollout(Rollout):
    """A `Rollout` of several engines with equal weights, of whose ranks each makes every call: `follow()` is none.

    Prompts of generate(), iterate() and stream() without a seed have those that a single engine would give them. Groups
    come when all engines are done: sorted by prompt from iterate() and stream(). A budget is divided over the engines.
    `stats`, `unfinished`, `in_flight`, `abort` and progress are of this rank's engine. An error of one engine is raised
    on all ranks, where OtherRankFailed names the rank; groups that the others have drawn are lost.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        ranks: RankGroup,
        on_delivered: Callable[[Sequence[RolloutGroup]], None] | None = None,
        shares_prompts: bool = False,
    ) -> None:
        """ranks: of all these engines, or parts of engines. on_delivered: as for `Rollout`.
        shares_prompts: long prompts of generate(), iterate() and stream(), and those that conversations begin with, are
        computed by all engines together. Raises ConfigError if these cannot."""
        super().__init__(engine, on_delivered=on_delivered)
        group = engine.rank_group.groups.sharing
        own = dist.get_rank() if group is None else dist.get_process_group_ranks(group)[0]
        self._leaders = [int(text) for text in ranks.lockstep.gather("the engines of one replica", str(own))]
        """The leader of each rank's engine."""
        self._over = ranks
        engines = sorted(set(self._leaders))
        self._index, self._size = engines.index(own), len(engines)
        number = ((self._index + 1) << 9) + self.ranks.rank
        self.tracker.seeds = lambda: engine.input_processor.own_seed(number)
        self._begun_together: set[str] = set()
        """Unfinished groups that calls with divided prompts have left."""
        self._shared_prefill = SharedPrefill(engine, ranks, self._leaders) if shares_prompts else None

    # ------------------------------------------------------------------ calls

    def _groups(self, prompts: Any, params: Params, on_progress: Progress | None) -> Generator[RolloutGroup]:
        batch = [] if prompts is None else as_batch(prompts)
        if not self._are_equal(batch, params):
            self._share_long(batch, params)
            with closing(super()._groups(batch, params, on_progress)) as groups:
                for group in groups:
                    yield self._numbered(group)
            return
        own, each = self._part_of(batch, params)
        self._share_long(own, each)
        yield from self._united(lambda: list(Rollout._groups(self, own, each, on_progress)))

    def _stream(
        self, prompts: Any, params: Params, on_progress: Progress | None, *, carry: bool = True
    ) -> AsyncGenerator[RolloutGroup]:
        draw = super()._stream
        return self.divided(prompts, params, lambda own, each: draw(own, each, on_progress, carry=carry))

    async def divided(
        self, prompts: Any, params: Params, draw: Callable[[Any, Params], AsyncGenerator[RolloutGroup]]
    ) -> AsyncGenerator[RolloutGroup]:
        run = self.thread.run
        batch = [] if prompts is None else as_batch(prompts)
        if not await run(lambda: self._are_equal(batch, params)):
            await run(lambda: self._share_long(batch, params))
            async with aclosing(draw(batch, params)) as groups:
                async for group in groups:
                    yield self._numbered(group)
            return
        own, each = self._part_of(batch, params)
        await run(lambda: self._share_long(own, each))
        found: list[RolloutGroup] = []
        failure: BaseException | None = None
        before = set(self.tracker.unfinished)
        try:
            async with aclosing(draw(own, each)) as groups:
                async for group in groups:
                    found.append(group)
        except BaseException as error:
            failure = error
        for group in await run(lambda: self._exchange(found, failure, before)):
            yield group

    def collect(
        self, num_groups: int, prompts: Iterable[Any], params: SamplingParams, **how: Any
    ) -> list[RolloutGroup]:
        """As `Rollout.collect`. Each engine draws its part of the prompts until it has its part of `num_groups`.

        Raises PromptsDiffer if the engines have read other prompts.
        """
        own = self.own_prompts(prompts, params)
        share = num_groups // self._size + (self._index < num_groups % self._size)

        def draw() -> list[RolloutGroup]:
            if share or num_groups < 1:
                return Rollout.collect(self, share, own, params, **how)
            self.engine.serve_others()
            return []

        return self.united(draw, own, wanted=num_groups)

    def pause_at(self, budget: Budget | None) -> None:
        """As `Rollout.pause_at`; groups and tokens are divided over the engines."""
        if budget is not None:
            groups, tokens = (None if one is None else -(-one // self._size) for one in (budget.groups, budget.tokens))
            budget = replace(budget, groups=groups, tokens=tokens)
        super().pause_at(budget)

    def own_prompts(self, prompts: Iterable[Any] | None, params: SamplingParams) -> OwnPrompts:
        return OwnPrompts(() if prompts is None else prompts, params, self._index, self._size)

    def part_of_batch(self, groups: int) -> int:
        if groups % self._size:
            raise ConfigError(
                f"groups_per_step is {groups}, and {self._size} engines of one replica divide a batch; give a "
                f"multiple of {self._size}"
            )
        return groups // self._size

    def shares_of(self, feed: PromptFeed, count: int) -> Shares:
        """Ranks of an engine share its prompts, which are compared as they are read."""
        return self.ranks.exchange(lambda: [[]], None)[0]

    def united(self, draw: Callable[[], list[RolloutGroup]], own: Any, *, wanted: int) -> list[RolloutGroup]:
        versions = self._over.lockstep.gather("the versions of a rollout", str(self.engine.weight_version))
        _check_versions([int(version) for version in versions])
        return checked_groups(self._united(draw, own, wanted))

    def _united(
        self, draw: Callable[[], list[RolloutGroup]], own: OwnPrompts | None = None, wanted: int = 0
    ) -> list[RolloutGroup]:
        """The groups that draw() gives on each engine -> those of all, by number, those that failed too.

        own: the prompts that it reads. wanted: groups that are wanted of all engines, for a RolloutShortage.
        """
        before = set(self.tracker.unfinished)
        found: list[RolloutGroup] = []
        failure: BaseException | None = None
        try:
            found = draw()
        except RolloutError as error:
            found = error.groups
        except BaseException as error:
            failure = error
        return self._exchange(found, failure, before, own, wanted)

    # ------------------------------------------------------------------ dividing

    def _are_equal(self, batch: list[Any], params: Params) -> bool:
        """Whether all engines, which have the same weights, were given the same prompts and parameters, which are
        valid."""
        failure: Exception | None = None
        ids, digest = self.engine.input_processor, ""
        try:
            if self.ranks.is_leader:
                group_requests_of(self.engine, batch, params)
            if batch or self.ranks.is_leader:
                digest = _digest(batch, params)
        except Exception as error:  # the other ranks wait
            failure = error
        self._over.lockstep.phase = "a rollout"
        own = json.dumps([digest, ids.num_ids, self.engine.weight_version, _described(failure)])
        reports = [json.loads(text) for text in self._over.lockstep.gather("the prompts of a rollout", own)]
        ids.num_ids = max(number for _, number, *_ in reports)  # the engines number on alike: groups sort by prompt
        if any(error for *_, error in reports):
            self.engine.serve_others()  # other parts of the engine may draw
        if failure is not None:
            raise failure
        _raise_first([error for *_, error in reports])
        _check_versions([version for _, _, version, _ in reports])
        return len({digest for digest, *_ in reports if digest}) == 1

    def _part_of(self, batch: list[Any], params: Params) -> tuple[list[Any], Params]:
        """This engine's prompts, with seeds that a single engine would derive. The leader passes them on."""
        each = [params] * len(batch) if isinstance(params, SamplingParams) else list(params)
        draw = self.engine.input_processor.next_seed
        each = [one if one.seed is not None else replace(one, seed=draw()) for one in each]
        if not self.ranks.is_leader:
            return [], []
        return batch[self._index :: self._size], each[self._index :: self._size]

    def _share_long(self, own: list[Any], params: Params) -> None:
        """Compute long prompts of all engines together before they draw. own: what this engine draws."""
        if self._shared_prefill is not None:
            requests = group_requests_of(self.engine, own, params) if self.ranks.is_leader else []
            self._shared_prefill.compute(requests)

    def _numbered(self, group: RolloutGroup) -> RolloutGroup:
        """With an id that no other engine gives."""
        source, _, number = group.group_id.rpartition("/")
        group.group_id = f"{source}/{int(number) * self._size + self._index}"
        return group

    # ------------------------------------------------------------------ exchange

    def _exchange(
        self,
        found: list[RolloutGroup],
        failure: BaseException | None,
        before: set[str],
        own: OwnPrompts | None = None,
        wanted: int = 0,
    ) -> list[RolloutGroup]:
        """All engines' groups on every rank; where one engine has failed all ranks raise.

        before: groups that were unfinished when the call began.
        """
        short: int | None = None
        if isinstance(failure, RolloutShortage):
            found, short, failure = failure.accepted, failure.num_rejected, None
        for group in found:
            if group.group_id not in before or group.group_id in self._begun_together:
                group.index = group.index * self._size + self._index
            self._numbered(group)
        left = set(self.tracker.unfinished)
        self._begun_together = left & (self._begun_together | (left - before))
        encoded = ""
        if self.ranks.is_leader and failure is None:
            try:
                encoded = base64.b85encode(sample_file.encode(found)).decode()
            except Exception as error:  # the other ranks wait
                failure = error
        report: dict[str, Any] = {"error": _described(failure)}
        if self.ranks.is_leader:
            report |= {"groups": encoded, "short": short, "read": [] if own is None else own.read}
        texts = self._over.lockstep.gather("the groups of a rollout", json.dumps(report))
        reports = [json.loads(text) for text in texts]
        leaders = {leader: report for leader, report in zip(self._leaders, reports, strict=True) if "groups" in report}
        ended = {leader for leader, report in leaders.items() if report["error"] or report["short"] is not None}
        if failure is not None and (self.ranks.is_leader or self._leaders[self._over.lockstep.rank] not in ended):
            raise failure
        # a rank beside a leader that has ended says so in other words
        errors = [
            report["error"] if "groups" in report or leader not in ended else ""
            for leader, report in zip(self._leaders, reports, strict=True)
        ]
        _raise_first(errors)
        parts = [leaders[leader] for leader in sorted(leaders)]
        if own is not None:
            del own.read[: _num_equal([part["read"] for part in parts])]
        groups: list[RolloutGroup] = []
        for index, part in enumerate(parts):
            if index == self._index and self.ranks.is_leader:
                groups += found
                continue
            others = sample_file.decode(base64.b85decode(part["groups"]))
            groups += others
            if self.ranks.is_leader:
                self.ranks.delivered(others)
        groups.sort(key=lambda group: int(group.group_id.rpartition("/")[2]))
        shortages = [part["short"] for part in parts if part["short"] is not None]
        if shortages:
            raise RolloutShortage(wanted, groups, sum(shortages))
        return groups


def _digest(prompts: Sequence[Any], params: Params) -> str:
    return digest_of(list(digests_of(prompts, params)))


def _described(failure: BaseException | None) -> str:
    return "" if failure is None else f"{type(failure).__name__}: {failure}"


def _raise_first(errors: Sequence[str]) -> None:
    """OtherRankFailed if a rank has an error."""
    failed = [rank for rank, text in enumerate(errors) if text]
    if failed:
        raise OtherRankFailed("; ".join(f"rank {rank}: {errors[rank]}" for rank in failed), ranks=failed)


def _check_versions(versions: Sequence[int]) -> None:
    """LockstepError unless all ranks have weights of one version."""
    if len(set(versions)) > 1:
        named = ", ".join(f"rank {rank} has {version:,}" for rank, version in enumerate(versions))
        raise LockstepError(
            f"engines of one replica have weights of other versions: {named}; give all of them the same one "
            "(session.update_weights(version=...) on every rank)"
        )


def _num_equal(read: Sequence[Sequence[str]]) -> int:
    """How many digests all engines have reported; one of them may have read further. PromptsDiffer if some differ."""
    together = list(zip(*read, strict=False))
    if any(len(set(digests)) > 1 for digests in together):
        raise PromptsDiffer(
            "engines of one replica have read other prompts, or parameters: collect() and RolloutQueue divide one "
            "sequence of prompts; give every rank the same"
        )
    return len(together)
