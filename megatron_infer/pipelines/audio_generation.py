"""Requests for speech: what a caller asks, the context of each while it runs, and what comes back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError, RequestError
from megatron_infer.outputs.token_outputs import PARAMETERS
from megatron_infer.pipelines.text_generation import GenerationStatus, RequestID, TextContext, check_kind
from megatron_infer.server.audio.blocks import SpeechBlocks
from megatron_infer.server.audio.layout import FrameReader
from megatron_infer.server.audio.speech_model import check_text

DEFAULT_SAMPLING = SamplingParams(max_tokens=None)
"""Until the model ends it, or to its length."""
FOR_TEXT = (
    "n",
    "allowed_token_ids",
    "stop",
    "structured",
    "logprobs",
    "prompt_logprobs",
    *PARAMETERS,
    "pooling",
)
"""Sampling parameters that speech has no use for: the tokens are its own, and sound is all that comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioGenerationRequest:
    """What a caller asks. Raises InvalidPrompt for a text that is empty or too long."""

    input: str
    """The text to speak."""
    voice: str | None = None
    """A voice of the pipeline, by name."""
    audio_prompt_tokens: tuple[int, ...] = ()
    """Speech tokens of a voice, frame after frame, in place of a name."""
    audio_prompt_transcription: str | None = None
    """What the voice says, where the model's prompt has a place for it."""
    instructions: str | None = None
    """How to speak, where the model's prompt has a place for it."""
    sampling_params: SamplingParams = DEFAULT_SAMPLING
    """max_tokens counts speech tokens and the end token."""
    streaming: bool = True
    """False: one block, at the end."""
    buffer_speech_tokens: tuple[int, ...] = ()
    """Those of the last output of an earlier request, which this one's sound goes on from."""
    request_id: RequestID = field(default_factory=lambda: uuid.uuid4().hex)
    """On several ranks it must be given, the same on each."""

    def __post_init__(self) -> None:
        check_text(self.input)
        remedy = "SamplingParams(max_tokens=200) is one"
        check_kind(self.sampling_params, SamplingParams, "sampling_params", remedy)
        for name in FOR_TEXT:
            value = getattr(self.sampling_params, name)
            if value != getattr(DEFAULT_SAMPLING, name):
                raise RequestError(f"{name} is {value!r:.80}, which does nothing for speech; leave it out")
        if self.voice is not None and self.audio_prompt_tokens:
            raise RequestError("voice and audio_prompt_tokens are both given; give one of them")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AudioGenerationOutput:
    """Sound that is new of a request."""

    request_id: RequestID
    audio: np.ndarray
    """float32 [samples], mono, between -1 and 1."""
    sample_rate: int
    chunk_id: int
    """Number of the block, from 0."""
    is_last: bool
    tokens: tuple[int, ...]
    """The speech tokens whose sound this is, frame after frame."""
    final_status: GenerationStatus
    """ACTIVE until the last one."""
    processing_time: float
    """Seconds since the request began."""
    buffer_speech_tokens: tuple[int, ...] = ()
    """What a request that continues this one is given; () before the last output."""
    error: InferenceError | None = None
    """Why it is FAILED; the sound before it stands."""

    @property
    def seconds(self) -> float:
        """Seconds of sound."""
        return len(self.audio) / self.sample_rate

    @property
    def metadata(self) -> Mapping[str, Any]:
        """MAX's description; what is 0 or False is left out."""
        values = {
            "sample_rate": self.sample_rate,
            "duration": self.seconds,
            "chunk_id": self.chunk_id,
            "final_chunk": self.is_last,
            "request_id": self.request_id,
            "tokens_generated": len(self.tokens),
            "processing_time": self.processing_time,
        }
        return {name: value for name, value in values.items() if value}


@dataclass(eq=False, slots=True, kw_only=True)
class AudioContext:
    """One request while it is spoken."""

    text: TextContext
    """Its tokens, as the engine draws them."""
    blocks: SpeechBlocks
    frames: FrameReader
    began: float = field(default_factory=time.monotonic)
    num_steps: int = 0
    """Calls of `execute` that it took part in."""
    error: InferenceError | None = None
    is_done: bool = False
    """Whether its last output was returned."""

    @property
    def request_id(self) -> RequestID:
        return self.text.request_id
