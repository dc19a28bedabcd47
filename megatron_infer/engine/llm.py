"""LLM: a model by name, prompts in, answers out."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before the imports below load torch, unless the script has done so

# ruff: noqa: E402
from megatron_infer.config.checks import check_mtp
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.requests.input_processor import Prompt, is_single_prompt
from megatron_infer.errors import ConfigError, InvalidPrompt, ModelError
from megatron_infer.kernels.threads import apply_cpu_settings
from megatron_infer.memory.device import Device, choose_dtype
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.sources import ModelSource, open_source
from megatron_infer.outputs.embeddings import Embedding, embeddings_of, params_for
from megatron_infer.outputs.request_output import OnError, RequestOutput
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.utils import progress
from megatron_infer.utils.process_memory import return_freed

log = logging.getLogger("megatron_infer")

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """Loads a model (alias, directory, hub id, .gguf file, torch_dist checkpoint) and answers prompts with it.

    `config` is an InferenceConfig, or a mapping of some of its options: the others (all, for None) are chosen for the
    machine and the model, see `config.machine_config`. dtype "auto" is bfloat16, and float32 on a CPU with neither a
    C++ compiler nor products of bfloat16. chat_template goes before the model's own. use_legacy_module: see
    `build_model`. The engine is `llm.engine`.
    """

    def __init__(
        self,
        model: str,
        *,
        config: InferenceConfig | Mapping[str, Any] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        seed: int | None = None,
        tokenizer: Tokenizer | None = None,
        chat_template: str | None = None,
        use_legacy_module: bool = False,
    ) -> None:
        where = Device(device)
        if not where.is_cuda:
            apply_cpu_settings(threads)
        source: ModelSource = open_source(model)
        given = vars(config) if isinstance(config, InferenceConfig) else config or {}
        linear = given.get("linear_backend", "auto")
        plan, param_dtype = source.config(), choose_dtype(dtype, where, linear_backend=linear)
        if not isinstance(config, InferenceConfig):
            asked = {} if config is None else dict(config)
            if seed is not None:
                asked.setdefault("seed", seed)
            shape = shape_of(plan, dtype=str(param_dtype).removeprefix("torch."))
            config = machine_config(asked, shape, is_cuda=where.is_cuda, available_bytes=where.available_bytes())
        if config.speculative is not None and "mtp" in config.speculative.methods:
            check_mtp(shape_of(plan, dtype=str(param_dtype).removeprefix("torch.")))  # before the weights are read
        if seed is not None and seed != config.seed:
            raise ConfigError(f"seed={seed} beside a config with seed={config.seed}; give it in one place")
        built = {"dtype": param_dtype, "device": str(where.torch), "use_legacy_module": use_legacy_module}
        built["max_sequence_length"] = config.max_sequence_length
        live: Any = build_model(source, **built)
        place = os.path.abspath(model) if os.path.exists(model) else model
        live.rebuild = lambda: build_model(open_source(place), **built)
        self.tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(source)
        if chat_template is not None:
            if self.tokenizer is None:
                raise ConfigError("chat_template is given, but the model has no tokenizer")
            self.tokenizer.set_chat_template(chat_template)
        self.engine = DynamicInferenceEngine(
            live,
            config,
            tokenizer=self.tokenizer,
            eos_ids=plan.eos_ids,
            device=str(where.torch),
            model_name=source.name,
            owns_weights=True,
        )
        return_freed()  # by the weights' reading and packing

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Complete prompts (text, token ids, or lists of either) -> one output per prompt, in order.

        sampling_params: one for all prompts, or one per prompt. use_tqdm: a progress bar on standard error; None: where
        that is a terminal. Raises RequestError, before any prompt is queued, if a
        prompt or its parameters cannot be served; GenerationError, once all have ended and with all their outputs, if
        any failed (on_error "return": the failed outputs have `error`).
        """
        if not (progress.is_shown() if use_tqdm is None else use_tqdm):
            return self.engine.generate(prompts, sampling_params, on_error=on_error)
        count = 1 if is_single_prompt(prompts) else len(prompts)
        num_tokens = 0
        with progress.bar(total=count, unit="req", shown=True) as bar:

            def advance(output: RequestOutput) -> None:
                nonlocal num_tokens
                num_tokens += output.metrics.num_output_tokens
                bar.update()
                bar.set_postfix_str(f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s")

            return self.engine.generate(prompts, sampling_params, on_output=advance, on_error=on_error)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> list[Embedding]:
        """One fp32 vector per prompt from its final hidden states, in order: [hidden size], or [dimensions].

        pooling: "last" or "mean" of the prompt's positions, or "all": a vector for each of its tokens. normalize: to
        length 1. dimensions: keep the first components only, for models that were trained for it.
        """
        outputs = self.engine.generate(prompts, params_for(pooling))
        return embeddings_of(outputs, dimensions=dimensions, normalize=normalize)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, with the model's chat template -> one output per conversation.

        Raises InvalidPrompt without messages, or if the model has no tokenizer; else like `generate`.
        """
        if self.tokenizer is None:
            raise InvalidPrompt(
                "a chat needs the model's tokenizer and it has none; render it yourself and pass token ids"
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        if not conversations:
            raise InvalidPrompt("no messages; give at least one {'role': ..., 'content': ...}")
        prompts = [chat_prompt(self.tokenizer, one) for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, on_error=on_error)


def _tokenizer_of(source: ModelSource) -> Tokenizer | None:
    try:
        return source.tokenizer()
    except ModelError as error:
        log.warning("%s: token ids in and out only", error)
        return None


def chat_prompt(tokenizer: Tokenizer, messages: Any) -> list[int]:
    """Token ids of a conversation up to the assistant's turn; the template adds its own special tokens."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokenizer.encode(text, add_special=False)
