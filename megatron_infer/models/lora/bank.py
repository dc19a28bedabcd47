"""The adapters that an engine has loaded: whole on the host, and this rank's part of some in slots on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.kernels.lora import AdapterPairs, LoRABackend, PackedPair, PairBlock
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.models.attached_lora import ATTACHED
from megatron_infer.models.delta_net import projected_parts
from megatron_infer.models.fused_layers import FusedLinear
from megatron_infer.models.lora.adapter import Adapter, LoRAPair
from megatron_infer.models.tp_collectives import Reducer

_MAX_SCALE = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Which part of a linear's pair this rank computes with."""

    shape: tuple[int, int]
    """(out, in) of the whole linear."""
    rows: Reducer | None = None
    """The ranks that divide the rows of B; None: each has all."""
    parts: Sequence[int] = ()
    """Lengths of the parts that follow each other in a rank's rows; each is divided over the ranks."""
    columns: Reducer | None = None
    """The ranks that divide the columns of A."""

    def of(self, pair: LoRAPair) -> Sequence[PairBlock]:
        if (group := self.columns) is not None:
            return [(a.chunk(group.size, dim=1)[group.rank], b, rows) for a, b, rows in pair.blocks]
        if (group := self.rows) is not None:
            whole = pair.b.split([length * group.size for length in self.parts])
            return [(pair.a, torch.cat([part.chunk(group.size)[group.rank] for part in whole]), None)]
        return pair.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedAdapter:
    """What one rank computes an adapter with, in the host's memory."""

    digest: str
    """Hash of the whole adapter's content."""
    rank: int
    """The largest rank of its pairs."""
    pairs: dict[str, tuple[PackedPair, float]]
    """This rank's linears by path: A and B, and the scale."""
    missing: frozenset[str]
    """Paths of linears that other ranks have, if any."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for pair, _ in self.pairs.values() for tensor in pair)


class AdapterBank:
    """Holds loaded adapters by name, and writes them into the slots that steps compute with."""

    def __init__(self, adopted: AdoptedModel, config: LoRAConfig, backend: LoRABackend) -> None:
        """backend: what adds the products. Raises ConfigError for a model without linears of megatron-core's."""
        linears = adopted.linears
        if not linears:
            raise ConfigError(
                "lora: the model runs by a class of its own, whose linears take no adapters; leave it None"
            )
        if any(linear.attached is not None for linear in linears.values()):
            raise ConfigError(f"lora={config}, and the model {ATTACHED}; leave lora None")
        self.max_rank = config.max_rank
        self._backend, self._dtype = backend, getattr(torch, adopted.shape.dtype)
        self.adapters: dict[str, PackedAdapter] = {}
        self._parts = {path: _part_of(linear, adopted.live) for path, linear in linears.items()}
        self._max_ranks: dict[str, int] = {}
        self._slots: dict[str, AdapterPairs] = {}
        for path, linear in linears.items():
            width_out, width_in = linear.weight().shape
            # Projections made of several Hugging Face linears have the ranks of all.
            most = config.max_rank * (3 if path.endswith("linear_qkv") else 2 if path.endswith("linear_fc1") else 1)
            with torch.inference_mode(False):
                self._slots[path] = backend.pairs(
                    config.max_loras, most, width_in, width_out, dtype=self._dtype, device=adopted.device
                )
            self._max_ranks[path] = most
        adopted.set_lora(self._slots)

    @torch.no_grad()
    def pack(self, adapter: Adapter) -> PackedAdapter:
        """This rank's part of an adapter; from any thread. Raises ModelError for one that this model cannot compute
        with."""
        name, own = adapter.name, {path: pair for path, pair in adapter.pairs.items() if path in self._parts}
        if not adapter.pairs:
            raise ModelError(f"adapter {name!r} changes no linear")
        for path, pair in own.items():
            limit, expected = self._max_ranks[path], self._parts[path].shape
            if not 1 <= pair.rank <= limit:
                raise ModelError(
                    f"adapter {name!r}: {path} has rank {pair.rank}, the limit is {limit} (max_rank "
                    f"{self.max_rank}); raise max_rank in LoRAConfig (--max-lora-rank)"
                )
            out = pair.shape[0]
            fits = (
                a.shape == (b.shape[1], pair.shape[1]) and len(b) == (out if rows is None else len(rows))
                for a, b, rows in pair.blocks
            )
            if pair.shape != expected or not all(fits):
                (out, width), (want_out, want_width) = pair.shape, expected
                raise ModelError(
                    f"adapter {name!r}: {path} is for {width} inputs and {out} outputs, the model's linear has "
                    f"{want_width} and {want_out}; is it an adapter of another model?"
                )
        packed = self._backend.pack([(self._slots[path], self._parts[path].of(pair)) for path, pair in own.items()])
        pairs: dict[str, tuple[PackedPair, float]] = {}
        for (path, pair), one in zip(own.items(), packed, strict=True):
            if one is None or not abs(pair.scale) <= _MAX_SCALE:
                raise ModelError(f"adapter {name!r}: {path} has numbers that are not finite in {self._dtype}")
            pairs[path] = one, pair.scale
        missing = adapter.pairs.keys() - own.keys()
        return PackedAdapter(digest=adapter.digest, rank=adapter.rank, pairs=pairs, missing=frozenset(missing))

    def write(self, slot: int, name: str) -> None:
        """Write an adapter into a slot, over whatever was there: steps launched before have read it by then."""
        pairs = self.adapters[name].pairs
        with torch.inference_mode(False), torch.no_grad():
            for path, slots in self._slots.items():
                if path in pairs:
                    slots.put(slot, *pairs[path])
                else:
                    slots.clear(slot)

    def clear(self, slot: int) -> None:
        """Make a slot add nothing."""
        with torch.inference_mode(False), torch.no_grad():
            for slots in self._slots.values():
                slots.clear(slot)


def _part_of(linear: FusedLinear, live: Any) -> _Part:
    width_out, width_in = linear.weight().shape
    if (group := linear.reduce) is not None:
        return _Part(shape=(width_out, width_in * group.size), columns=group)
    if (group := linear.spread) is None:
        return _Part(shape=(width_out, width_in))
    return _Part(shape=(width_out * group.size, width_in), rows=group, parts=parts_of(linear.name, live, width_out))


def parts_of(name: str, live: Any, length: int) -> Sequence[int]:
    """Gate and up of a gated linear_fc1, and what an in_proj computes, are divided one by one."""
    if name.endswith("linear_fc1") and live.config.gated_linear_unit:
        return length // 2, length // 2
    if name.endswith("in_proj"):
        mixer = live.get_submodule(name.rpartition(".")[0])
        if name.endswith(".self_attention.in_proj"):
            return tuple(projected_parts(mixer).values())
        state = mixer.ngroups_local_tp * mixer.d_state
        parts = (mixer.d_inner_local_tp, mixer.d_inner_local_tp, state, state, mixer.nheads_local_tp)
        assert sum(parts) == length, f"{name}: {length} rows, parts {parts}"
        return parts
    return (length,)
