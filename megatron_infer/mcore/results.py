"""Requests and results between megatron-core's types and those of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.inference import inference_request
from megatron.core.inference.contexts.dynamic_context import ContextOverflowError
from megatron.core.inference.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    Status,
)

from megatron_infer.errors import RequestError
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestEvent, RequestOutput

_FIELDS = {item.name for item in fields(DynamicInferenceRequest)}
_EVENTS = DynamicInferenceEventType.__members__


class Codec:
    """A tokenizer of megatron-core as the engine's `TextCodec`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special_ids: frozenset[int] = frozenset()
        end = getattr(tokenizer, "eod", None)
        self.eos_ids: tuple[int, ...] = () if end is None or end < 0 else (int(end),)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """`add_special` has no effect: megatron-core's tokenizers add what they are configured to add."""
        return [int(token) for token in self.tokenizer.tokenize(text)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self.tokenizer.detokenize(list(ids)))

    def token_str(self, token_id: int) -> str:
        return self.decode([token_id])


def prompt_of(prompt: Any) -> str | list[int]:
    """A prompt as megatron-core's calls take it: text, token ids, or a tensor of token ids."""
    if isinstance(prompt, torch.Tensor):
        prompt = prompt.tolist()
    return prompt if isinstance(prompt, str) else [int(token) for token in prompt]


def refuse_images(given: Mapping[str, Any]) -> None:
    """Raise RequestError for a keyword that is set: the models here read text alone."""
    if named := [name for name, value in given.items() if value is not None and value != 0]:
        raise RequestError(f"{', '.join(named)}: models here read text alone; leave it out")


def result_of(
    output: RequestOutput, request_id: int, prompt: str | None, params: Any, codec: Codec | None
) -> DynamicInferenceRequest:
    """A finished output of one sequence as megatron-core's request; fields that its release lacks are left out.

    params: megatron-core's sampling parameters. codec: None where the text is the engine's own, as at a client in
    another process.
    """
    one = output.outputs[0]
    is_cut = bool(getattr(params, "stop_words", None))  # a stop word cuts the text as the engine has it
    wants_text = getattr(params, "detokenize_generations", True)
    decode = None if codec is None or is_cut or not wants_text else codec.decode
    values: dict[str, Any] = {
        "request_id": request_id,
        "prompt": prompt,
        "prompt_tokens": torch.tensor(output.prompt_token_ids, dtype=torch.int64),
        "prompt_length": len(output.prompt_token_ids),
        "sampling_params": params,
        "generated_tokens": list(one.token_ids),
        "generated_length": len(one.token_ids),
        "generated_text": one.text if decode is None else decode(one.token_ids),
        "status": Status.COMPLETED if output.error is None and one.finish_reason != "abort" else Status.FAILED,
        "latency": output.metrics.latency_s,
        "ttft": output.metrics.ttft_s,
        "num_cached_tokens": output.num_cached_tokens,
        "events": [
            DynamicInferenceEvent(timestamp=event.time_s, type=_EVENTS[event.kind], payload=_payload(event))
            for event in output.events
            if event.kind in _EVENTS
        ],
        **epochs_of(output, one),
    }
    if one.logprobs is not None:
        entries = zip(one.token_ids, one.logprobs, strict=True)
        values["generated_log_probs"] = [entry[token].logprob for token, entry in entries]
        values["prompt_log_probs"] = []
        top = params.top_n_logprobs
        if top:
            values["generated_top_n_logprobs"] = [_most_likely(entry, top, codec) for entry in one.logprobs]
        if output.prompt_logprobs is not None:
            pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
            values["prompt_log_probs"] = [entry[token].logprob for token, entry in pairs if entry is not None]
            if top:
                values["prompt_top_n_logprobs"] = [_most_likely(entry or {}, top, codec) for _, entry in pairs]
    result = DynamicInferenceRequest(**{name: value for name, value in values.items() if name in _FIELDS})
    if output.error is not None:
        result.add_event_error_nontransient(ContextOverflowError(request_id, str(output.error), is_transient=False))
    return result


def epochs_of(output: RequestOutput, one: CompletionOutput) -> dict[str, list[tuple[int, int]]]:
    """policy_epoch and kv_cache_epoch: (first token, weight version), where tokens of the prompt count.

    As in megatron-core a new version begins at the last token before it: that token's keys and values are the first
    that the new weights compute.
    """
    first = [0, *(len(output.prompt_token_ids) + span.first_token - 1 for span in one.spans[1:])]
    pairs = list(zip(first, one.spans, strict=False))
    return {
        "policy_epoch": [(at, span.policy_version) for at, span in pairs],
        "kv_cache_epoch": [(at, span.kv_version_min) for at, span in pairs],
    }


def ledger_entry(output: RequestOutput) -> Any:
    """What megatron-core's engine remembers of a finished request for its trainer."""
    return getattr(inference_request, "FinishedRequestRecord", SimpleNamespace)(
        **epochs_of(output, output.outputs[0]), num_evictions=output.metrics.num_evictions
    )


def _most_likely(entry: Mapping[int, Logprob], count: int, codec: Codec | None) -> dict[str, float]:
    top = sorted(entry.items(), key=lambda item: -item[1].logprob)[:count]
    return {one.decoded_token or "" if codec is None else codec.decode([id]): one.logprob for id, one in top}


def _payload(event: RequestEvent) -> dict[str, Any] | None:
    """The payload of the event of a drawn token; megatron-core's other events have none."""
    return {"token_id": event.payload["token"]} if event.kind == "GENERATED_TOKEN" else None
