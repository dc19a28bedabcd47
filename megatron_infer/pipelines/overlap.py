"""`OverlapTextGenerationPipeline`: drives an engine step by step; the caller says which requests each step runs.

execute(batch 1) ── launches step 1 ──────────────────────────> {}
execute(batch 2) ── launches step 2, then reads step 1 ────────> outputs of batch 1
execute(empty)   ── reads step 2 ──────────────────────────────> outputs of batch 2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, final

import numpy as np
from torch import Tensor

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError, DuplicateRequest, RequestError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.outputs.token_outputs import PARAMETERS
from megatron_infer.pipelines.foreign_runner import load_model
from megatron_infer.pipelines.interfaces import GenerateMixin, PipelineModel
from megatron_infer.pipelines.mcore_model import McorePipelineModel
from megatron_infer.pipelines.paged_manager import PagedKVCacheManager
from megatron_infer.pipelines.text_generation import (
    ContextT,
    GenerationStatus,
    LogProbabilities,
    RequestID,
    TextContext,
    TextGenerationInputs,
    TextGenerationOutput,
    TextGenerationRequest,
    TextTokenizer,
    check_kind,
)
from megatron_infer.runner.sampling.grammar_matchers import Grammars
from megatron_infer.scheduler.drafts import SpecDecodeMetrics
from megatron_infer.scheduler.request import FinishReason, Request

if TYPE_CHECKING:
    from megatron_infer.pipelines.config import PipelineConfig

_STATUS = {
    None: GenerationStatus.ACTIVE,
    "stop": GenerationStatus.END_OF_SEQUENCE,
    "length": GenerationStatus.MAXIMUM_LENGTH,
    "abort": GenerationStatus.CANCELLED,
    "error": GenerationStatus.FAILED,
}


_WITHOUT_A_PLACE = (*PARAMETERS, "pooling")
"""Sampling parameters whose results `TextGenerationOutput` does not hold."""


@final
class OverlapTextGenerationPipeline(GenerateMixin[ContextT, TextGenerationRequest], Generic[ContextT]):
    """Text generation in which a step is read after the next one is launched.

    With several ranks every rank makes the same calls with contexts of the same request ids.
    """

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        pipeline_model: type[PipelineModel[Any]],
        eos_token_id: int,
        weight_adapters: Mapping[str, Any],
        tokenizer: TextTokenizer | None,
        disable_overlap: bool = False,
    ) -> None:
        """pipeline_model: the model's class. eos_token_id: ends sequences, besides the ids that the model has itself.
        weight_adapters: by format ("safetensors"), for models of one's own. disable_overlap: `execute` returns the
        outputs of its own batch.

        Raises ConfigError for a config that is not resolved, without an encoding, or with structured output and no
        tokenizer.
        """
        _check_arguments(pipeline_config, pipeline_model, tokenizer)
        resolved = pipeline_config.resolved
        delegate = None if tokenizer is None else tokenizer.delegate
        if resolved.server.enable_structured_output and delegate is None:
            raise ConfigError("enable_structured_output=True needs a tokenizer: pass TextTokenizer(model)")
        config = replace(resolved.engine, overlap=not disable_overlap)
        model, engine = load_model(pipeline_config, pipeline_model, config, eos_token_id, weight_adapters, delegate)
        self._set_up(model, engine, tokenizer, pipeline_config, disable_overlap)

    @classmethod
    def of_engine(
        cls, engine: DynamicInferenceEngine, tokenizer: TextTokenizer | None = None, *, disable_overlap: bool = False
    ) -> OverlapTextGenerationPipeline:
        """Drive an engine that exists, of a trainer's live model for instance. It overlaps if its config says so."""
        self = cls.__new__(cls)
        self._set_up(McorePipelineModel.wrap(engine), engine, tokenizer, None, disable_overlap)
        return self

    def _set_up(
        self,
        model: Any,
        engine: DynamicInferenceEngine,
        tokenizer: TextTokenizer | None,
        pipeline_config: PipelineConfig | None,
        disable_overlap: bool,
    ) -> None:
        self.pipeline_model, self._tokenizer, self._pipeline_config = model, tokenizer, pipeline_config
        self.engine = engine
        self._disable_overlap = disable_overlap
        self._contexts: dict[RequestID, TextContext] = {}
        """Those that the engine runs."""
        self._unread: dict[RequestID, TextGenerationOutput] = {}
        """Outputs that no call has returned."""
        self._owned: set[RequestID] = set()
        """Ids whose outputs are those of `execute_own`."""
        self._grammars: Grammars | None = None

    # ------------------------------------------------------------------ properties

    @property
    def pipeline_config(self) -> PipelineConfig | None:
        """None for a pipeline over an engine that existed."""
        return self._pipeline_config

    @property
    def tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise ConfigError("this pipeline has no tokenizer; pass one where it is made")
        return self._tokenizer

    @property
    def kv_manager(self) -> PagedKVCacheManager:
        manager: PagedKVCacheManager = self.pipeline_model.kv_manager
        return manager

    @property
    def kv_managers(self) -> list[PagedKVCacheManager]:
        return [self.kv_manager]

    @property
    def overlap_active(self) -> bool:
        """Whether `execute` returns while its own batch is still in flight."""
        config, num_stages = self.engine.config, self.engine.rank_group.groups.pp_size
        return not self._disable_overlap and (config.overlap or config.max_steps_in_flight > 1 or num_stages > 1)

    @property
    def draft_kv_blocks(self) -> list[Tensor] | None:
        """The draft model's keys and values, one tensor a replica: [layers, 2, pages + 1, page, heads, head dim], under
        the page numbers of the model's. None without a draft model."""
        store = self.engine.replay.runner.store
        return None if store.layout.draft_kv_shape is None else [store.draft_kv_cache]

    def spec_decode_metrics(self) -> SpecDecodeMetrics | None:
        """What was drafted and kept; None where nothing is drafted."""
        return self.engine.spec_decode_metrics()

    # ------------------------------------------------------------------ execute

    def execute(self, inputs: TextGenerationInputs) -> dict[RequestID, TextGenerationOutput]:
        """Run a step of these requests -> outputs of the batch before, by request id; {} the first time.

        A context in the middle of its prompt gives nothing, nor does one that waits for memory. Contexts that have
        ended are ignored. With empty inputs it only reads what is in flight. With disable_overlap the outputs are those
        of this batch; with several steps in flight (stages, max_steps_in_flight) they come as many calls later.
        A context's tokens and status are those of the outputs returned.
        """
        check_kind(inputs, TextGenerationInputs, "inputs", "TextGenerationInputs.of([context]) makes them of contexts")
        self._run(inputs.flat_batch)
        return self._take(one for one in self._unread if one not in self._owned)

    def execute_own(self, contexts: Sequence[TextContext]) -> dict[RequestID, TextGenerationOutput]:
        """`execute`, for one of several callers -> outputs of `contexts` only; those of others wait for theirs."""
        ids = [context.request_id for context in contexts]
        self._owned.update(ids)
        self._run(contexts)
        return self._take(ids)

    def has_pending_outputs(self) -> bool:
        """Whether outputs of an earlier batch can be read, by `execute` with empty inputs."""
        loop = self.engine.loop
        waits = any(output.request_id in self._contexts for output in loop.backlog)
        return bool(loop.num_in_flight or waits or self._unread.keys() - self._owned)

    def release(self, request_id: RequestID) -> None:
        """End a request, whatever it is doing, and take its memory back; nothing of it is returned afterwards."""
        check_kind(request_id, str, "request_id", "context.request_id is that of a context")
        context = self._contexts.pop(request_id, None)
        self._unread.pop(request_id, None)
        self._owned.discard(request_id)
        self.kv_manager.release(request_id)
        engine = self.engine
        if context is None:
            return
        if request_id in engine.output_processor:
            if engine.relay.is_leader:
                engine.abort(request_id)
            context.status = GenerationStatus.CANCELLED
            engine.drain()  # a step in flight has its memory, and other ranks have it until they hear of the abort
        engine.loop.backlog = [output for output in engine.loop.backlog if output.request_id != request_id]

    def _run(self, contexts: Sequence[TextContext]) -> None:
        """One step of the engine, whose outputs are put with those that are unread."""
        engine = self.engine
        active = [context for context in contexts if not context.is_done]
        self._add([context for context in active if self._contexts.get(context.request_id) is not context])
        if not active and not self.has_pending_outputs():
            return
        among = [context.request_id for context in active]
        self._keep(engine.step(among))
        while self._disable_overlap and engine.loop.num_in_flight:
            self._keep(engine.step(()))
        for context in active:
            if not context.is_done and context.request_id not in engine.output_processor:  # aborted elsewhere
                self._contexts.pop(context.request_id, None)
                context.status = GenerationStatus.CANCELLED

    def _add(self, contexts: Iterable[TextContext]) -> None:
        """Queue new contexts, all or none."""
        new = list(contexts)
        ids = [context.request_id for context in new]
        params_of = [self._params_of(context) for context in new]
        for context, params in zip(new, params_of, strict=True):
            if ids.count(context.request_id) > 1 or context.request_id in self.engine.output_processor:
                raise DuplicateRequest(
                    f"request id {context.request_id!r} is that of another context or of a request of the engine; name "
                    "each context once, and give each its own id"
                )
            self._check(context, params)
        for context, params in zip(new, params_of, strict=True):
            self.kv_manager.release(context.request_id)  # what a caller allocated: the scheduler pages from here on
            if self.engine.relay.is_leader:
                prompt = context.tokens[: context.prompt_len]
                self.engine.add_request(prompt, params, request_id=context.request_id, stream="delta")
            self._contexts[context.request_id] = context

    def _params_of(self, context: TextContext) -> SamplingParams:
        """The context's parameters, with the ends that the context itself has: `max_length` and `eos_ids`."""
        params, room = context.params, None
        if context.max_length is not None:
            room = context.max_length - context.prompt_len
            if room < 1:
                raise RequestError(
                    f"context {context.request_id!r} has {context.prompt_len:,} tokens, the limit is "
                    f"{context.max_length:,} (max_length); shorten its prompt or raise the limit"
                )
        if room is not None and (params.max_tokens is None or params.max_tokens > room):
            params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        if own := context.eos_ids - self.engine.input_processor.stop_ids(params):
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *sorted(own)))
        return params

    def _check(self, context: TextContext, params: SamplingParams) -> None:
        if len(context.tokens) > context.prompt_len:
            raise RequestError(
                f"context {context.request_id!r} has {len(context.generated):,} tokens that this pipeline did not "
                "draw; make a new context with all tokens as its prompt"
            )
        if params.n != 1:
            raise RequestError(f"a context is one sequence, n is {params.n}; make n contexts")
        for name in _WITHOUT_A_PLACE:
            if getattr(params, name):
                raise RequestError(
                    f"{name} is {getattr(params, name)!r}, which the outputs of a pipeline do not hold; leave it out, "
                    "or ask the engine itself (pipeline.engine.generate)"
                )
        self._require_enabled(params)
        self.engine.input_processor.check(context.tokens, params)

    def _keep(self, outputs: Iterable[RequestOutput]) -> None:
        others = []
        for output in outputs:
            context = self._contexts.get(output.request_id)
            if context is None:
                others.append(output)
                continue
            news = _news_of(output, is_first=not context.generated)
            context.tokens += news.tokens
            context.start, context.status = len(context.tokens) - 1, news.final_status
            if output.finished:
                del self._contexts[output.request_id]
            before = self._unread.get(output.request_id)
            if before is None:
                self._unread[output.request_id] = news
            else:
                before.extend(news)
        self.engine.loop.backlog += others  # of requests that were added to the engine itself

    def _take(self, request_ids: Iterable[RequestID]) -> dict[RequestID, TextGenerationOutput]:
        return {one: self._unread.pop(one) for one in list(request_ids) if one in self._unread}

    # ------------------------------------------------------------------ structured output

    def initialize_bitmask(self, batch: Sequence[TextContext]) -> np.ndarray | None:
        """int32 [batch, ceil(vocabulary / 32)], every token allowed: bit t % 32 of word t // 32 is token t.

        None where no context of the batch has a schema.
        """
        if all(context.params.structured is None for context in batch):
            return None
        for context in batch:
            self._require_enabled(context.params)
        num_words = -(-self.engine.shape.vocab_size // 32)
        return np.full((len(batch), num_words), -1, dtype=np.int32)

    def update_for_structured_output(self, context: TextContext, bitmask: np.ndarray | None, index: int) -> None:
        """Set row `index` of the bitmask to the tokens that may follow the context's; nothing without a schema.

        Raises RequestError for a schema that cannot be compiled, ConfigError while enable_structured_output is off.
        """
        if context.params.structured is None or bitmask is None:
            return
        self._require_enabled(context.params)
        if self._grammars is None:
            own = self.engine.input_processor.grammars
            self._grammars = Grammars(self.tokenizer.delegate, self.engine.shape.vocab_size)
            self._grammars.cache = own.cache
        self._grammars.cache.check(context.params.structured)
        request = Request(
            id=context.request_id,
            tokens=context.tokens,
            prompt_len=context.prompt_len,
            params=context.params,
            max_total=self.engine.sizes.max_sequence_length,
            seed=0,
            stop_ids=context.eos_ids,
        )
        masks = self._grammars.masks([request])
        assert masks is not None
        bitmask[index] = masks.bits_GW[0]
        request.finish(FinishReason.ABORT, None)  # its matcher goes with the next masks

    def _require_enabled(self, params: SamplingParams) -> None:
        """Raise ConfigError for what a request asks for and the configuration turns off, as a server does."""
        off = None if self._pipeline_config is None else self._pipeline_config.resolved.server.turned_off(params)
        if off is not None:
            raise ConfigError(
                f"a request asks for {off.name}={getattr(params, off.name)!r:.80}, and {off.what} is off; set "
                f"{off.option}=True, or leave {off.name} out"
            )

    # ------------------------------------------------------------------ graphs

    def warmup_graph_capture(self) -> str:
        """Capture every shape of a step now, the largest first -> "", or why none is captured."""
        engine = self.engine
        graphs: Any = engine.replay.runner.graphs
        if graphs is None:
            reasons = [row.reasons["graphs"] for row in engine.kernels.rows if "graphs" in row.reasons]
            return reasons[0] if reasons else f"num_cuda_graphs is 0: none is asked for on {engine.device.torch.type}"
        engine.drain()
        with engine.replay.inference(engine.loop):
            refused = graphs.pool.capture_all()
        return "; ".join(refused)


def _check_arguments(config: Any, model: Any, tokenizer: Any) -> None:
    """Raise ConfigError for arguments of the constructor that are something else."""
    refusal = None
    if not hasattr(type(config), "resolved"):
        refusal = f"pipeline_config is {config!r:.80}, it must be a PipelineConfig"
    elif not isinstance(model, type):
        refusal = f"pipeline_model is {model!r:.80}, it must be a class: McorePipelineModel, or one of your own"
    elif tokenizer is not None and not isinstance(tokenizer, TextTokenizer):
        refusal = (
            f"tokenizer is {tokenizer!r:.80}, it must be a TextTokenizer or None; TextTokenizer(model) opens a model's"
        )
    if refusal is not None:
        raise ConfigError(refusal)


def _news_of(output: RequestOutput, *, is_first: bool) -> TextGenerationOutput:
    """What is new of a request; requests run in delta mode with one sequence."""
    sequence = output.outputs[0]
    return TextGenerationOutput(
        request_id=output.request_id,
        tokens=list(sequence.token_ids),
        text=sequence.text,
        final_status=_STATUS[sequence.finish_reason],
        log_probabilities=None if sequence.logprobs is None else _logprobs(sequence.token_ids, sequence.logprobs),
        prompt_log_probabilities=None
        if output.prompt_logprobs is None or not is_first
        else _logprobs(output.prompt_token_ids[1:], output.prompt_logprobs[1:]),
        error=output.error,
    )


def _logprobs(tokens: Sequence[int], entries: Sequence[Any]) -> LogProbabilities:
    return LogProbabilities(
        token_log_probabilities=[entry[token].logprob for token, entry in zip(tokens, entries, strict=True)],
        top_log_probabilities=[{token: one.logprob for token, one in entry.items()} for entry in entries],
    )
