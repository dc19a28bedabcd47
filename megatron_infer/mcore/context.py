"""What megatron-core's scripts build an engine from: each part holds what it is given.

context = DynamicInferenceContext(model.config, InferenceConfig(...))        the options
wrapper = GPTInferenceWrapper(model, context)                                the model
controller = TextGenerationController(wrapper, tokenizer)                    the tokenizer
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

from megatron_infer.config.from_megatron import UNSUPPORTED
from megatron_infer.config.inference import ConfigWarning, InferenceConfig
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError, RequestError
from megatron_infer.mcore.results import Codec

NO_MEANING = tuple(name for name in UNSUPPORTED if name != "image_preprocessing_config")
"""Options of megatron-core's engine that change no answer, and have nothing to act on here."""
MAX_TOKENS, MAX_REQUESTS = 16384, 256
"""What a context says before an engine has computed its sizes."""


class Named:
    """Refuses attributes of megatron-core's class that have no counterpart here by name."""

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self).__name__
        raise AttributeError(f"megatron_infer.mcore's {kind} has no {name!r}; docs/megatron_calls.md has what it has")


class DynamicInferenceContext(Named):
    """The options of an engine, and figures of it once there is one."""

    def __init__(self, model_config: Any = None, inference_config: Any = None, **keywords: Any) -> None:
        """keywords: those of megatron-core 0.16, which has no config class. Raises ConfigError for an option that
        cannot be kept."""
        if inference_config is not None and keywords:
            raise ConfigError(f"a context takes a config or keywords, not both: {', '.join(keywords)}")
        self.model_config = model_config
        self.config = self.inference_config = keywords if inference_config is None else inference_config
        self.engine: DynamicInferenceEngine | None = None
        self.unified_memory_level = int(self._given("unified_memory_level", 0))
        self.async_sched_step_count = self.async_sched_compaction_step_count = 0
        """Steps of megatron-core's own overlapped scheduling, of which there are none here."""

    def _given(self, name: str, default: Any) -> Any:
        given = self.config
        value = given.get(name) if isinstance(given, dict) else getattr(given, name, None)
        return default if value is None else value

    def _size(self, name: str, default: int) -> int:
        return int(self._given(name, default) if self.engine is None else getattr(self.engine.sizes, name))

    @property
    def max_requests(self) -> int:
        return self._size("max_requests", MAX_REQUESTS)

    @property
    def max_tokens(self) -> int:
        return self._size("max_tokens", MAX_TOKENS)

    @property
    def max_sequence_length(self) -> int:
        return self._size("max_sequence_length", InferenceConfig.max_sequence_length)

    @property
    def step_count(self) -> int:
        return 0 if self.engine is None else self.engine.num_steps

    @property
    def lifetime_prefill_token_count(self) -> int:
        return 0 if self.engine is None else self.engine.stats().counters["prefill_tokens"]

    @property
    def kv_block_allocator(self) -> SimpleNamespace:
        """pool_size: blocks of the cache, with the one that padding uses."""
        return SimpleNamespace(pool_size=0 if self.engine is None else self.engine.sizes.num_blocks)

    @property
    def cuda_graph_batch_dimensions_list(self) -> list[Any]:
        """The shapes of steps that CUDA graphs are captured for."""
        return [] if self.engine is None else list(self.engine.sizes.graph_shapes)

    def engine_config(self, keywords: dict[str, Any]) -> InferenceConfig:
        """Our config. keywords: further ones of 0.16's engine. Warns about an option without meaning here."""
        if is_dataclass(self.config) and keywords:
            raise ConfigError(f"{', '.join(keywords)}: from megatron-core 0.17 on give fields of its InferenceConfig")
        config = copy.copy(self.config) if is_dataclass(self.config) else SimpleNamespace(**self.config | keywords)
        for name in NO_MEANING:
            held = "_verbose" if name == "verbose" else name  # an InitVar there
            _, default, why = UNSUPPORTED[name]
            if (value := getattr(config, held, default)) != default:
                warnings.warn(f"{name}={value!r} has no effect: {why}", ConfigWarning, stacklevel=4)
                setattr(config, held, default)
        return InferenceConfig.from_megatron(config if is_dataclass(config) else vars(config))


class GPTInferenceWrapper(Named):
    """The model of an engine, in its wrappers."""

    def __init__(self, model: Any, *args: Any, inference_context: Any = None, **of_the_model: Any) -> None:
        """args: the context; in 0.16 the model's sizes, then the context. of_the_model: inference_wrapper_config and
        pg_collection of 0.16, which the engine reads off the model."""
        if unknown := set(of_the_model) - {"inference_wrapper_config", "pg_collection"}:
            raise TypeError(f"GPTInferenceWrapper got {', '.join(sorted(unknown))}, which it does not know")
        self.model = model
        self.inference_context = inference_context or (args[min(1, len(args) - 1)] if args else None)


class TextGenerationController(Named):
    """The model and the tokenizer of an engine. pp_group: of 0.16; the engine reads the model's own."""

    def __init__(self, inference_wrapped_model: Any, tokenizer: Any, pp_group: Any = None) -> None:
        self.inference_wrapped_model = inference_wrapped_model
        self.tokenizer = tokenizer

    @staticmethod
    def tokenize_prompt(tokenizer: Any, prompt: str, add_BOS: bool = False) -> list[int]:
        if add_BOS:
            raise RequestError("add_BOS=True: begin the prompt's ids with the token, or let the tokenizer add it")
        return Codec(tokenizer).encode(prompt)
