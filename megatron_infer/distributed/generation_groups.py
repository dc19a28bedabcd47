"""Process groups for generating in another layout than the trainer's, over the same ranks.

trainer: TP2, two replicas     [0 1] [2 3]     each replica has data of its own
engines: TP1                   [0][1] [2][3]   engines within a replica divide its prompts
engines: TP4                   [0 1 2 3]       one engine has the prompts of both replicas
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_infer.distributed.groups import ParallelGroups, check_world, collection_of
from megatron_infer.errors import ConfigError

_SPANS = {
    "tp": "t", "pp": "p", "ep": "e", "mp": "pt", "tp_ep": "et", "tp_ep_pp": "pet", "expt_tp": "t", "cp": "",
    "tp_cp": "t", "dp": "de", "dp_cp": "de", "tp_dp_cp": "det", "expt_dp": "d",
}  # fmt: skip
"""Groups of megatron-core's collection -> the axes that each spans: data, pipeline, expert, tensor."""
_AXES = "dcpet"
"""Data of its own, copies of an engine for the same data, and the three axes of an engine."""


def generation_groups(
    model: Any,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    backend: str | None = None,
) -> Any:
    """A ProcessGroupCollection for a model that generates in this layout, next to `model`, which trains.

    model None: the trainer is not megatron-core's, and its ranks are data parallel. backend None: that of the world.

    What is left of the ranks is data parallel. An engine has ranks of one replica of the trainer, or whole replicas.
    Experts are tensor parallel as the other layers. Every rank calls it; megatron-core's global groups stay as they
    are. Raises ConfigError for a layout that does not fit the ranks.
    """
    layout = {"p": pipeline_parallel, "e": expert_parallel, "t": tensor_parallel}
    check_world(dist.get_world_size(), tensor_parallel, pipeline_parallel, expert_parallel)
    engine = tensor_parallel * pipeline_parallel * expert_parallel
    replicas = _replicas(ParallelGroups() if model is None else ParallelGroups.of(None, model))
    wide = max(engine, len(replicas[0]))
    if wide % engine or wide % len(replicas[0]):
        raise ConfigError(
            f"an engine of tp x pp x ep = {tensor_parallel} x {pipeline_parallel} x {expert_parallel} ranks, and "
            f"{len(replicas[0])} ranks train on the same data: one has to be a multiple of the other"
        )
    ranks = torch.tensor(replicas).view(-1, wide // engine, *layout.values())
    made: dict[tuple[int, ...], Any] = {}
    found = {name: _own_group(_rows(ranks, axes), made, backend) for name, axes in _SPANS.items()}
    stages = _rows(ranks, "p")
    found["embd"] = _own_group([list(dict.fromkeys((row[0], row[-1]))) for row in stages], made, backend)
    found["pos_embd"] = _own_group([row[:1] for row in stages], made, backend)
    return collection_of(**found)


def _rows(ranks: torch.Tensor, axes: str) -> list[list[int]]:
    """The ranks of each group that spans these axes."""
    order = [at for at, axis in enumerate(_AXES) if axis not in axes]
    kept = [at for at, axis in enumerate(_AXES) if axis in axes]
    width = 1
    for at in kept:
        width *= ranks.shape[at]
    rows: list[list[int]] = ranks.permute(*order, *kept).reshape(-1, width).tolist()
    return rows


def _own_group(
    parts: Iterable[Sequence[int]], made: dict[tuple[int, ...], Any], backend: str | None = None
) -> ProcessGroup | None:
    """Make a group of each part, which every rank has to -> that of this rank. made: those that there are already."""
    own = None
    for part in map(tuple, parts):
        if part not in made:
            made[part] = dist.new_group(list(part), backend=backend)
        if dist.get_rank() in part:
            own = made[part]
    return own


def _replicas(groups: ParallelGroups, *others: ProcessGroup | None) -> list[list[int]]:
    """The ranks of all replicas of a trainer: those that train on the same data. others: groups that join replicas."""
    own = [group for group in (groups.tp, groups.pp, groups.cp, *others) if group is not None]
    named = [[dist.get_rank()], *map(dist.get_process_group_ranks, own)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, named)
    parts: list[set[int]] = []
    for ranks in chain(*every):
        joined = set(ranks).union(*(part for part in parts if not part.isdisjoint(ranks)))
        parts = [joined, *(part for part in parts if part.isdisjoint(joined))]
    return sorted(map(sorted, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRanks:
    """The ranks of a trainer and of the engines that generate for it in another layout."""

    trainer: ParallelGroups
    all: ProcessGroup
    """The fewest ranks that have all weights of the trainer, and whole engines."""
    replica: ProcessGroup | None
    """Ranks that train on the same data, where several engines divide its prompts."""
    shares_scores: bool
    """Ranks that score together have the same groups of a rollout."""

    @classmethod
    def of(cls, model: Any, collection: Any, generation_model: Any, shards: Sequence[ProcessGroup]) -> LayoutRanks:
        """collection: see `ParallelGroups.of`. shards: groups over which FSDP has divided the trainer's weights. Every
        rank of the world calls it.

        Raises ConfigError, on all ranks, where an engine has parts of replicas.
        """
        trainer, engine = ParallelGroups.of(None, model), ParallelGroups.of(collection, generation_model)
        if engine.cp is not None:
            raise ConfigError(
                f"generation_model has context_parallel_size={engine.cp_size}; build it with 1: engines within a "
                "replica of the trainer divide its prompts"
            )
        replicas, engines = _replicas(trainer), _replicas(engine, engine.engine)
        for ranks in engines:
            for replica in replicas:
                if set(ranks) & set(replica) not in (set(), set(ranks), set(replica)):
                    raise ConfigError(
                        f"an engine of generation_model has ranks {ranks}, and ranks {replica} train on the same data: "
                        "one has to contain the other, or ranks of one replica would get different samples; take the "
                        "groups of megatron_infer.distributed.generation_groups"
                    )
        scoring = _replicas(trainer, trainer.ep, *shards)
        divides = len(engines) > len(replicas)
        return cls(
            trainer=trainer,
            all=_part_of_world(_replicas(trainer, trainer.ep, engine.engine, *shards)),
            replica=_part_of_world(replicas) if divides else None,
            shares_scores=_own(scoring) <= _own(replicas) | _own(engines),
        )


def _own(parts: Iterable[Sequence[int]]) -> set[int]:
    return set(next(part for part in parts if dist.get_rank() in part))


def _part_of_world(parts: list[list[int]]) -> ProcessGroup:
    world = dist.group.WORLD
    group = world if len(parts) == 1 else _own_group(parts, {})
    assert group is not None
    return group
