"""Several chunks of a model on one pipeline rank as one model: Megatron's virtual pipeline stages.

rank 0: chunk 0 ─▶ rank 1: chunk 0 ─▶ rank 0: chunk 1 ─▶ rank 1: chunk 1        two ranks with two chunks each
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from megatron_infer.errors import AdoptionError


class ModelChunks(torch.nn.Module):
    """The chunks of one rank, first to last. Attributes that it lacks are those of the first chunk.

    It is not called: each chunk's forward takes what the stage before has sent.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Raises AdoptionError for what is not the list of one rank's chunks in their order."""
        super().__init__()
        self.chunks = torch.nn.ModuleList(chunks)
        first: Any = chunks[0]
        size = first.config.virtual_pipeline_model_parallel_size or 1
        if size != len(chunks):
            raise AdoptionError(
                "config",
                f"virtual_pipeline_model_parallel_size={size}, but {len(chunks)} model chunks are given; give all "
                "chunks of the rank, as Megatron's get_model returns them",
            )
        numbers = [layer.layer_number for chunk in self.chunks for layer in chunk.decoder.layers]
        is_ordered = all(one < other for one, other in pairwise(numbers))
        if not is_ordered or any(one.pre_process for one in chunks[1:]) or any(one.post_process for one in chunks[:-1]):
            raise AdoptionError("", f"the model chunks are not in their order (layers {numbers})")
        for number, chunk in enumerate(self.chunks):
            if hasattr(chunk, "mtp") or getattr(chunk, "mtp_process", False):
                raise AdoptionError(f"chunks.{number}.mtp", "MTP layers with virtual pipeline stages are not supported")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "chunks":
                raise
            return getattr(self.chunks[0], name)

    @property
    def training(self) -> bool:  # type: ignore[override]
        """Whether the chunks train: a trainer calls train() of the chunks."""
        return any(chunk.training for chunk in self.chunks)

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    @property
    def decoder(self) -> SimpleNamespace:
        """All layers, in their order."""
        return SimpleNamespace(layers=[layer for chunk in self.chunks for layer in chunk.decoder.layers])

    @property
    def post_process(self) -> bool:
        return bool(self.chunks[-1].post_process)

    @property
    def output_layer(self) -> Any:
        return self.chunks[-1].output_layer

    def shared_embedding_or_output_weight(self) -> Any:
        last: Any = self.chunks[-1]
        return last.shared_embedding_or_output_weight()

    def sharded_state_dict(self, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """megatron-core's, by the names of `state_dict`."""
        return {
            f"chunks.{number}.{name}": value
            for number, chunk in enumerate(self.chunks)
            for name, value in chunk.sharded_state_dict(metadata=metadata).items()  # type: ignore[operator]
        }

    def set_is_first_microbatch(self) -> None:
        for chunk in self.chunks:
            chunk.set_is_first_microbatch()  # type: ignore[operator]


def as_one(model: Any) -> Any:
    """A model, or Megatron's list of the chunks of a rank, within its wrappers or without, as one model."""
    from megatron.core.utils import unwrap_model

    inner = [unwrap_model(chunk) for chunk in model] if isinstance(model, list | tuple) else [unwrap_model(model)]
    return inner[0] if len(inner) == 1 else ModelChunks(inner)


def chunks_of(model: Any) -> list[Any]:
    """The chunks of a model, or of a list of them; itself where it has one."""
    if isinstance(model, list | tuple):
        return list(model)
    return list(model.chunks) if isinstance(model, ModelChunks) else [model]
