"""What runs in the policy's workers, by `__ray_call__`: the worker is the first argument.

The driver imports this module, and has no megatron-core: imports that need it are within the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError
from megatron_infer.outputs.request_output import RequestOutput

if TYPE_CHECKING:
    from megatron_infer.rl.frameworks.engine_host import EngineHost

HOST = "megatron_infer_host"
"""Attribute of a worker."""


def leads(worker: Any) -> bool:
    """Whether the worker has the first rank of an engine."""
    from megatron_infer.distributed.groups import ParallelGroups
    from megatron_infer.models.trainer_state import wrapper_chain

    return ParallelGroups.of(None, wrapper_chain(worker.model)[-1]).engine_rank == 0


def prepare(worker: Any, config: InferenceConfig, *, is_updated: bool) -> None:
    """The engine is made, or wakes up. Called on all workers. is_updated: the weights are new."""
    from megatron_infer.rl.frameworks.engine_host import EngineHost
    from megatron_infer.rl.session import RolloutSession

    worker.model = worker.move_model(worker.model, "cuda", move_params=True, move_grads=False)
    host: EngineHost | None = getattr(worker, HOST, None)
    if host is None:
        session = RolloutSession(worker.model, config, _codec(worker.tokenizer), meter=None)
        host = EngineHost(session)
        setattr(worker, HOST, host)
    elif is_updated:
        host.update(host.session.update_weights).result()
    host.generating().result()


def call(worker: Any, name: str) -> None:
    """Call a method of the worker's host, once there is one. `training` is called on all workers."""
    if hasattr(worker, HOST):
        getattr(getattr(worker, HOST), name)().result()


def submit(worker: Any, outputs: Any, calls: Sequence[tuple[str, list[int], SamplingParams]]) -> None:
    """Queue requests, in an engine's first worker; outputs and errors go to the actor `outputs`, by their keys."""
    host: EngineHost | None = getattr(worker, HOST, None)
    for key, prompt_ids, params in calls:
        if host is None:
            outputs.put.remote(key, None, "WrongState: generate before prepare_for_generation")
        else:
            host.generate(prompt_ids, params, _facts).add_done_callback(partial(_deliver, outputs, key))


def _facts(output: RequestOutput) -> dict[str, Any]:
    if output.error is not None:
        raise output.error
    sample = output.outputs[0]
    if sample.finish_reason == "abort":
        raise InferenceError(f"the request was aborted after {len(sample.token_ids)} tokens")
    return {
        "token_ids": list(sample.token_ids),
        "logprobs": list(sample.processed_logprobs or ()),
        "truncated": sample.finish_reason == "length",
    }


def _deliver(outputs: Any, key: str, done: Future[dict[str, Any]]) -> None:
    error = done.exception()
    text = "" if error is None else f"{type(error).__name__}: {error}"
    outputs.put.remote(key, None if text else done.result(), text)


def _codec(tokenizer: Any) -> Any:
    """The engine's form of a fast tokenizer of transformers, for stop texts; None for any other."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    import tokenizers

    from megatron_infer.text.tokenizer import Tokenizer

    return Tokenizer(tokenizers.Tokenizer.from_str(backend.to_str()))
