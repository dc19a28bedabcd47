"""A trainer of another framework, to the engines: rank 0 of a gloo group, formed by torch's own functions."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from ports import free_port
from torch.distributed import distributed_c10d as c10d

LIMIT = timedelta(seconds=60)


class Trainer:
    """kind: torch, as slime and AReaL form their groups, or stateless, as vLLM's TorchDistTransport does."""

    numbers = iter(range(1 << 30))

    def __init__(self, kind="torch", world_size=2):
        self.kind, self.world_size, self.port = kind, world_size, free_port()
        self.name = f"group {next(self.numbers)}"
        self.group = self.failure = None

    def begin(self):
        """Open the store and wait for the engines, in a thread."""
        self._thread = threading.Thread(target=self._form, daemon=True)
        self._thread.start()

    def _form(self):
        try:
            uri = f"tcp://127.0.0.1:{self.port}"
            store, *_ = next(c10d.rendezvous(uri, 0, self.world_size, timeout=LIMIT))
            if self.kind == "torch":
                store = dist.PrefixStore(self.name, store)
                self.group, _ = c10d._new_process_group_helper(
                    self.world_size, 0, [], dist.Backend("gloo"), store, group_name=self.name, timeout=LIMIT
                )
                c10d._world.pg_group_ranks[self.group] = {rank: rank for rank in range(self.world_size)}
            else:
                self.group = dist.ProcessGroupGloo(dist.PrefixStore(uri, store), 0, self.world_size, timeout=LIMIT)
            self.store = store
        except BaseException as error:
            self.failure = error

    def joined(self):
        self._thread.join(60)
        assert self.failure is None and self.group is not None, self.failure

    def broadcast(self, tensor):
        if self.kind == "torch":
            dist.broadcast(tensor, 0, group=self.group)
            return
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.group.broadcast([tensor], options).wait()
        self.group.barrier().wait()

    def send(self, tensors, *, buffer_bytes=None):
        """Whole tensors, or joined to buffers as vLLM does it; in a thread, as the clients do."""
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        if buffer_bytes is not None:
            tensors = list(packed(tensors, buffer_bytes))

        def run():
            try:
                for tensor in tensors:
                    self.broadcast(tensor)
            except RuntimeError as error:  # the engines have left
                self.failure = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def sent(self):
        """Whether everything was sent; False: the engines have left before."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the trainer hangs"
        return self.failure is None

    def end(self):
        """As the end of its process: its connections are closed."""
        if self.kind == "torch" and self.group is not None:
            c10d._abort_process_group(self.group)
        elif self.group is not None:
            self.group.abort()
        self.group = self.store = None


def packed(tensors, buffer_bytes):
    part, size = [], 0
    for tensor in tensors:
        part.append(tensor.view(-1).view(torch.uint8))
        size += tensor.nbytes
        if size > buffer_bytes:
            yield torch.cat(part)
            part, size = [], 0
    if part:
        yield torch.cat(part)


def described(tensors, types="dtypes"):
    """names, dtypes (or dtype_names) and shapes, as clients send them."""
    return {
        "names": list(tensors),
        types: [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
        "shapes": [list(one.shape) for one in tensors.values()],
    }
