"""The registry of what is computed from the weights and kept: how it is rebuilt and how a stale copy is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.errors import StaleCache
from megatron_infer.kernels.freed_weights import add_unpack_hooks
from megatron_infer.kernels.packing import PackedLinears
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.models.module_guard import modules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedCache:
    """One derived copy, such as packed or quantised weights, rotary tables, a mixer's -exp(A_log)."""

    name: str
    refresh: Callable[[], Mapping[int, int] | None]
    """Compute it again from the present weights -> checksums, by id, of weights that it read whole."""
    differs: Callable[[], str | None]
    """Compare it with what a refresh would give -> the first difference, None when it is up to date. May be slow."""
    release: Callable[[], None] | None = None
    """Free its memory until the next refresh; None: it is too small to matter."""
    num_bytes: Callable[[], int] = lambda: 0


def packed_weights(name: str, packed: PackedLinears, adopted: AdoptedModel, *, is_own: bool) -> DerivedCache:
    """The packed copies of a model's weights. is_own: only the engine uses the model: weights of which nothing but the
    copies is read are freed. Not where the model was adopted before, for an engine that may be alive."""

    def pack() -> dict[int, int]:
        freeable: set[int] = set()
        if adopted.unpackable() is not None:
            packed.unpack()  # some layer multiplies by its own weights
        elif is_own and not adopted.was_adopted:
            freeable = _freeable(adopted, packed)
            modules = modules_of(adopted.live)
            holders = [one for one in modules if not freeable.isdisjoint(map(id, one._parameters.values()))]
            add_unpack_hooks(packed, [adopted.live, *holders])
        return packed.pack(adopted.packable_weights(), output=adopted.output_weight(), freeable=freeable)

    rebuild = getattr(adopted.live, "rebuild", None)  # of a model that was loaded by name
    if is_own and rebuild is not None:
        names = {id(parameter): name for name, parameter in adopted.live.named_parameters()}
        packed.read_again = lambda: _parameters_of(rebuild(), names)
    return DerivedCache(
        name=name,
        refresh=pack,
        differs=lambda: packed.differs(adopted.packable_weights()),
        release=packed.clear,
        num_bytes=lambda: packed.num_bytes,
    )


def scan_weights(adopted: AdoptedModel) -> DerivedCache:
    """What the selective scan computes from a mixer's weights, such as -exp(A_log)."""
    return DerivedCache(name="scan weights", refresh=adopted.refresh_scan_weights, differs=adopted.scan_weights_differ)


def fp8_weights(adopted: AdoptedModel) -> DerivedCache:
    """The weights in FP8 of a model that multiplies in it."""
    fp8 = adopted.products_in_fp8  # others after modules were adopted again
    return DerivedCache(
        name="FP8 weights",
        refresh=lambda: fp8().refresh(),
        differs=lambda: fp8().differs(),
        release=lambda: fp8().release(),
        num_bytes=lambda: fp8().num_bytes,
    )


def _freeable(adopted: AdoptedModel, packed: PackedLinears) -> set[int]:
    """Ids of packable weights whose values nothing in a step reads: a router's, for instance, may be cast."""
    parts = [*adopted.layers, adopted.heads]
    found = {id(linear.weight()) for part in parts if part is not None for linear in part.linears()}
    output, embedding = adopted.output_weight(), getattr(adopted.live, "embedding", None)
    found |= set() if output is None else {id(output)}
    if packed.output_layout.unpack is None and embedding is not None:  # no rows for tokens
        found -= set(map(id, embedding.parameters()))
    return found


def _parameters_of(model: torch.nn.Module, names: Mapping[int, str]) -> dict[int, Tensor]:
    """A model's parameters by the ids of others with the same names."""
    parameters = dict(model.named_parameters())
    return {key: parameters[name].detach() for key, name in names.items()}


class DerivedCaches:
    """Copies derived from the weights, by name. A copy that is not registered becomes stale unnoticed."""

    def __init__(self) -> None:
        self._caches: dict[str, DerivedCache] = {}
        self.is_released = False
        """No step may run before the next `refresh`, whether or not memory was freed."""

    def register(self, cache: DerivedCache) -> None:
        """Refresh it after every update from now on; raises ValueError if the name is taken."""
        if cache.name in self._caches:
            raise ValueError(f"a derived cache named {cache.name!r} is registered already")
        self._caches[cache.name] = cache

    @property
    def names(self) -> list[str]:
        return list(self._caches)

    @property
    def num_bytes(self) -> int:
        """Memory of the copies that can be released."""
        return sum(cache.num_bytes() for cache in self._caches.values() if cache.release is not None)

    def refresh(self, tick: Callable[[str], None] = lambda what: None) -> dict[int, int]:
        """Rebuild all -> checksums, by id, of the weights that were read for it.

        If one fails, those before it are rebuilt and those after it are not: call it again.
        """
        sums = self._rebuild(self._caches.values(), tick)
        self.is_released = False
        return sums

    def refresh_held(self, tick: Callable[[str], None] = lambda what: None) -> dict[int, int]:
        """`refresh` for all copies except those that are released."""
        return self._rebuild((cache for cache in self._caches.values() if self._is_held(cache)), tick)

    def release(self, tick: Callable[[str], None] = lambda what: None, *, keep_memory: bool = False) -> None:
        """Free the copies that can be freed; no step may run until `refresh`.

        keep_memory: keep it for that refresh to write into; the content is not used until then.
        """
        for cache in self._caches.values():
            if cache.release is not None:
                self.is_released = True
                if not keep_memory:
                    tick(f"releasing {cache.name}")
                    cache.release()

    def verify(self) -> None:
        """Raise StaleCache naming every derived copy that does not belong to the present weights."""
        stale = [
            f"{cache.name} ({difference})"
            for cache in self._caches.values()
            if self._is_held(cache) and (difference := cache.differs()) is not None
        ]
        if stale:
            raise StaleCache(
                f"derived from other weights than the model has: {', '.join(stale)}; report that weights changed "
                "(set_weight_version or refresh_weights), and register a refresh that rebuilds it"
            )

    def _is_held(self, cache: DerivedCache) -> bool:
        return cache.release is None or not self.is_released

    @staticmethod
    def _rebuild(caches: Iterable[DerivedCache], tick: Callable[[str], None]) -> dict[int, int]:
        sums: dict[int, int] = {}
        for cache in caches:
            tick(f"rebuilding {cache.name}")
            sums |= cache.refresh() or {}
        return sums
