"""The weights of an engine: their version, whether they changed, what is derived from them, and their host copy."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.errors import StaleCache, WrongState
from megatron_infer.kernels.select import ChosenKernels
from megatron_infer.kernels.te_tensors import memory_of
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.models.weights.change_guard import OffloadedWeights, WeightGuard, guarded_tensors
from megatron_infer.models.weights.derived import DerivedCaches
from megatron_infer.scheduler.context.block_digest import root_of

log = logging.getLogger("megatron_infer")

Tick = Callable[[str], None]
"""Called with what is done next; may raise."""


def no_tick(what: str) -> None:
    """For work without a deadline."""


class WeightManager:
    """Tracks the weights the engine computes with. `num_updates` counts accepted changes, `version` labels them."""

    def __init__(
        self,
        adopted: AdoptedModel,
        kernels: ChosenKernels,
        rank_group: RankGroup,
        *,
        owns_weights: bool,
        can_offload: bool,
        verifies: bool,
        set_root: Callable[..., None],
        show_to_graphs: Callable[[Any], None] | None,
    ) -> None:
        """owns_weights: only the engine uses them. can_offload: it does, and they are on a device. verifies: check
        derived copies whenever weights are accepted. set_root: `Scheduler.set_root`. show_to_graphs: called with a
        value that differs whenever captured steps would read weights that have moved; None: no steps are captured.
        """
        self._adopted, self._packed, self._rank_group = adopted, kernels.packed, rank_group
        self.reads_after_idling = not owns_weights
        """Whether the first step after idling reads the content of the weights, which others may write."""
        self._verifies, self._set_root, self._show_to_graphs = verifies, set_root, show_to_graphs
        self.version = self.num_updates = 0
        """num_updates: times weights were accepted. Never the same for two different weights, as a version may be."""
        self.highest_version = 0
        """The highest version that the engine ever had."""
        self._are_released = self._are_unread = False
        """The trainer holds the weights in shards; a version was announced of weights that were not read since."""
        self.guard = WeightGuard(self._tensors, checksums=kernels.checksums)
        adopted.weights_watched()
        self.derived = DerivedCaches()
        """The registry of copies derived from the weights."""
        self._offloaded = OffloadedWeights(self._tensors, pinned=True) if can_offload else None
        this = weakref.ref(self)  # the packed copies live as long as the model

        def new_address(weights: Sequence[torch.Tensor]) -> None:
            if (manager := this()) is not None:
                manager.guard.new_address(weights)

        self._packed.on_new_address = new_address

    @property
    def model_name(self) -> str:
        """Name of the model in the prefix hash."""
        return self._adopted.name

    @property
    def root(self) -> bytes:
        """Root of the prefix-hash chain: KV of another model or of earlier weights can never match.

        The count of updates is part of it: a version that is used a second time is one of other weights.
        """
        return root_of(model=self.model_name, weight_version=self.version, update=self.num_updates)

    # ------------------------------------------------------------------ changes

    def differ(self, *, read_all: bool) -> bool:
        """Whether this rank's weights or modules are not the accepted ones.

        read_all: notice any change, for which the content is read where `reads_after_idling`; else only an update in
        place or a new address is noticed.
        """
        if self._adopted.has_changed():
            return True
        with self._packed.lock:
            return self.guard.changed(content=self.reads_after_idling) if read_all else self.guard.moved()

    def changed(self) -> bool:
        """Whether weights or modules of any rank differ from the accepted ones; reads all of them. On every rank."""
        return self._rank_group.any_rank(
            self._adopted.has_changed() or self.guard.changed(self._packed.freed.checksums())
        )

    def accept(self, version: int, tick: Tick = no_tick, *, read: Mapping[int, int] | None = None) -> None:
        """The weights are `version` now: rebuild derived copies, retire cached KV. Nothing may be in flight.

        Modules that changed are adopted again; where that is refused, AdoptionError is raised and nothing has changed.
        After another failure derived copies may be of old and new weights: the next step accepts them again.
        read: derived copies are rebuilt already, and these are the checksums of the weights, by id.
        """
        if self._are_released:
            self._are_unread = True
            self._count(version)
            return
        self._adopt_changed(tick)
        self._accept(version, tick, read)

    def _accept(self, version: int, tick: Tick, read: Mapping[int, int] | None) -> None:
        try:
            with self._rank_group.together("accepting the weights"):
                self.guard.invalidate()
                read = self.derived.refresh_held(tick) if read is None else read  # released copies wait for the resume
                tick("the weights' checksums")
                self.guard.accept({**self._packed.freed.checksums(), **read})
                self._adopted.weights_watched()
        except BaseException:
            self.guard.invalidate()  # on ranks that succeeded too: all try again
            raise
        self._are_unread = False
        self._count(version)
        self.update_graphs()
        if self._verifies:
            self.verify()

    def _count(self, version: int) -> None:
        """Weights of this version follow."""
        self.version, self.highest_version = version, max(version, self.highest_version)
        self.num_updates += 1
        self._set_root(self.root, version=version)
        log.info("weights changed: version %d", version)

    def released(self) -> None:
        """The weights are not there until `gathered`: no step may run, and `accept` reads nothing. Copies derived from
        the weights are freed."""
        self._are_released = True
        self.derived.release()

    def gathered(self) -> None:
        """The weights are whole, at other addresses; `catch_up` finds whether their content is another one."""
        self._are_released = False
        self.guard.new_address(list(self._tensors()))

    def require_present(self) -> None:
        """Raise WrongState while the weights are not there."""
        if self._are_released:
            raise WrongState(
                "the engine has weights within session.generating() only: outside their memory is given back",
                state="released weights",
            )

    def _adopt_changed(self, tick: Tick) -> None:
        """Adopt modules that changed, on all ranks or, where one refuses, on none. The weights count as moved then."""
        with self._rank_group.together("adopting modules that changed"):
            tick("the model's modules")
            if self._adopted.is_sharded():
                raise WrongState(
                    "the trainer's FSDP holds the weights in shards; the engine runs within session.generating(). "
                    "There model.state_dict() puts the shards back: call session.update_weights() to gather them again",
                    state="released weights",
                )
            self.require_present()
            reading = self._adopted.read_changed()
        if reading is not None:
            self.guard.invalidate()
            self._adopted.apply(reading)

    def check_modules(self, *, calls: bool = True) -> None:
        """Raise AdoptionError for modules that changed and cannot be adopted again; nothing is changed.

        calls: False: not for hooks and methods of instances, as the caller's forward calls the modules.
        """
        is_same = not self._adopted.has_changed() and not self.guard.moved()  # a cast moves the weights
        if not is_same and (calls or not self._adopted.has_same_modules()):
            self._adopted.read_changed()

    def accept_changes(self) -> None:
        """Accept the weights as the next version if those of any rank changed. On every rank; nothing is in flight.

        Weights that the trainer holds in shards are compared once they are gathered.
        """
        if not self._are_released and self.changed():
            self.accept(self.version + 1)

    def catch_up(self, tick: Tick = no_tick) -> None:
        """Before steps go on: accept weights that changed meanwhile, rebuild derived copies that were released.

        Weights that are packed are not read again for their checksums: packing computes them.
        """
        what = "checking whether weights changed"
        with self._rank_group.together(what):
            tick(what)
        self._adopt_changed(tick)
        read: dict[int, int] | None = None
        if self.derived.is_released:
            with self._rank_group.together("rebuilding what is derived from the weights"):
                read = self.derived.refresh(tick)
        known = {**self._packed.freed.checksums(), **(read or {})}
        if self._are_unread:  # they have their version
            with self._rank_group.together("reading the weights"):
                self.guard.accept(known)
            self._adopted.weights_watched()
            self._are_unread = False
            self.update_graphs()
        elif self._rank_group.any_rank(self.guard.changed(known)):
            self._accept(self.version + 1, tick, read)
        elif read is not None:
            self.update_graphs()

    def raise_version(self, version: int) -> None:
        """Count on from `version` if it is higher: loaded tokens carry it. Nothing may be in flight."""
        if version > self.version:
            self.version, self.highest_version = version, max(version, self.highest_version)
            self._set_root(self.root, version=version)

    def update_graphs(self) -> None:
        """Captured steps read weights at the addresses that these had at the capture: drop those that have moved."""
        if self._show_to_graphs is not None:
            quantised = () if self._adopted.fp8 is None else self._adopted.fp8.addresses
            self._show_to_graphs((self._adopted.num_adoptions, self.guard.addresses, quantised))

    def verify(self) -> None:
        """Raise StaleCache if a derived copy does not belong to the weights as they are now, or a module is not the
        one that was adopted; AdoptionError if that cannot be adopted. On every rank."""
        with self._rank_group.together("verifying what is derived from the weights"):
            self.check_modules()
            if (found := self._adopted.changed_module()) is not None:  # could be adopted, and is not yet
                where, what = found
                raise StaleCache(
                    f"{where or '<root>'} {what}; the next step adopts it, as do set_weight_version and refresh_weights"
                )
            self.derived.verify()

    # ------------------------------------------------------------------ memory

    def unpack(self) -> None:
        """Give weights that were freed once they were packed memory of their own, until weights are accepted again.

        Call it before code of your own reads or writes parameters. Raises FreedWeightsWritten where some were written
        without.
        """
        self._packed.unpack()

    def hold_weakly(self) -> None:
        """Keep no parameter alive that training replaces, until `hold`; for a suspended engine."""
        self.guard.hold_weakly()
        if self.derived.is_released:  # else steps find packed copies by the ids of the weights, which must stay taken
            self._packed.forget_weights()

    def hold(self) -> None:
        """Undo `hold_weakly`: steps follow."""
        self.guard.hold()

    def offload(self, tick: Tick) -> None:
        """Move the live weights to the host if the engine owns them and they are on a device; a trainer's stay."""
        if self._offloaded is not None and not self._offloaded.num_bytes:
            self._offloaded.offload(tick)

    def reload(self, tick: Tick) -> None:
        """Undo `offload`; does nothing while the weights are in place."""
        if self._offloaded is not None and self._offloaded.num_bytes:
            self._offloaded.reload(tick)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of live weights on the host, moved there by `offload`."""
        return 0 if self._offloaded is None else self._offloaded.num_bytes

    @property
    def num_bytes(self) -> int:
        """Memory of the live weights and of the copies derived from them."""
        parts = (part for tensor in self._tensors() for part in memory_of(tensor))
        storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
        live: int = sum(storages.values())
        return live + self.derived.num_bytes

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from guarded_tensors(self._adopted.live)
        if self._adopted.fp8 is not None:
            yield from self._adopted.fp8.live_scales()
