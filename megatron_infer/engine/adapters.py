"""The life of LoRA adapters in an engine: loaded, replaced and unloaded between steps, on all ranks or on none."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_infer.comm.rank_group import RankGroup
from megatron_infer.config.lora import check_adapter_name
from megatron_infer.context.adapter_slots import AdapterSlots
from megatron_infer.engine.command_relay import CommandRelay
from megatron_infer.engine.states import Lifecycle
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.errors import AdapterInUse, ConfigError, ModelError, RequestError, UnknownAdapter, unknown_name
from megatron_infer.lora.adapter import Adapter
from megatron_infer.lora.bank import AdapterBank
from megatron_infer.lora.peft import read_adapter
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.scheduler import Scheduler

AdapterSource = str | os.PathLike[str] | Mapping[str, Tensor] | Adapter
"""A PEFT directory, tensors by name, or an adapter that was read before."""


RUNNING_CHOICES = ("keep", "recompute")


def check_running(running: str) -> None:
    """Raise ConfigError for an unknown choice for running requests."""
    if running not in RUNNING_CHOICES:
        known = ", ".join(RUNNING_CHOICES)
        raise ConfigError(f"running: {unknown_name('value', str(running), RUNNING_CHOICES)}; one of {known}")


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
        self._adopted, self._bank, self._slots = adopted, bank, scheduler.context.adapters
        self._scheduler, self._loop, self._lifecycle = scheduler, loop, lifecycle
        self._relay, self._rank_group = relay, rank_group
        self._paths: dict[str, str | None] = {}
        """Where each loaded adapter was loaded from."""

    def load(
        self,
        name: str,
        source: AdapterSource | None,
        *,
        config: Mapping[str, Any] | None = None,
        replace: bool = False,
        running: str = "keep",
    ) -> AdapterInfo:
        """Load a LoRA adapter, which requests then name (`SamplingParams.adapter`), in any state of the engine.

        source: a PEFT directory, or tensors by name with the fields of its adapter_config.json as `config`. An adapter
        of that name with another content is refused, unless `replace`: then it is a new version of it alone, under
        which cached KV of the one before is not matched. running: "keep" lets its requests go on with the KV they have,
        "recompute" recomputes it. A load that fails changes nothing.
        """
        check_adapter_name(name)
        check_running(running)
        path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
        given = {"name": name, "source": path, "config": config, "replace": replace, "running": running}
        self._relay.meet("load_adapter()", given)
        bank, slots = self._require()
        with self._rank_group.together(f"loading adapter {name!r}"):
            adapter = self._read(name, source, config)
        missing = bank.check_on_ranks(adapter, self._rank_group)
        if missing:
            raise ModelError(f"adapter {name!r}: {missing[0]} is no linear of this model that takes adapters")
        digests = self._rank_group.lockstep.gather("comparison of adapters", adapter.digest)
        if len(set(digests)) > 1:
            raise ConfigError(f"adapter {name!r} has another content on another rank; give the same on all")
        known = slots.versions[name][1] if name in slots.versions else None
        if known is not None and known != adapter.digest:
            if not replace:
                raise AdapterInUse(
                    f"adapter {name!r} is loaded with another content; unload it first, choose another name, or give "
                    "replace=True"
                )
            with self._lifecycle.transition("update", timeout_s=None) as transition:
                self._loop.quiesce(transition.tick)
        if known != adapter.digest:
            same = [one for one, (_, digest) in slots.versions.items() if digest == adapter.digest]
            if same:  # one content is held once, whatever its names
                adapter = Adapter(name, bank.adapters[same[0]].pairs)
            bank.adapters[name], self._paths[name] = adapter, path
            slots.put(name, digests[0])
            if known is not None:
                self._renew(name, running)
        return self.info(name)

    def unload(self, name: str, *, abort: bool = False) -> None:
        """Forget an adapter; refused while unfinished requests use it, unless `abort`: these end with an error."""
        self._relay.meet("unload_adapter()", {"name": name, "abort": abort})
        bank, slots = self._require()
        if name not in slots.versions:
            raise UnknownAdapter(f"{unknown_name('adapter', str(name), slots.versions)}; adapters() lists them")
        if self._requests_of(name) and not abort:
            raise AdapterInUse(
                f"adapter {name!r} is used by {len(self._requests_of(name))} unfinished requests; let them finish, or "
                "give abort=True to end them"
            )
        with self._lifecycle.transition("update", timeout_s=None) as transition:
            self._loop.quiesce(transition.tick)
        if requests := self._requests_of(name):  # those that the steps in flight have not ended
            self._loop.backlog += self._loop.end_requests(requests, RequestError(f"adapter {name!r} was unloaded"))
        slot = slots.remove(name)
        if slot is not None:
            bank.clear(slot)
        del bank.adapters[name], self._paths[name]

    def loaded(self) -> list[AdapterInfo]:
        return [self.info(name) for name in self._paths]

    def _renew(self, name: str, running: str) -> None:
        """The adapter has another content; nothing is in flight. Its requests keep what they have computed and publish
        no more; running "recompute": they start over."""
        scheduler = self._scheduler
        running_set, swapped = scheduler.running_set, scheduler.preemption.swapped
        live = [request for request in running_set.live() if request.params.adapter == name]
        away = [request for request in swapped if request.params.adapter == name]
        if running == "recompute":
            for request in away:
                scheduler.preemption.drop(request)
            for request in live:
                running_set.start_over(request)
            scheduler.queue.insert_sorted(live)
            return
        for request in away:
            swapped[request].publishes, swapped[request].contents = False, []
        for request in live:
            assert request.lease is not None and self._slots is not None
            request.lease.publishes = False
            request.history.adapter = self._slots.versions[name]
            computed = request.scheduled
            request.history.continue_with(running_set.version, first_token=request.num_output, computed=computed)

    def load_all(self, adapters: Iterable[tuple[str, str]]) -> None:
        """(name, path) of each adapter to load at the start."""
        for name, path in adapters:
            self.load(name, path)

    def info(self, name: str) -> AdapterInfo:
        bank, slots = self._require()
        adapter, (version, digest) = bank.adapters[name], slots.versions[name]
        return AdapterInfo(
            name=name,
            version=version,
            digest=digest,
            rank=adapter.rank,
            num_bytes=sum(pair.a.nbytes + pair.b.nbytes for pair in adapter.pairs.values()),
            path=self._paths[name],
            is_resident=name in slots.resident,
            num_requests=len(self._requests_of(name)),
        )

    def _read(self, name: str, source: AdapterSource | None, config: Mapping[str, Any] | None) -> Adapter:
        if isinstance(source, Adapter):
            return Adapter(name, source.pairs)
        if source is None:
            raise ConfigError(f"adapter {name!r}: the leader has its tensors; load it on every rank, or give a path")
        assert self._bank is not None
        live, most = self._adopted.live, self._bank.max_rank
        given = source if isinstance(source, Mapping) else Path(source)
        return read_adapter(name, given, live, config=config, max_rank=most)

    def _require(self) -> tuple[AdapterBank, AdapterSlots]:
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
