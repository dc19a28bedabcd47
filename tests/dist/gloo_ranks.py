"""Functions run on several gloo processes; a failure of one rank fails the test with that rank's traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def run_on_ranks(function: Callable[..., None], size: int, folder: Path, *arguments: Any) -> None:
    """function(rank, size, folder, *arguments) in `size` new processes with a gloo group over them all."""
    store = folder / f"store.{function.__name__}.{size}"
    torch.multiprocessing.spawn(_enter, args=(function, size, folder, str(store), arguments), nprocs=size)


def _enter(
    rank: int, function: Callable[..., None], size: int, folder: Path, store: str, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, size), rank=rank, world_size=size
    )
    function(rank, size, folder, *arguments)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def gathered(shard: torch.Tensor) -> torch.Tensor:
    """Every rank's columns side by side."""
    parts = [torch.empty_like(shard) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, shard.contiguous())
    return torch.cat(parts, dim=-1)


def new_groups(**sizes: int) -> None:
    """megatron-core's groups for another layout of the same processes."""
    from megatron_infer.models.mcore_compat import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
