"""Rollouts for TRL's trainers from a megatron-core model.

GRPOTrainer(..., rollout_func=EngineRollout(engine))                  an engine in the trainer's process
AsyncGRPOTrainer(..., weight_transfer=ServerWeights(url))             `megatron-infer serve --control` elsewhere

TRL trains a transformers model. The engine has a megatron-core model of the same shape. The trainer's weights are
written into it, in place, before the first rollout after each optimizer step.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from safetensors.torch import save

from megatron_infer.config.inference import KVCacheManagementMode
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.chosen_config import ConfigOrOptions
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.states import EngineState
from megatron_infer.errors import ConfigError, ModelError, WeightUpdateError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.families import family_of
from megatron_infer.models.loading.hf_config import description_from_config
from megatron_infer.outputs.request_output import CompletionOutput
from megatron_infer.rl.frameworks.buckets import buckets
from megatron_infer.rl.update_report import UpdateReport
from megatron_infer.rl.updates import apply


def engine_for(
    model: Any, config: ConfigOrOptions = None, *, dtype: str | torch.dtype | None = None
) -> DynamicInferenceEngine:
    """An engine with a megatron-core model of a transformers model's shape; it takes ids and has no weights yet.

    dtype: None: that of `model`. config None: logprobs_mode="processed", which a config should have too: importance
    weights need the distribution that tokens were drawn from. Raises ModelError for a family whose files have a tensor
    for each expert: transformers has one for all of a layer in memory, which updates do not take.
    """
    plan = description_from_config(model.config.to_dict(), _dict_of(getattr(model, "generation_config", None)))
    if plan.transformer.get("num_moe_experts") and "{expert}" in str(family_of(plan).tensors):
        raise ModelError(f"{plan.architecture}: weights of its experts are taken as files name them, not as in memory")
    device = next(model.parameters()).device
    live = build_model(plan, dtype=model.dtype if dtype is None else dtype, device=device)
    config = {"logprobs_mode": "processed"} if config is None else config
    return DynamicInferenceEngine(live, config, eos_ids=plan.eos_ids, device=str(device))


class EngineRollout:
    """A rollout_func of TRL 1.x: (prompts, trainer) -> prompt_ids, completion_ids, logprobs.

    Each process of the trainer has an engine of its own. Prompts are rendered by the trainer's tokenizer and template;
    equal neighbours become one request with several samples, whose prompt is computed once. Sampling parameters are the
    trainer's, overridden by `sampling` (fields of SamplingParams).
    TRL itself uses the log probabilities for its importance correction only with use_vllm=True.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        sampling: Mapping[str, Any] | None = None,
        suspend: KVCacheManagementMode | str | None = None,
    ) -> None:
        """suspend: the mode in which the engine is suspended between rollouts; None keeps its memory."""
        self.engine = engine
        self.report: UpdateReport | None = None
        """Report of the latest weight update."""
        self._sampling = {} if sampling is None else dict(sampling)
        self._suspend = None if suspend is None else KVCacheManagementMode(suspend)
        self._step: int | None = None
        SamplingParams.from_dict(self._sampling)  # refuse an unknown field here rather than in the first rollout

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        self._resume(trainer)
        runs = [(ids, len(list(same))) for ids, same in itertools.groupby(prompt_ids(prompts, trainer))]
        common = sampling_of(trainer) | self._sampling
        if not common.get("ignore_eos"):
            common["stop_token_ids"] = [*common.get("stop_token_ids", ()), *end_ids(trainer)]
        params = [SamplingParams.from_dict(common | {"n": count}) for _, count in runs]
        outputs = self.engine.generate([list(ids) for ids, _ in runs], params)
        if self._suspend is not None:
            self.engine.suspend(self._suspend)
        samples = [(output, sample) for output in outputs for sample in output.outputs]
        return {
            "prompt_ids": [list(output.prompt_token_ids) for output, _ in samples],
            "completion_ids": [list(sample.token_ids) for _, sample in samples],
            "logprobs": [_logprobs(sample) for _, sample in samples],
        }

    def _resume(self, trainer: Any) -> None:
        """Copy the trainer's weights if it has made a step, before the cache is allocated again."""
        if self.engine.state is EngineState.SUSPENDED:
            self.engine.resume({"weights"})
        if self._step != trainer.state.global_step:
            self.report = apply(self.engine, weights_of(trainer))
            self._step = trainer.state.global_step
        if self.engine.state is EngineState.SUSPENDED:
            self.engine.resume()


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The trainer's present weights, under Hugging Face names."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise NotImplementedError(
            "a PEFT model's adapters are not merged for the engine; train the whole model, or call "
            "merge_and_unload() before"
        )
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def prompt_ids(prompts: Sequence[Any], trainer: Any) -> list[tuple[int, ...]]:
    """Prompts in token ids as in the trainer's own generation: texts, or conversations through the template."""
    tokenizer = trainer.processing_class
    found: list[tuple[int, ...]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            found.append(tuple(tokenizer(prompt)["input_ids"]))
            continue
        rendered = tokenizer.apply_chat_template(
            prompt,
            tools=trainer.tools or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )
        found.append(tuple(rendered["input_ids"]))
    return found


def end_ids(trainer: Any) -> list[int]:
    """The end token of the trainer's tokenizer, at which TRL cuts completions; the model's config may name others."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    found = getattr(tokenizer, "eos_token_id", None)
    return [] if found is None else [found]


def sampling_of(trainer: Any) -> dict[str, Any]:
    """Fields of SamplingParams from the trainer's config. Raises ConfigError for options without a counterpart."""
    own = trainer.args.generation_kwargs or {}
    if own:
        raise ConfigError(
            f"the trainer's generation_kwargs ({', '.join(own)}) are for transformers' generate(); give "
            "EngineRollout(sampling=...)"
        )
    return {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "logprobs": 0,
        "detokenize": False,
    }


def _logprobs(sample: CompletionOutput) -> list[float]:
    if sample.logprobs is None:
        raise ConfigError("sampling={'logprobs': None}: a rollout_func has to return log probabilities; leave it out")
    return [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]


def _dict_of(config: Any) -> dict[str, Any] | None:
    return None if config is None else config.to_dict()


class ServerWeights:
    """A weight_transfer of TRL's AsyncGRPOTrainer: sends weights to a server with `--control` as HTTP bodies, no NCCL.

    The server writes them in place under their Hugging Face names. A sync that fails is rolled back as a whole: the
    server keeps the weights of the sync before, and `send_weights` raises its error.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        max_bytes: int = 128 * 2**20,
        running: str = "keep",
        timeout_s: float = 600.0,
    ) -> None:
        """max_bytes: of tensors in one body; a larger tensor is sent alone (--max-weight-bytes of the server limits
        both). running: unfinished requests "keep" their keys and values of the weights before, or "recompute" them.
        """
        self._url, self._key, self._max_bytes = url.rstrip("/"), api_key, max_bytes
        self._running, self._timeout_s = running, timeout_s
        self.weight_version: int | None = None
        """Version of the weights that the server received last."""

    def init_weight_transfer(self) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": {"backend": "http"}})

    def pause(self) -> None:
        self._post("/pause?mode=keep")

    def resume(self) -> None:
        self._post("/resume")

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._post("/start_weight_update")
        try:
            # each with its own storage: tied weights may come under both their names
            copied = ((name, one.detach().to("cpu", copy=True).contiguous()) for name, one in iterator)
            for bucket in buckets(copied, self._max_bytes):
                self._post("/update_weights", save(dict(bucket)))
            reply = self._post("/finish_weight_update", {"running": self._running})
        except BaseException as error:
            self._cancel(error)
            raise
        self.weight_version = reply["weight_version"]

    def destroy(self) -> None:
        """Nothing to release between two syncs."""

    def _cancel(self, error: BaseException) -> None:
        try:
            self._post("/cancel_weight_update")
        except WeightUpdateError as refused:  # the server has rolled back by itself
            error.add_note(str(refused))

    def _post(self, path: str, body: Mapping[str, Any] | bytes | None = None) -> dict[str, Any]:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        if isinstance(body, bytes):
            data, kind = body, "application/octet-stream"
        else:
            data, kind = json.dumps(body or {}).encode(), "application/json"
        request = Request(self._url + path, data, {**headers, "Content-Type": kind}, method="POST")
        try:
            with urlopen(request, timeout=self._timeout_s) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except HTTPError as error:
            text = error.read().decode(errors="replace")[:2000]
            raise WeightUpdateError(f"{self._url}{path} answered {error.code}: {text}") from error
