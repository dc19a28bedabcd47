"""Models that train in FP8 with Transformer Engine: what they generate, and that training goes on as if nothing had."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import torch

from gpu_checks.context import Context
from gpu_checks.engines import VOCABULARY, answers, make_engine
from gpu_checks.registry import Comparison, Unavailable, check
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import AdoptionError
from megatron_infer.models.adopt import adopt
from megatron_infer.testing.tiny import init_single_process, tiny_gpt

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
SHARES = {"tensorwise": 0.4}
"""Mean difference of log probabilities that may be, of the logits' spread; 0.2 for other recipes. One scale for all
rows makes a row's codes those of its company."""
LENGTH = 64
"""Tokens of a forward in training; a multiple of what every recipe asks of its rows."""


def _spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec()


def _make(recipe: str, device: torch.device, *, kept: bool) -> Any:
    if device.type == "cuda":  # megatron-core draws weights from generators of its own, which move on
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        init_single_process()
        model_parallel_cuda_manual_seed(1234)
    return tiny_gpt(
        spec=_spec,
        fp8="hybrid",
        fp8_recipe=recipe,
        fp8_param=kept,
        fp8_amax_history_len=4,
        params_dtype=torch.bfloat16,
        vocab_size=VOCABULARY,
        hidden_size=256,
        ffn_hidden_size=512,
        num_attention_heads=4,
        num_query_groups=2,
        max_sequence_length=512,
    )


def _forward(model: Any, ids: list[int], device: torch.device) -> torch.Tensor:
    positions = torch.arange(len(ids), device=device)[None]
    return model(torch.tensor([ids], device=device), positions, None)[0, :, :VOCABULARY].float()


def _train(model: Any, device: torch.device, *, step: int) -> torch.Tensor:
    """Logits of a forward in training mode, in which histories, scales and kept copies move on."""
    model.train()
    model.set_is_first_microbatch()
    logits = _forward(model, [(7 * step + 11 * i) % VOCABULARY for i in range(LENGTH)], device)
    model.eval()
    return logits.detach()


def _state(model: Any) -> dict[str, torch.Tensor]:
    """What delayed scaling keeps from one step to the next."""
    found = {}
    for name, module in model.named_modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            state = getattr(module, "fp8_meta", {}).get(key)
            for kept in ("scale", "amax_history"):
                if (value := getattr(state, kept, None)) is not None:
                    found[f"{name}.{key}.{kept}"] = value.clone()
    return found


def _difference(model: Any, ids: list[int], got: torch.Tensor, device: torch.device) -> float:
    """Of the log probabilities of the last tokens from those of the model's own forward, over its logits' spread."""
    model.set_is_first_microbatch()  # else it may multiply by copies of weights that were others then
    with torch.no_grad():
        logits = _forward(model, ids + [0] * (-len(ids) % 32), device)[: len(ids)].cpu()
    wanted = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return float((got - wanted[-len(got) :]).abs().mean() / logits.std())


def _answered(model: Any, device: torch.device, **settings: Any) -> list[tuple[list[int], torch.Tensor]]:
    """(prompt and answer, log probabilities of the answer's tokens) of each request."""
    prompts = [[(3 * n + 5 * i) % VOCABULARY for i in range(length)] for n, length in enumerate((5, 40, 64, 23))]
    asked = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = answers(make_engine(model, device, **settings), [(prompt, asked) for prompt in prompts])
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        sample = output.outputs[0]
        pairs = zip(sample.logprobs, sample.token_ids, strict=True)
        found.append((prompt + list(sample.token_ids), torch.tensor([entry[token].logprob for entry, token in pairs])))
    return found


def _after_one_step(recipe: str, device: torch.device, *, kept: bool) -> Any:
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    FP8GlobalStateManager.reset()  # delayed scaling updates every model that it knows
    model = _make(recipe, device, kept=kept)
    adopt(model)
    _train(model, device, step=1)
    return model


@check(budget_s=120, what="mean difference over spread")
def fp8_training_model(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """A model that trains in FP8 answers as its own forward but for rounding; its next training step is that of a model
    that nobody has asked, bit for bit.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        raise Unavailable("transformer-engine is not installed")
    warnings.simplefilter("ignore", DeprecationWarning)  # of transformer_engine.pytorch.fp8
    left_out, device = {}, ctx.device
    for recipe in RECIPES:
        for kept in (False, True):
            label = f"{recipe}{', weights in FP8' if kept else ''}"
            try:
                model = _after_one_step(recipe, device, kept=kept)
            except (AdoptionError, AssertionError, ValueError) as reason:  # Transformer Engine asserts what a GPU has
                left_out[label] = str(reason)
                continue
            before = _state(model)
            answered = _answered(model, device) + _answered(model, device, num_cuda_graphs=-1)
            after = _state(model)
            same = [name for name, value in before.items() if name in after and torch.equal(after[name], value)]
            compare.require(f"{label}: histories or scales changed", len(same) == len(before) == len(after))
            goes_on = _train(model, device, step=2)
            twin = _train(_after_one_step(recipe, device, kept=kept), device, step=2)
            compare.require(f"{label}: training went on otherwise", torch.equal(goes_on, twin))
            model = _after_one_step(recipe, device, kept=kept)
            for ids, got in answered[:2] + answered[-2:]:
                compare.add(label, _difference(model, ids, got, device), SHARES.get(recipe, 0.2))
    if len(left_out) == 2 * len(RECIPES):
        raise Unavailable("; ".join(sorted(set(left_out.values()))))
    return {"left_out": left_out}
