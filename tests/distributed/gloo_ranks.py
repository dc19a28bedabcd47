"""Functions run on several gloo processes; a failure of one rank fails the test with that rank's traceback."""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

PRELOAD = [
    *("megatron_infer.engine.engine", "megatron_infer.rl.updates", "megatron_infer.testing.tiny", "pytest"),
    "torch._dynamo",  # what an optimizer imports at its first step
]


def run_on_ranks(function: Callable[..., None], size: int, folder: Path, *arguments: Any) -> None:
    """function(rank, size, folder, *arguments) in `size` new processes with a gloo group over them all."""
    store = tempfile.mkdtemp(prefix="store.", dir=folder)  # a store that an earlier call has left would name its ranks
    start_ranks(_enter, (function, size, folder, f"{store}/store", arguments), size)


def fork_server() -> ForkServerContext:
    """What starts processes as forks of a server that has done the imports, most of what a small test costs.

    The server keeps the environment of the first start.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def start_ranks(function: Callable[..., None], arguments: tuple[Any, ...], size: int) -> None:
    """function(rank, *arguments) in `size` processes, to the end."""
    fork_server()
    torch.multiprocessing.start_processes(
        _with_imports_frozen, args=(function, arguments), nprocs=size, start_method="forkserver"
    )


def _with_imports_frozen(rank: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # a collection that walked what the server has imported would copy all of it into this process
    function(rank, *arguments)


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


def stage_ends(rank: int, size: int) -> dict[str, bool]:
    """Which ends of the model the pipeline stage of this number has: arguments of a model."""
    return {"pre_process": rank == 0, "post_process": rank == size - 1}
