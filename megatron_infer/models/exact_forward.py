"""The trainer's forward on the engine's exact kernels: log probabilities equal to the engine's, bit for bit.

    with exact_math(model) as exact:                              # inside, model(...) is exact and trains
        logits = model(tokens, positions, None)
        logprobs = exact.token_logprobs(logits[:, :-1], tokens[:, 1:])
    old = exact_logprobs(model, [prompt + answer])                # a function of its own, without gradients

An engine with batch_invariant=True gives the same bits for every prompt and output token, however it was scheduled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_infer.errors import ModelError
from megatron_infer.kernels import select
from megatron_infer.kernels.exact import ExactAttention, ExactOps
from megatron_infer.kernels.native.native_lora import NativeLoRA
from megatron_infer.kernels.native.native_sampling import NativeSampling
from megatron_infer.kernels.native.native_scan import NativeScan
from megatron_infer.models.adopt import AdoptedModel, adopt
from megatron_infer.models.attached_lora import attached, lora_of
from megatron_infer.models.exact_step import DifferentiableOps, TrainedPair, TrainedPairs, TrainingStep
from megatron_infer.models.mcore_compat import MoELayer, packed_lengths
from megatron_infer.models.model_chunks import chunks_of
from megatron_infer.models.moe import expert_ranks
from megatron_infer.utils.attributes import replaced

LOGPROB_ROWS = 256
"""Positions whose logits exist at once where no gradients are needed."""


@contextlib.contextmanager
def exact_math(model: torch.nn.Module | Sequence[torch.nn.Module]) -> Iterator[ExactForward]:
    """Inside, the model's forward runs on exact kernels, in training and in eval mode, with gradients.

    `model` is a GPTModel, MambaModel or HybridModel on a CPU, bare or in DDP or Float16Module, whole or one of
    several tensor-parallel ranks (an engine has the same bits if it has as many ranks). Its forward takes [b, s]
    tokens, causal and padded on the right if at all, or packed sequences, and returns logits, or losses where there
    are labels (over the true vocabulary, without padding). A pipeline stage, or a list of its chunks, takes and
    returns its residual stream [s, b, D] in fp32, whatever config.pipeline_dtype is, and has the bits of a whole
    model. It differs from the stock forward by rounding: the residual stream of bf16 models is fp32, as in the
    engine. Layers run as functions: forward hooks of inner modules are refused. What is not known to be exact is
    refused by name: AdoptionError, ModelError, ConfigError.
    The model stays adopted (`models.adopt`), which has no effect outside of an engine.
    """
    forward = ExactForward(adopt(model))
    with contextlib.ExitStack() as stack:
        for number, chunk in enumerate(chunks_of(forward.live)):
            stack.enter_context(replaced(chunk, forward=ChunkForward(forward, number)))
        yield forward


def exact_logprobs(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    sequences: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    grad: bool = False,
) -> list[Tensor]:
    """fp32 [n - 1] for each sequence of n tokens: log probability of each token but the first, given those before it.

    The bits of an engine with batch_invariant=True: its raw log probabilities at temperature 1, its processed ones at
    the request's temperature (without filters, penalties and biases). grad: with gradients.
    """
    return ExactForward(adopt(model)).logprobs(sequences, temperature=temperature, grad=grad)


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature) at the given tokens, by the engine's kernel."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, tokens_T: Tensor, temperature_T1: Tensor | None) -> Tensor:
        values = logits_TV if temperature_T1 is None else logits_TV.float() / temperature_T1
        values = values if values.stride(-1) == 1 else values.contiguous()
        ctx.save_for_backward(logits_TV, tokens_T, temperature_T1)
        return NativeSampling(select.exact_library(values.device, values.dtype)).score(values, tokens_T, 0)[0]

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, tokens_T, temperature_T1 = ctx.saved_tensors
        values = logits_TV.float() if temperature_T1 is None else logits_TV.float() / temperature_T1
        grad_TV = values.softmax(-1).mul_(-grad_T[:, None])
        grad_TV.scatter_add_(1, tokens_T[:, None], grad_T[:, None])
        if temperature_T1 is not None:
            grad_TV /= temperature_T1
        return grad_TV.to(logits_TV.dtype), None, None


def token_logprobs(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, vocab_size: int | None = None
) -> Tensor:
    """fp32 log probability of each token under its row of logits [..., V], with the engine's bits, and gradients.

    vocab_size: entries behind it are padding of the vocabulary, which is never drawn; None: there is none.
    """
    vocab = logits.shape[-1] if vocab_size is None else vocab_size
    flat_TV, ids_T = logits.reshape(-1, logits.shape[-1])[:, :vocab], tokens.reshape(-1).to(torch.int64)
    # A column, divided elementwise as in the sampler.
    warm = None if temperature == 1.0 else torch.full((len(ids_T), 1), temperature, dtype=torch.float64).float()
    return _TokenLogprobs.apply(flat_TV, ids_T, warm).view(tokens.shape)


class ExactForward:
    """Replaces a live model's forward. Reads the weights in every call and keeps no copy."""

    def __init__(self, adopted: AdoptedModel) -> None:
        self._adopted = adopted
        self.live = adopted.live
        """The model itself, without wrappers."""
        self._dtype: torch.dtype = getattr(torch, adopted.shape.dtype)
        if (reason := inexact_part(adopted)) is not None:
            raise ModelError(f"exact_math: {reason}")
        self.vocab_size = adopted.shape.vocab_size
        """True size; entries of logits beyond are padding."""
        self._chosen: tuple[Tensor, Tensor] | None = None
        chosen = select.choose_exact(
            adopted.device, self._dtype, specs=adopted.specs, block_size=256, ssm_specs=adopted.ssm_specs
        )
        library = select.exact_library(adopted.device, self._dtype)
        self._ops = DifferentiableOps(ExactOps(library, self._dtype))
        self._attention = ExactAttention(library, self._dtype)
        self._scan = NativeScan(library, self._dtype) if adopted.ssm_specs else None
        pairs: dict[str, Any] = {
            path: TrainedPair(pair, linear)
            for path, linear in adopted.linears.items()
            if (pair := lora_of(self.live.get_submodule(linear.name), trains_only=True)) is not None
        }
        adopted.set_lora(pairs)
        self._lora = TrainedPairs(NativeLoRA(library, self._dtype)) if pairs else None
        self.rows = chosen.rows
        """Operations and backends, as in the engine's start-up table."""

    def run(self, chunk: int, *args: Any, **kwargs: Any) -> Tensor:
        """The arguments and result of the forward of a chunk: of the model itself, where that has one."""
        live = chunks_of(self.live)[chunk]
        stock = type(live).forward
        given = inspect.signature(stock).bind(live, *args, **kwargs).arguments
        if given.get("inference_context") is not None or given.get("inference_params") is not None:
            return stock(live, *args, **kwargs)
        for name in ("decoder_input", "extra_block_kwargs"):
            if given.get(name) is not None:
                raise ModelError(f"exact_math: {name} is given; the exact forward starts from token ids")
        tokens_bs, packed = given["input_ids"], given.get("packed_seq_params")
        batch, length = tokens_bs.shape
        if packed is None:
            lengths = [length] * batch
            _check_causal(given.get("attention_mask"), given.get("position_ids"), tokens_bs)
        else:
            lengths = packed_lengths(packed, length=length, batch=batch)
        received_TD = None if live.pre_process else live.decoder.input_tensor.transpose(0, 1).flatten(0, 1)
        hidden_TD = self._hidden(tokens_bs.flatten(), lengths, received_TD, chunk)
        if not live.post_process:
            # a tensor of its own: megatron-core's schedule frees it once it is sent
            return hidden_TD.view(batch, length, -1).transpose(0, 1).clone(memory_format=torch.contiguous_format)
        if self._chosen is not None:
            rows_P, positions_P = self._chosen
            hidden_PD = hidden_TD.index_select(0, rows_P * tokens_bs.shape[1] + positions_P)
            return self._adopted.logits(hidden_PD, self._ops).unsqueeze(0)
        logits_TV = self._adopted.logits(hidden_TD, self._ops)
        logits_bsV = logits_TV.view(*tokens_bs.shape, -1)
        labels_bs = given.get("labels")
        if labels_bs is None:
            return logits_bsV
        return -self.token_logprobs(logits_bsV, labels_bs)

    def logits_at(self, rows_P: Tensor, positions_P: Tensor) -> contextlib.AbstractContextManager[None]:
        """Inside, this forward gives logits [1, P, V] (see `models.selected_logits.logits_at`)."""
        return replaced(self, _chosen=(rows_P, positions_P))

    def token_logprobs(self, logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
        """`token_logprobs` of this forward's logits, over the true vocabulary of all tensor-parallel ranks."""
        whole_TV = self._adopted.whole_logits(logits.reshape(-1, logits.shape[-1]))
        whole = whole_TV.view(*logits.shape[:-1], whole_TV.shape[-1])
        return token_logprobs(whole, tokens, temperature=temperature, vocab_size=self.vocab_size)

    def logprobs(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0, grad: bool = False
    ) -> list[Tensor]:
        """See `exact_logprobs`."""
        if not (self.live.pre_process and self.live.post_process):
            raise ModelError("exact_logprobs: the model is one stage of a pipeline; RolloutSession.score passes stages")
        lengths = [len(sequence) for sequence in sequences]
        if not lengths or min(lengths) == 0:
            raise ModelError(f"exact_logprobs: sequences of {lengths} tokens; each needs at least one")
        tokens_T = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
        with torch.set_grad_enabled(grad):
            hidden_TD = self._hidden(tokens_T, lengths)
            starts = itertools.accumulate(lengths, initial=0)
            rows = [start + i for start, n in zip(starts, lengths, strict=False) for i in range(n - 1)]
            rows_P = torch.tensor(rows, dtype=torch.int64)
            scored = [hidden_TD.new_empty(0, dtype=torch.float32)]
            for part_P in rows_P.split(len(rows) if grad and rows else LOGPROB_ROWS):
                logits_PV = self._adopted.logits(hidden_TD.index_select(0, part_P), self._ops)
                targets_P = tokens_T.index_select(0, part_P + 1)
                scored.append(self.token_logprobs(logits_PV, targets_P, temperature=temperature))
            return list(torch.cat(scored).split([n - 1 for n in lengths]))

    def _hidden(
        self, tokens_T: Tensor, lengths: list[int], received_TD: Tensor | None = None, chunk: int = 0
    ) -> Tensor:
        """See `AdoptedModel.decode`."""
        config = self.live.config
        if self.live.training:
            _refuse_training(config)
            if any(pair.dropout for pair in attached(self.live)):
                raise ModelError("exact_math in training mode: the adapter has dropout, which is random; call eval()")
        step = TrainingStep(
            tokens_T,
            lengths,
            ops=self._ops,
            attention=self._attention,
            scan=self._scan,
            rotary=self._adopted.rotary_table(max(lengths)),
            dtype=self._dtype,
            live_scan_weights=self._adopted.live_scan_weights,
            lora=self._lora,
        )
        recompute = self.live.training and config.recompute_granularity is not None and torch.is_grad_enabled()
        return self._adopted.decode(
            step,
            received_TD,
            around=functools.partial(checkpoint, use_reentrant=False) if recompute else None,
            chunk=chunk,
        )


class ChunkForward:
    """In the place of one chunk's forward."""

    def __init__(self, forward: ExactForward, number: int) -> None:
        self._forward = forward
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward.run(self._number, *args, **kwargs)


def _check_causal(mask: Tensor | None, positions_bs: Tensor | None, tokens_bs: Tensor) -> None:
    """Raise ModelError unless each entry is one causal sequence from position 0, with padding behind it."""
    length = tokens_bs.shape[1]
    if positions_bs is not None and not bool((positions_bs == torch.arange(length)).all()):
        raise ModelError(
            "exact_math: position_ids are not 0, 1, 2, ... in every row; pad on the right, or give packed_seq_params"
        )
    if mask is None:
        return
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    if mask.dtype is not torch.bool or mask.shape[-2:] != hidden.shape or not bool((mask == hidden).all()):
        raise ModelError(
            "exact_math: attention_mask is not the causal one (True above the diagonal); pad on the right, where "
            "nothing sees the padding, and pass None"
        )


def inexact_part(adopted: AdoptedModel) -> str | None:
    """Why a model's answers cannot be exact: sums over ranks, modules that our kernels do not run; None: they can."""
    live = adopted.live
    for name, module in live.named_modules():
        if not isinstance(module, MoELayer) or (ranks := expert_ranks(module)) is None:
            continue
        own = None if adopted.tp_group is None else dist.get_process_group_ranks(adopted.tp_group)
        if sorted(dist.get_process_group_ranks(ranks)) != sorted(own or []):
            return f"{name} has experts on ranks beyond the tensor-parallel ones: a trainer has other tokens there"
    if adopted.fp8 is not None:
        return (
            "its linears multiply in FP8 (config.fp8): Transformer Engine's products depend on how many rows they have"
        )
    if (name := adopted.foreign_layer()) is not None:
        return f"{name} is a layer of another class, whose arithmetic is not known"
    if live.config.num_moe_experts is not None and "sinkhorn" in live.config.moe_router_load_balancing_type:
        return "sinkhorn routing in a training forward depends on the whole batch"
    return None


def _refuse_training(config: Any) -> None:
    """Raise ModelError for what a training-mode forward computes and this one does not."""
    reasons = {
        "hidden_dropout": "dropout is random",
        "attention_dropout": "dropout is random",
    }
    if torch.is_grad_enabled():
        reasons["sequence_parallel"] = "every rank has all tokens here: gradients of norms would be added up twice"
    if torch.is_grad_enabled() and config.num_moe_experts is not None:
        reasons |= {
            "moe_z_loss_coeff": "the router's loss is not computed here",
            "moe_router_enable_expert_bias": "tokens are not counted for the bias here",
        }
        if config.moe_router_load_balancing_type != "none":
            reasons["moe_aux_loss_coeff"] = "the balancing loss is not computed here"
    for name, reason in reasons.items():
        value = getattr(config, name, None)
        if value and value != [0.0]:
            raise ModelError(f"exact_math in training mode: {name}={value}, and {reason}; set it to 0, or call eval()")
