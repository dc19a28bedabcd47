"""`AudioGeneratorPipeline`: a speech-token model on an engine, and its audio decoder, block by block.

text, voice ──> prompt ──> engine, step by step ──> speech tokens ──> SpeechBlocks ──> windows ──> decoder ──> sound
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.metrics.definitions import engine_families
from megatron_infer.engine.metrics.registry import Family
from megatron_infer.errors import (
    ConfigError,
    DuplicateRequest,
    InferenceError,
    ModelError,
    RequestError,
    brief,
    unknown_name,
)
from megatron_infer.pipelines.audio_config import AudioGenerationConfig, own_decoders, schedule_of
from megatron_infer.pipelines.audio_generation import AudioContext, AudioGenerationOutput, AudioGenerationRequest
from megatron_infer.pipelines.mcore_model import McorePipelineModel
from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline
from megatron_infer.pipelines.paged_manager import PagedKVCacheManager
from megatron_infer.pipelines.text_generation import (
    GenerationStatus,
    RequestID,
    TextContext,
    TextTokenizer,
    check_kind,
)
from megatron_infer.server.audio.blocks import BlockSchedule, SpeechBlocks, Window
from megatron_infer.server.audio.checks import check_decoder_of, check_schedule
from megatron_infer.server.audio.decoder import OpenedDecoder, Sound, decode_each
from megatron_infer.server.audio.layout import FrameReader
from megatron_infer.server.audio.meter import SpeechMeter
from megatron_infer.server.audio.registry import open_decoder
from megatron_infer.server.audio.speech_model import SpeechModel
from megatron_infer.server.audio.voices import encode_voices

if TYPE_CHECKING:
    from megatron_infer.engine.metrics.prometheus import PrometheusExporter


class AudioGeneratorPipeline:
    """Speaks: `generate` whole answers, `stream` one of them, `execute` or `next_chunk` for a loop of one's own.

    The sound of a request depends on its tokens alone, which are those that `LLM.generate` draws; not on what else is
    spoken. With several ranks every rank makes the same calls with the same request ids, and gets the same sound.
    """

    def __init__(self, pipeline_config: AudioGenerationConfig, *, voices: Mapping[str, str] | None = None) -> None:
        """voices: name -> WAV file, besides those of the model.

        Raises ConfigError, ModelError or RequestError for a decoder that is not the model's, a schedule that it cannot
        follow, and voices that cannot be encoded.
        """
        resolved = pipeline_config.resolved
        model = resolved.llm["model"]
        speech = SpeechModel.read(Path(model).expanduser())
        opened = open_decoder(
            pipeline_config.audio_decoder,
            pipeline_config.audio_decoder_weights,
            _decoder_config(pipeline_config, speech),
            own=own_decoders(pipeline_config),
        )
        schedule = schedule_of(pipeline_config, right_context=opened.decoder.right_context)
        check_decoder_of(speech, opened, pipeline_config.audio_decoder)
        check_schedule(schedule, opened, pipeline_config.audio_decoder)
        text = OverlapTextGenerationPipeline(
            pipeline_config,
            resolved.architecture.pipeline_model or McorePipelineModel,
            speech.end_token,
            {},
            TextTokenizer(model),
            disable_overlap=not resolved.engine.overlap,
        )
        self._set_up(text, speech, opened, schedule, {**speech.voices, **(voices or {})})
        self.pipeline_config: AudioGenerationConfig | None = pipeline_config
        mode = resolved.server.prometheus_metrics_mode
        if mode != "instrument_only":
            from megatron_infer.engine.metrics.prometheus import PrometheusExporter

            self.exporter = PrometheusExporter(self.families, mode=mode, port=resolved.server.metrics_port)

    @classmethod
    def of_engine(
        cls,
        engine: DynamicInferenceEngine,
        tokenizer: TextTokenizer,
        speech: SpeechModel,
        opened: OpenedDecoder,
        *,
        schedule: BlockSchedule | None = None,
        voices: Mapping[str, str] | None = None,
    ) -> AudioGeneratorPipeline:
        """Speak with an engine that exists, of a trainer's live model for instance. voices: name -> WAV file."""
        self = cls.__new__(cls)
        schedule = dataclasses.replace(schedule or BlockSchedule(), right_context=opened.decoder.right_context)
        check_decoder_of(speech, opened, type(opened.decoder).__name__)
        check_schedule(schedule, opened, type(opened.decoder).__name__)
        text = OverlapTextGenerationPipeline.of_engine(engine, tokenizer)
        self._set_up(text, speech, opened, schedule, {**speech.voices, **(voices or {})})
        self.pipeline_config = None
        return self

    def _set_up(
        self,
        text: OverlapTextGenerationPipeline,
        speech: SpeechModel,
        opened: OpenedDecoder,
        schedule: BlockSchedule,
        voices: Mapping[str, str],
    ) -> None:
        speech.check_vocabulary(text.engine.shape.vocab_size)
        self.text_pipeline, self.speech_model = text, speech
        self.opened_decoder, self.block_schedule = opened, schedule
        self.voices = encode_voices(voices, opened)
        """Speech tokens by name."""
        self.exporter: PrometheusExporter | None = None
        """Serves the metrics after launch_server and launch_multiproc_server."""
        self._meter = SpeechMeter(text.engine.output_processor.meter.registry)
        self._contexts: dict[RequestID, AudioContext] = {}

    @property
    def engine(self) -> DynamicInferenceEngine:
        return self.text_pipeline.engine

    @property
    def kv_managers(self) -> list[PagedKVCacheManager]:
        """Those of the text pipeline."""
        return self.text_pipeline.kv_managers

    @property
    def sample_rate(self) -> int:
        """Samples of a second."""
        return self.opened_decoder.decoder.sample_rate

    def families(self) -> list[Family]:
        """The metrics of the engine and of its speech."""
        return engine_families(self.engine.figures())

    def close(self) -> None:
        """End every request, and stop serving metrics."""
        for request_id in list(self._contexts):
            self.release(request_id)
        if self.exporter is not None:
            self.exporter.close()
            self.exporter = None

    # ------------------------------------------------------------------ requests

    def new_context(self, request: AudioGenerationRequest) -> AudioContext:
        """The context of a request, for `execute` and `next_chunk`. Raises RequestError for one that cannot be served.

        Its prompt begins with the voice's tokens, so that the prefix cache finds them.
        """
        check_kind(request, AudioGenerationRequest, "request", 'AudioGenerationRequest(input="Hello.") is one')
        voice, schedule = self._voice_of(request), self.block_schedule
        encode = self.text_pipeline.tokenizer.delegate.encode
        texts = {"text": encode(request.input, add_special=False)}
        if request.audio_prompt_transcription is not None:
            texts["transcription"] = encode(request.audio_prompt_transcription, add_special=False)
        if request.instructions is not None:
            texts["instructions"] = encode(request.instructions, add_special=False)
        prompt = self.speech_model.prompt_ids(texts, voice)
        if not request.streaming:
            schedule = dataclasses.replace(schedule, chunk_size=None)
        return AudioContext(
            text=TextContext(
                request_id=request.request_id,
                tokens=prompt,
                prompt_len=len(prompt),
                params=self._params_of(request.sampling_params),
            ),
            blocks=SpeechBlocks(schedule, prompt=voice, buffer_speech_tokens=request.buffer_speech_tokens),
            frames=FrameReader(self.speech_model.layout),
        )

    def _params_of(self, params: SamplingParams) -> SamplingParams:
        """With draws kept to speech tokens and their end."""
        stops = dict.fromkeys((*params.stop_token_ids, self.speech_model.end_token))
        return dataclasses.replace(
            params, allowed_token_ids=self.speech_model.drawable(), stop_token_ids=tuple(stops), detokenize=False
        )

    def _voice_of(self, request: AudioGenerationRequest) -> tuple[int, ...]:
        speech = self.speech_model.format
        for name in ("audio_prompt_tokens", "buffer_speech_tokens"):
            tokens = getattr(request, name)
            wrong = [token for token in tokens if not 0 <= token < speech.vocab_size]
            if wrong or len(tokens) % speech.codebooks:
                raise RequestError(
                    f"{name} holds {wrong[0] if wrong else f'{len(tokens)} tokens'}; it must be frames of "
                    f"{speech.codebooks} tokens from 0 to {speech.vocab_size - 1:,}"
                )
        if request.voice is None:
            return tuple(request.audio_prompt_tokens)
        if request.voice not in self.voices:
            message = unknown_name("voice", request.voice, self.voices)
            raise RequestError(f"{message}; there is {', '.join(self.voices) or 'none'}")
        return self.voices[request.voice]

    # ------------------------------------------------------------------ execute

    def execute(self, contexts: Sequence[AudioContext]) -> dict[RequestID, AudioGenerationOutput]:
        """One step of the engine for those whose next block lacks tokens, then one block of each that has them ->
        what is new, by request id.

        A context without an entry waits for tokens. Contexts that are done are ignored. Raises DuplicateRequest for
        two contexts with the same request id.
        """
        active = [context for context in contexts if not context.is_done]
        for context in active:
            if self._contexts.setdefault(context.request_id, context) is not context:
                raise DuplicateRequest(
                    f"request id {context.request_id!r} is that of another request that is spoken; give each its own"
                )
            context.num_steps += 1
        drawing = [context for context in active if not context.blocks.has_ended and context.blocks.num_missing != 0]
        if drawing:
            news = self.text_pipeline.execute_own([context.text for context in drawing])
            for context in drawing:
                output = news.get(context.request_id)
                if output is not None:
                    context.error = output.error
                    context.blocks.add(context.frames.add(self.speech_model.speech_of(output.tokens)))
                if context.text.is_done:
                    context.blocks.end()
        windows = {context.request_id: context.blocks.next_window() for context in active}
        ready = [context for context in active if windows[context.request_id] is not None]
        self._meter.waiting(len(ready))
        try:
            sounds = decode_each(self.opened_decoder.decoder, [w for w in windows.values() if w is not None])
        finally:
            self._meter.waiting(0)
        outputs = {}
        for context, sound in zip(ready, sounds, strict=True):
            window = windows[context.request_id]
            assert window is not None
            if isinstance(sound, Exception):
                outputs[context.request_id] = self._failed(context, sound)
            else:
                outputs[context.request_id] = self._output(context, window, sound)
        for context in active:
            if context.request_id not in outputs and context.blocks.is_done:
                outputs[context.request_id] = self._output(context, None, np.zeros(0, dtype=np.float32))
        return outputs

    def _output(self, context: AudioContext, window: Window | None, sound: Sound) -> AudioGenerationOutput:
        """window: None for a request that ended without further sound."""
        blocks = context.blocks
        number = blocks.block_counter
        tokens: tuple[int, ...] = ()
        if window is not None:
            tokens = window.tokens[window.num_before : window.num_before + window.num_new]
            blocks.advance(window)
        elapsed = time.monotonic() - context.began
        if window is not None:
            self._meter.block(number=number, sound_s=len(sound) / self.sample_rate, elapsed_s=elapsed)
        is_last = window is None or window.is_last
        if is_last:
            self._meter.ended(elapsed_s=elapsed)
            context.is_done = True
            self._contexts.pop(context.request_id, None)
        return AudioGenerationOutput(
            request_id=context.request_id,
            audio=sound,
            sample_rate=self.sample_rate,
            chunk_id=number,
            is_last=is_last,
            tokens=tokens,
            final_status=context.text.status if is_last else GenerationStatus.ACTIVE,
            processing_time=elapsed,
            buffer_speech_tokens=blocks.carry() if is_last else (),
            error=context.error,
        )

    def _failed(self, context: AudioContext, error: Exception) -> AudioGenerationOutput:
        """The end of a request whose next block cannot be decoded."""
        context.error = error if isinstance(error, InferenceError) else ModelError(f"no sound: {brief(error)}")
        self.release(context.request_id)
        return AudioGenerationOutput(
            request_id=context.request_id,
            audio=np.zeros(0, dtype=np.float32),
            sample_rate=self.sample_rate,
            chunk_id=context.blocks.block_counter,
            is_last=True,
            tokens=(),
            final_status=GenerationStatus.FAILED,
            processing_time=time.monotonic() - context.began,
            error=context.error,
        )

    def next_chunk(self, contexts: Sequence[AudioContext]) -> dict[RequestID, AudioGenerationOutput]:
        """Execute until each of them that is not done has its next block -> these blocks, by request id."""
        outputs: dict[RequestID, AudioGenerationOutput] = {}
        waiting = [context for context in contexts if not context.is_done]
        while waiting:
            outputs |= self.execute(waiting)
            waiting = [one for one in waiting if not (one.is_done or one.request_id in outputs)]
        return outputs

    def stream(self, request: AudioGenerationRequest) -> Iterator[AudioGenerationOutput]:
        """The blocks of one request as they come. Left early, the request ends and its memory goes back."""
        context = self.new_context(request)
        try:
            while not context.is_done:
                yield from self.next_chunk([context]).values()
        finally:
            self._release(context)

    def generate(
        self, requests: AudioGenerationRequest | Sequence[AudioGenerationRequest]
    ) -> list[AudioGenerationOutput]:
        """The whole sound of each request, in order. Interrupted, it leaves no request behind."""
        asked = [requests] if isinstance(requests, AudioGenerationRequest | str) else list(requests)
        contexts = [self.new_context(request) for request in asked]
        if len({one.request_id for one in contexts}) < len(contexts):
            raise RequestError("two of the requests have the same request_id; each needs its own")
        parts: dict[RequestID, list[AudioGenerationOutput]] = {context.request_id: [] for context in contexts}
        try:
            while any(not context.is_done for context in contexts):
                for request_id, output in self.execute(contexts).items():
                    parts[request_id].append(output)
        finally:
            for context in contexts:
                self._release(context)
        return [joined(parts[context.request_id]) for context in contexts]

    def release(self, request_id: RequestID) -> None:
        """End a request, whatever it is doing, and take its memory back; nothing of it is returned afterwards."""
        context = self._contexts.pop(request_id, None)
        if context is not None:
            context.is_done = True
        self.text_pipeline.release(request_id)

    def _release(self, context: AudioContext) -> None:
        """`release`, unless the id is that of another context."""
        if self._contexts.get(context.request_id) is context:
            self.release(context.request_id)


def joined(outputs: Sequence[AudioGenerationOutput]) -> AudioGenerationOutput:
    """All blocks of one request as one output."""
    last = outputs[-1]
    return dataclasses.replace(
        last,
        audio=np.concatenate([one.audio for one in outputs]),
        tokens=tuple(token for one in outputs for token in one.tokens),
        chunk_id=0,
    )


def _decoder_config(config: AudioGenerationConfig, speech: SpeechModel) -> dict[str, object]:
    """What the decoder is constructed with: in test mode `tones` of the model's format."""
    given = dict(config.audio_decoder_config)
    if config.run_model_test_mode and config.audio_decoder == "tones" and not given:
        size, rate = speech.format.vocab_size, speech.format.tokens_per_second
        per_token = -(-2 * (size + 1) // 160) * 160
        if (per_token * rate).denominator != 1:
            raise ConfigError(f"tones cannot stand in for {rate} tokens a second; give audio_decoder_config")
        given = {
            "vocab_size": size,
            "codebooks": speech.format.codebooks,
            "samples_per_token": per_token,
            "sample_rate": int(per_token * rate),
        }
    return given
