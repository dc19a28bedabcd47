"""The training side of examples/grpo.py: optimizers of a megatron-core model, its initial weights, checkpoints."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_infer.errors import ConfigError

BETAS = (0.9, 0.95)
CLIP = 1.0


@dataclass
class Trainer:
    """A model with its optimizer, which `RolloutSession.step` takes."""

    model: torch.nn.Module
    """The model for the training forward, with its DDP wrapper if there is one."""
    optimizer: Any

    def state_dict(self) -> dict[str, Any]:
        with on_cpu():
            return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with on_cpu():
            self.optimizer.load_state_dict(state)


def make_trainer(kind: str, model: torch.nn.Module, *, lr: float) -> Trainer:
    """kind: "megatron" or "torch"."""
    return megatron_trainer(model, lr=lr) if kind == "megatron" else Trainer(model, AdamWOnMasters(model, lr=lr))


def megatron_trainer(model: Any, *, lr: float) -> Trainer:
    """megatron-core's DDP and Adam, with master weights and gradients in fp32 for every dtype of the model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    dtype = next(model.parameters()).dtype
    with on_cpu():
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.0,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            clip_grad=CLIP,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
        )
        return Trainer(ddp, get_megatron_optimizer(settings, [ddp]))


class AdamWOnMasters:
    """torch's AdamW on fp32 copies of the parameters, for one process: it does not reduce gradients over ranks."""

    def __init__(self, model: torch.nn.Module, *, lr: float) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [parameter.detach().float().clone() for parameter in self._parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, betas=BETAS, weight_decay=0.0)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> tuple[bool, float, None]:
        """Update the weights -> (True, norm of the gradient before clipping, None), megatron-core's return value."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self._masters, CLIP)
        self._optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                parameter.copy_(master)
        return True, norm.item(), None

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "masters": self._masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        for master, saved in zip(self._masters, state["masters"], strict=True):
            master.copy_(saved)


def on_cpu() -> contextlib.AbstractContextManager[None]:
    """Without a CUDA device, which megatron-core's optimizer assumes, the CPU shim."""
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    from megatron_infer.testing.cpu_shim import cpu_shim

    return cpu_shim()


class Reference:
    """A copy of a model's initial weights, to score with later."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._weights = [parameter.detach().clone() for parameter in model.parameters()]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model has its initial weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, kept in zip(self._model.parameters(), self._weights, strict=True):
            present = parameter.clone()
            parameter.copy_(kept)
            kept.copy_(present)


def save(folder: Path, *, rank: int, model: torch.nn.Module, trainer: Trainer, run: dict[str, Any]) -> None:
    """Save this rank's weights that train, optimizer, generator state and `run`, replacing the file atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "model": {name: parameter.detach() for name, parameter in trained(model)},
        "trainer": trainer.state_dict(),
        "rng": torch.get_rng_state(),
        "run": run,
    }
    path = file_of(folder, rank)
    torch.save(content, path.with_suffix(".new"))
    torch.distributed.barrier()  # all ranks have written before any replaces its old file
    os.replace(path.with_suffix(".new"), path)


def load(folder: Path, *, rank: int) -> dict[str, Any]:
    """Load a file of `save` without executing code from it. Raises ConfigError."""
    path = file_of(folder, rank)
    try:
        return torch.load(path, weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise ConfigError(
            f"--resume: there is no {path}; leave --resume out to begin, or give the --out-dir"
        ) from error
    except (OSError, RuntimeError, pickle.UnpicklingError, ValueError) as error:
        raise ConfigError(f"--resume: {path} cannot be read: {error}") from error


def restore(content: dict[str, Any], *, model: torch.nn.Module, trainer: Trainer) -> None:
    with torch.no_grad():
        for name, parameter in trained(model):
            parameter.copy_(content["model"][name])
    trainer.load_state_dict(content["trainer"])
    torch.set_rng_state(content["rng"])


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that train: with --lora-rank the adapter's."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"
