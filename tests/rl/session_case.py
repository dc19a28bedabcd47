"""Sessions, prompts and training steps that the tests of sessions share."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import engines
import torch
from engines import tokens_of

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.rl.session import RolloutSession

VOCAB = 128
SIZES = {"buffer_size_gb": engines.BUFFER_GIB, "max_sequence_length": 128, "max_requests": 8, "max_tokens": 256}
BASE: dict[str, Any] = engines.BASE | SIZES
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)


def make_session(model: Any, optimizer: Any = None, *, settings: dict[str, Any] | None = None, **how: Any) -> Any:
    return RolloutSession(model, InferenceConfig(**BASE | (settings or {})), optimizer=optimizer, **how)


def prompts(count: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, VOCAB, (7 + 9 * i,), generator=generator).tolist() for i in range(count)]


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights in another model; process groups cannot be copied."""
    return copy.deepcopy(model, {id(group): group for group in vars(model.pg_collection).values()})


def answers_in(session) -> list[list[int]]:
    with session.generating() as roll:
        return [group.samples[0].token_ids for group in roll.generate(prompts(), PARAMS)]


def fresh_answers(model: torch.nn.Module, params: SamplingParams = PARAMS) -> list[list[int]]:
    """Tokens of a new engine with the model's weights."""
    return tokens_of(engines.make_engine(copied(model).eval(), **BASE).generate(prompts(), params))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(4, VOCAB, (2, 12), generator=torch.Generator().manual_seed(step))
    return ids, torch.arange(12)[None].expand(2, -1), ids.roll(-1, 1)


def own_positions(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a context-parallel rank has of tensors [rows, positions], by megatron-core."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    how: dict[str, Any] = {"cp_group": parallel_state.get_context_parallel_group()}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:
        how["is_hybrid_cp"] = False
    return get_batch_on_this_cp_rank(dict(batch), **how)


def train_step(model: Any, step: int, rate: float = 0.3, grads: list[torch.Tensor] | None = None) -> float:
    """A step of gradient descent -> its loss; grads: receives copies of the gradients."""
    ids, positions, labels = batch(step)
    loss = model(ids, positions, None, labels=labels).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if grads is not None:
                grads.append(parameter.grad.clone())
            parameter.sub_(parameter.grad, alpha=rate)
            parameter.grad = None
    return loss.item()
