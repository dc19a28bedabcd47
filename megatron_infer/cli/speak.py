"""`megatron-infer speak MODEL --text TEXT`: a text as sound, to a WAV file or, while it is made, as PCM to stdout."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_infer.cli.config_flags import add_sampling_options, given, sampling_from
from megatron_infer.cli.loading import add_model_options, note, run_options
from megatron_infer.cli.pipeline_flags import add_audio_options, pipeline_values
from megatron_infer.config.inference import ConfigWarning
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError
from megatron_infer.server.audio.speech_model import SpeechModel

if TYPE_CHECKING:
    from megatron_infer.pipelines import AudioGenerationOutput, AudioGenerationRequest, AudioGeneratorPipeline

VOICE = "voice"
"""The name of --voice-prompt's voice."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "speak",
        help="speak a text with a model of speech tokens",
        description="Speak a text: into a WAV file (--output), or to standard output as 16-bit mono PCM while it is "
        "made (--stream): megatron-infer speak MODEL --text Hello. --stream | aplay -r 16000 -f S16_LE",
    )
    add_model_options(parser)
    parser.add_argument("--text", help="what to say (default: standard input)")
    parser.add_argument("--output", metavar="FILE", help="WAV file to write")
    parser.add_argument("--stream", action="store_true", help="write PCM to standard output, block by block")
    voices = parser.add_mutually_exclusive_group()
    voices.add_argument("--voice", metavar="NAME", help="a voice that comes with the model")
    voices.add_argument("--voice-prompt", metavar="FILE", help="a WAV file with the voice to speak with")
    add_audio_options(parser)
    parser.add_argument("--max-length", type=int, metavar="N", help="most tokens of prompt and speech together")
    add_sampling_options(parser, max_tokens=None)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """-> 0. Raises InferenceError for a model, voice or text that cannot be spoken."""
    if bool(args.output) == args.stream:
        raise ConfigError("give one of --output FILE and --stream")
    _check_output(args.output)
    text = sys.stdin.read() if args.text is None else args.text
    request = _request(args, text)
    pipeline = _pipeline(args)
    if args.stream:
        _play(pipeline, request)
    else:
        _write(pipeline, request, Path(args.output))
    return 0


def _check_output(path: str | None) -> None:
    """Raises ConfigError before anything is loaded for a place that no sound can be written to. None: the standard
    output."""
    if path is None:
        if sys.stdout.isatty():
            raise ConfigError("--stream writes PCM, not text: pipe it to a player (| aplay -r 16000 -f S16_LE)")
    elif Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: it must be a file in a folder that exists")


def _request(args: argparse.Namespace, text: str) -> AudioGenerationRequest:
    from megatron_infer.pipelines import AudioGenerationRequest

    params = SamplingParams.from_dict(sampling_from(args))
    voice = VOICE if args.voice_prompt else args.voice
    return AudioGenerationRequest(input=text, voice=voice, sampling_params=params)


def _pipeline(args: argparse.Namespace) -> AudioGeneratorPipeline:
    from megatron_infer.pipelines import AudioGenerationConfig, AudioGeneratorPipeline

    speech = SpeechModel.read(Path(args.model).expanduser())
    flags = pipeline_values(args)
    settings: dict[str, Any] = given(args) | run_options(args)
    if "audio_decoder" not in flags:
        flags["audio_decoder"] = speech.decoder
        if speech.decoder_weights:
            flags.setdefault("audio_decoder_weights", speech.decoder_weights)
        if speech.decoder_config and "audio_decoder_config" not in flags:
            settings["audio_decoder_config"] = dict(speech.decoder_config)
    if args.max_length is not None:
        settings["max_length"] = args.max_length
    note(f"loading {args.model} ...")
    with warnings.catch_warnings():
        warnings.simplefilter("default", ConfigWarning)
        config = AudioGenerationConfig.from_flags(flags, model_path=args.model, **settings)
        return AudioGeneratorPipeline(config, voices={VOICE: args.voice_prompt} if args.voice_prompt else None)


def _chunks(pipeline: AudioGeneratorPipeline, request: AudioGenerationRequest) -> Iterator[AudioGenerationOutput]:
    """The blocks, and a line at the end: how much sound, how soon, how fast."""
    began, seconds, first = time.perf_counter(), 0.0, 0.0
    for output in pipeline.stream(request):
        first = first or time.perf_counter() - began
        seconds += output.seconds
        yield output
        if output.error is not None:
            raise output.error
    took = time.perf_counter() - began
    factor = f", {took / seconds:.2f} s a second" if seconds else ""
    note(f"{seconds:.2f} s of sound, the first after {first:.2f} s, all after {took:.2f} s{factor}")


def _play(pipeline: AudioGeneratorPipeline, request: AudioGenerationRequest) -> None:
    from megatron_infer.server.audio.wav import pcm16

    for output in _chunks(pipeline, request):
        sys.stdout.buffer.write(pcm16(output.audio))
        sys.stdout.buffer.flush()


def _write(pipeline: AudioGeneratorPipeline, request: AudioGenerationRequest, path: Path) -> None:
    from megatron_infer.server.audio.wav import pcm16, wav_header

    data = b"".join(pcm16(output.audio) for output in _chunks(pipeline, request))
    try:
        path.write_bytes(wav_header(pipeline.sample_rate, len(data) // 2) + data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
