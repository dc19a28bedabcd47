"""The life of LoRA adapters in an engine: loaded, replaced and unloaded between steps, on all ranks or on none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from megatron_infer.config.lora import check_adapter_name
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.command_relay import CommandRelay
from megatron_infer.engine.lifecycle_commands import RUNNING_CHOICES
from megatron_infer.engine.states import Lifecycle
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.errors import AdapterInUse, ConfigError, ModelError, RequestError, UnknownAdapter, unknown_name
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.models.lora.bank import AdapterBank, PackedAdapter
from megatron_infer.models.lora.reader import AdapterReader, PeftFields, Unread
from megatron_infer.scheduler.context.adapter_slots import AdapterSlots
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.scheduler import Scheduler

MAX_READINGS = 64
"""Most adapters that are being read or wait to be loaded."""
MAX_CHANGES = 64
"""Most loads and unloads that are neither undone nor settled; the oldest one cannot be undone any more."""


def check_running(running: str) -> None:
    """Raise ConfigError for an unknown choice for running requests."""
    if running not in RUNNING_CHOICES:
        known = ", ".join(RUNNING_CHOICES)
        raise ConfigError(f"running: {unknown_name('value', str(running), RUNNING_CHOICES)}; one of {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReading:
    """An adapter that a thread reads while the engine steps; `load_adapter` takes it as its source."""

    number: int
    """The same on every rank."""
    path: str | None
    future: Future[PackedAdapter]

    def on_done(self, call: Callable[[], None]) -> None:
        """Call `call` when it is read, or cannot be, on this rank; from another thread, or at once."""
        self.future.add_done_callback(lambda _: call())


AdapterSource = Unread | AdapterReading


@dataclass(frozen=True, slots=True)
class _Change:
    """What an adapter was before a load or unload."""

    name: str
    before: PackedAdapter | None
    path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A loaded adapter."""

    name: str
    version: int
    """1 when it is loaded, one more each time its content is replaced."""
    digest: str
    """Hash of its content."""
    rank: int
    """The largest rank of its pairs."""
    num_bytes: int
    """What this rank keeps of it on the host."""
    path: str | None
    """Where it was loaded from; None: from memory."""
    is_resident: bool
    """Whether the device has it; else it is written there before a request of it runs."""
    num_requests: int
    """Unfinished sequences that compute with it."""


class EngineAdapters:
    """Loads and unloads adapters between steps, on every rank."""

    def __init__(
        self,
        adopted: AdoptedModel,
        bank: AdapterBank | None,
        scheduler: Scheduler,
        loop: StepLoop,
        lifecycle: Lifecycle,
        relay: CommandRelay,
        rank_group: RankGroup,
    ) -> None:
        """bank: None for an engine without adapters."""
        self._reader = None if bank is None else AdapterReader(adopted.live, bank)
        self._bank, self._slots = bank, scheduler.context.adapters
        self._scheduler, self._loop, self._lifecycle = scheduler, loop, lifecycle
        self._relay, self._rank_group = relay, rank_group
        self._paths: dict[str, str | None] = {}
        """Where each loaded adapter was loaded from."""
        self._readings: dict[int, AdapterReading] = {}
        self._num_readings = 0
        self._changes: dict[str, _Change] = {}

    def read(self, name: str, source: Unread | None, *, config: PeftFields | None = None) -> AdapterReading:
        """Begin to read, check and pack an adapter on a thread of each rank, while steps go on. Give the result to
        `load`, which raises what reading it has raised, or to `forget`: it holds a whole adapter. Raises ConfigError
        where MAX_READINGS wait for that."""
        path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
        self._relay.meet("read_adapter()", {"name": check_adapter_name(name), "source": path, "config": config})
        self.require()
        assert self._reader is not None
        if len(self._readings) >= MAX_READINGS:
            raise ConfigError(
                f"adapter {name!r}: {MAX_READINGS} adapters are read and not loaded, the limit; load or forget() one"
            )
        self._num_readings += 1
        future = self._reader.begin(name, source, config)
        self._readings[self._num_readings] = reading = AdapterReading(
            number=self._num_readings, path=path, future=future
        )
        return reading

    def forget(self, reading: AdapterReading | int) -> None:
        """Give up what `read` gave; one that was loaded or forgotten is passed over. reading: it, or its number."""
        number = reading.number if isinstance(reading, AdapterReading) else reading
        if number in self._readings:
            self._relay.meet("forget_reading()", {"reading": number})
            self._readings.pop(number).future.cancel()

    def check(self, name: str, reading: AdapterReading, *, replace: bool) -> str:
        """Wait until it is read on every rank -> its digest. Raises what `load` would raise; nothing is loaded."""
        with self._rank_group.together(f"reading adapter {name!r}"):
            adapter = reading.future.result()
        self._check_content(name, adapter, None, replace=replace)
        return adapter.digest

    def load(
        self,
        name: str,
        source: AdapterSource | None,
        *,
        config: PeftFields | None = None,
        replace: bool = False,
        running: str = "keep",
        reading: int | None = None,
        digest: str | None = None,
        change: str | None = None,
    ) -> AdapterInfo:
        """`DynamicInferenceEngine.load_adapter`, in any state of the engine.

        reading: number of a reading, in the place of a source. digest: the content that is expected; another one is
        refused. change: a name under which it can be undone.
        """
        check_adapter_name(name)
        check_running(running)
        if not isinstance(replace, bool):
            raise ConfigError(f"replace is {replace!r}, it must be True or False")
        path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
        if isinstance(source, AdapterReading):
            reading = source.number
        given = {"name": name, "source": path, "config": config, "replace": replace, "running": running}
        self._relay.meet("load_adapter()", given | {"reading": reading, "digest": digest, "change": change})
        _, slots = self.require()
        with self._rank_group.together(f"loading adapter {name!r}"):
            if reading is None:
                assert self._reader is not None and not isinstance(source, AdapterReading)
                adapter = self._reader.begin(name, source, config).result()
            else:
                path, adapter = self._taken(name, reading)
        self._check_content(name, adapter, digest, replace=replace)
        self._note(change, name)
        if name not in slots.versions or slots.versions[name][1] != adapter.digest:
            self._put(name, adapter, path, running)
        return self.info(name)

    def unload(self, name: str, *, abort: bool = False, change: str | None = None) -> None:
        """Forget an adapter; refused while unfinished requests use it, unless `abort`: these end with an error."""
        self._relay.meet("unload_adapter()", {"name": name, "abort": abort, "change": change})
        bank, slots = self.require()
        if name not in slots.versions:
            raise UnknownAdapter(f"{unknown_name('adapter', str(name), slots.versions)}; adapters() lists them")
        if self._requests_of(name) and not abort:
            raise AdapterInUse(
                f"adapter {name!r} is used by {len(self._requests_of(name))} unfinished requests; let them finish, or "
                "give abort=True to end them"
            )
        with self._lifecycle.transition("update", timeout_s=None) as transition:
            self._loop.quiesce(transition.tick)
        self._note(change, name)
        if requests := self._requests_of(name):  # those that the steps in flight have not ended
            self._loop.backlog += self._loop.end_requests(requests, RequestError(f"adapter {name!r} was unloaded"))
        slot = slots.remove(name)
        if slot is not None:
            bank.clear(slot)
        del bank.adapters[name], self._paths[name]

    def undo(self, change: str) -> bool:
        """Give the adapter of a load or unload the content back that it had before, or unload it, with its requests.

        False: no such change was made here, or it is settled. Requests that an unload has ended stay ended.
        """
        self._relay.meet("undo_adapter()", {"change": change})
        bank, _ = self.require()
        found = self._changes.pop(change, None)
        if found is None:
            return False
        if found.before is None:
            if found.name in bank.adapters:
                self.unload(found.name, abort=True)
        elif found.name not in bank.adapters or bank.adapters[found.name].digest != found.before.digest:
            self._put(found.name, found.before, found.path, "keep")
        return True

    def settle(self, change: str) -> None:
        """The load or unload will not be undone: the content that it replaced is freed."""
        self._relay.meet("settle_adapter()", {"change": change})
        self._changes.pop(change, None)

    def loaded(self) -> list[AdapterInfo]:
        return [self.info(name) for name in self._paths]

    def _taken(self, name: str, number: int) -> tuple[str | None, PackedAdapter]:
        """The path and content of a reading, which is waited for."""
        found = self._readings.pop(number, None)
        if found is None:
            raise ConfigError(f"adapter {name!r}: its reading was loaded already, or was forgotten; read it again")
        return found.path, found.future.result()

    def _check_content(self, name: str, adapter: PackedAdapter, expected: str | None, *, replace: bool) -> None:
        """That each path is a linear of some rank, that all ranks have the content that is expected, and that the name
        has no other content."""
        texts = self._rank_group.lockstep.gather("linears of an adapter", "\n".join(sorted(adapter.missing)))
        missing = sorted(set.intersection(*(set(text.split("\n")) - {""} for text in texts)))
        if missing:
            raise ModelError(f"adapter {name!r}: {missing[0]} is no linear of this model that takes adapters")
        digests = self._rank_group.lockstep.gather("comparison of adapters", adapter.digest)
        if len(set(digests)) > 1:
            raise ConfigError(f"adapter {name!r} has another content on another rank; give the same on all")
        if expected not in (None, adapter.digest):
            raise ConfigError(f"adapter {name!r} has another content than other engines have loaded; load it again")
        _, slots = self.require()
        if name in slots.versions and slots.versions[name][1] != adapter.digest and not replace:
            raise AdapterInUse(
                f"adapter {name!r} is loaded with another content; unload it first, choose another name, or give "
                "replace=True"
            )

    def _put(self, name: str, adapter: PackedAdapter, path: str | None, running: str) -> None:
        bank, slots = self.require()
        is_new = name not in slots.versions
        if not is_new:
            with self._lifecycle.transition("update", timeout_s=None) as transition:
                self._loop.quiesce(transition.tick)
        same = [one for one, (_, digest) in slots.versions.items() if digest == adapter.digest]
        # one content is held once, whatever its names
        bank.adapters[name], self._paths[name] = bank.adapters[same[0]] if same else adapter, path
        slots.put(name, adapter.digest)
        if not is_new:
            self._renew(name, running)

    def _note(self, change: str | None, name: str) -> None:
        """Remember what the adapter is before a change; one that is made again, as its coordinator did not see it made,
        keeps what it was before the first time."""
        bank, _ = self.require()
        if change is not None and change not in self._changes:
            self._changes[change] = _Change(name, bank.adapters.get(name), self._paths.get(name))
            if len(self._changes) > MAX_CHANGES:
                del self._changes[next(iter(self._changes))]

    def _renew(self, name: str, running: str) -> None:
        """The adapter has another content; nothing is in flight. Its requests keep what they have computed and publish
        no more; running "recompute": they start over. So do those that have drawn nothing since they were admitted:
        their spans would name the new content alone."""
        scheduler = self._scheduler
        admitted_requests, swapped = scheduler.admitted_requests, scheduler.preemption.swapped
        live = [request for request in admitted_requests.live() if request.params.adapter == name]
        away = [request for request in swapped if request.params.adapter == name]
        restarts = {one for one in (*live, *away) if running == "recompute" or _has_drawn_nothing(one)}
        for request in away:
            if request in restarts:
                scheduler.preemption.drop(request)
            else:
                swapped[request].publishes, swapped[request].contents = False, []
        for request in live:
            if request in restarts:
                admitted_requests.start_over(request)
                continue
            assert request.lease is not None and self._slots is not None
            request.lease.publishes = False
            request.history.adapter = self._slots.versions[name]
            computed = request.scheduled
            request.history.continue_with(admitted_requests.version, first_token=request.num_output, computed=computed)
        scheduler.queue.insert_sorted([request for request in live if request in restarts])

    def load_all(self, adapters: Iterable[tuple[str, str]]) -> None:
        """(name, path) of each adapter to load at the start."""
        for name, path in adapters:
            self.load(name, path)

    def info(self, name: str) -> AdapterInfo:
        bank, slots = self.require()
        adapter, (version, digest) = bank.adapters[name], slots.versions[name]
        return AdapterInfo(
            name=name,
            version=version,
            digest=digest,
            rank=adapter.rank,
            num_bytes=adapter.num_bytes,
            path=self._paths[name],
            is_resident=name in slots.resident,
            num_requests=len(self._requests_of(name)),
        )

    def require(self) -> tuple[AdapterBank, AdapterSlots]:
        if self._bank is None or self._slots is None:
            raise ConfigError(
                "this engine has no adapters; build it with InferenceConfig(lora=LoRAConfig(max_loras=...))"
            )
        return self._bank, self._slots

    def _requests_of(self, name: str) -> list[Request]:
        """Unfinished sequences that compute with the adapter."""
        states = self._loop.output_processor.requests
        its = [state for state in states if state.params.adapter == name]
        sequences = [sequence.request for state in its for sequence in state.sequences]
        return [request for request in sequences if request.finish_reason is None]


def _has_drawn_nothing(request: Request) -> bool:
    """Since it was admitted."""
    return request.history.spans[-1].first_token == request.num_output
