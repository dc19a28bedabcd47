"""Saved memory of an engine of several ranks: each rank writes its own beside the leader's file, all or none of them.

    PATH                  the leader's: requests, outputs, its own memory, the layout and the names of the other files
    PATH.<save>.rank1     memory of rank 1: a file of the same format without requests
    PATH.context1         in the place of PATH: the second of several context-parallel engines
    PATH.expert1          the same of an engine's parts with requests of their own (`dp_attention`)

Each save has a name of its own: files of the save before stay until the leader's file is replaced, which makes the new
save valid. Files that no leader's file names are removed after that.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_infer.distributed.groups import ParallelGroups
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.durable import file_format
from megatron_infer.errors import RankFailure, SnapshotError

Made = tuple[dict[str, Any], dict[str, Tensor]]
"""(manifest, tensors) of a file."""


def path_of(path: str | os.PathLike[str], groups: ParallelGroups) -> Path:
    """Where the leader of these requests has its file; all leaders are given the same path."""
    number, _ = groups.context_place
    own = Path(path)
    return own.with_name(f"{own.name}.{'expert' if groups.own_requests else 'context'}{number}") if number else own


def engine_of(groups: ParallelGroups) -> str:
    """Whose requests a file has, in words."""
    number, count = groups.context_place
    if count == 1:
        return "one engine"
    return f"part {number} of {count}" if groups.own_requests else f"engine {number} of {count} context-parallel ones"


def layout_of(groups: ParallelGroups) -> dict[str, int]:
    """How a model is divided, as far as a rank's memory of a request depends on it."""
    sizes = {"tp": groups.tp_size, "pp": groups.pp_size, "ep": groups.ep_size}
    return {"ranks": groups.engine_size} | {name: size for name, size in sizes.items() if size > 1}


def layout_differs(here: Mapping[str, int], saved: Mapping[str, int]) -> str | None:
    """Why memory of one layout cannot be used in another; None if they are the same."""
    return None if dict(here) == dict(saved) else f"saved by {_in_words(saved)}, this engine has {_in_words(here)}"


def _in_words(layout: Mapping[str, int]) -> str:
    count = layout["ranks"]
    sizes = " x ".join(f"{name}={size}" for name, size in layout.items() if name != "ranks")
    return f"{count} rank{'s' * (count > 1)}" + (f" ({sizes})" if sizes else "")


def part_names(path: Path, save: str, num_ranks: int) -> list[str]:
    """File names of ranks 1 and up."""
    return [f"{path.name}.{save}.rank{rank}" for rank in range(1, num_ranks)]


def save_together(path: Path, make: Callable[[list[str]], Made], rank_group: RankGroup) -> None:
    """Write every rank's part, then put the leader's file in place: on all ranks or on none. Every rank calls it.

    make: returns this rank's content, given the names of the parts; makes no rounds.
    """
    sharing = rank_group.sharing
    names = part_names(path, rank_group.from_leader("the name of a save", secrets.token_hex(4)), sharing.size)
    own = path.with_name(names[sharing.rank - 1]) if sharing.rank else None
    before: list[Path] = []
    staged: Path | None = None
    try:
        with rank_group.together("saving requests"):
            content = make(names)
            if own is not None:
                file_format.write(own, *content)
            else:
                before = parts_beside(path)
                staged = file_format.stage(path, *content)
        with rank_group.together("putting saved requests in place"):
            if staged is not None:
                file_format.put_in_place(staged, path)
    except BaseException as error:
        if staged is not None:
            staged.unlink(missing_ok=True)
        # It is unknown how far a lost rank came: the leader's file may be in place, and name this part.
        if own is not None and not isinstance(error, RankFailure):
            own.unlink(missing_ok=True)
        raise
    remove(before)


def remove(parts: Iterable[Path]) -> None:
    for part in parts:
        part.unlink(missing_ok=True)


def parts_beside(path: Path) -> list[Path]:
    """Files that the file at `path` names as its parts; none if there is no such file, or one of another format."""
    try:
        manifest = file_format.read_manifest(path)
    except (SnapshotError, FileNotFoundError):
        return []
    return [path.with_name(name) for name in manifest.get("parts") or () if Path(name).name == name]


def read_part(path: Path, manifest: Mapping[str, Any], rank: int) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """(what its memory depends on, tensors) of a rank's part of the file at `path`.

    Raises SnapshotError; FileNotFoundError if it is missing.
    """
    name = manifest["parts"][rank - 1]
    if Path(name).name != name:
        raise ValueError(f"a part is named {name!r}")
    own = path.with_name(name)
    about, tensors = file_format.read(own)
    if about.get("part") != name or about.get("kv") is None:
        raise SnapshotError(own, f"not the part of {path.name} that rank {rank} wrote")
    return about["kv"], tensors
