"""The pipeline that speaks: the same sound whatever else happens, block by block as at once; and bad input."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from audio_case import (
    END,
    FIRST,
    NUM_SPEECH,
    equal,
    make_engine,
    make_pipeline,
    requests,
    speech_model,
    text_tokenizer,
    write_voice,
)

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, DuplicateRequest, InvalidPrompt, ModelError, RequestError
from megatron_infer.pipelines import (
    AudioGenerationRequest,
    AudioGeneratorPipeline,
    GenerationStatus,
    TextTokenizer,
    get_paged_manager,
)
from megatron_infer.server.audio.blocks import BlockSchedule, PrependPromptSpeechTokens
from megatron_infer.server.audio.registry import open_decoder

VOICE = tuple([3, 1, 4, 1, 5, 9, 2, 6] * 5)


@pytest.fixture(scope="module")
def voice_file(tmp_path_factory):
    return str(write_voice(tmp_path_factory.mktemp("voices") / "anna.wav"))


@pytest.fixture(scope="module")
def alone(voice_file):
    """Each request by itself, in one block."""
    pipeline = make_pipeline(schedule=BlockSchedule(), voices={"anna": voice_file})
    return [pipeline.generate(request)[0] for request in requests(voice="anna")]


def test_tokens_are_the_engines_and_sound_is_that_of_the_tokens(alone, voice_file):
    engine, model = make_engine(), speech_model()
    for request, output in zip(requests(), alone, strict=True):
        prompt = [*(FIRST + token for token in VOICE), 258, *request.input.encode(), 259]

        prompt[len(VOICE) + 1 : -1] = text_tokenizer().encode(request.input, add_special=False)
        params = dataclasses.replace(
            request.sampling_params, allowed_token_ids=model.drawable(), stop_token_ids=(END,), detokenize=False
        )
        drawn = engine.generate([prompt], params)[0].outputs[0].token_ids
        assert list(output.tokens) == model.speech_of(drawn) and output.tokens
        assert open_decoder("tones", config={"vocab_size": NUM_SPEECH}).encoder.encode(output.audio) == list(
            output.tokens
        )
        assert output.seconds == len(output.tokens) / 50 and output.sample_rate == 16_000
        assert output.final_status in (GenerationStatus.END_OF_SEQUENCE, GenerationStatus.MAXIMUM_LENGTH)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("company", {}),
        ("chunked prefill", {"max_tokens": 16}),
        ("mixed batching", {"batching": "mixed"}),
        ("overlap", {"overlap": True}),
        ("no prefix cache", {"enable_prefix_caching": False}),
        ("eviction", {"buffer_size_gb": 0.00013, "batching": "mixed"}),
        ("pause", {"buffer_size_gb": 0.00013, "paused_buffer_size_gb": 0.00006}),
        ("two at once", {"max_queue_size_tg": 2}),
        ("prompts beside two that decode", {"max_queue_size_tg": 4, "min_batch_size_tg": 2}),
        ("prompts that wait for others", {"ce_delay_ms": 30.0}),
        ("first decode", {"enable_prioritize_first_decode": True}),
    ],
)
def test_sound_is_the_same_in_company(kind, settings, alone, voice_file):
    pipeline = make_pipeline(voices={"anna": voice_file}, **settings)
    outputs = pipeline.generate(requests(voice="anna"))
    assert equal(outputs, alone)
    again = pipeline.generate(requests(voice="anna", prefix="again"))  # now the prefix cache has the voice
    assert equal(again, alone)
    context = pipeline.engine.replay.context
    assert pipeline.engine.has_unfinished() is False and context.num_free_rows == 8
    if kind == "eviction":
        assert pipeline.engine.figures().evictions > 0
    elif kind == "pause":
        assert pipeline.engine.figures().pauses > 0
    elif settings.get("enable_prefix_caching", True):
        assert pipeline.engine.figures().prefix_hit_tokens >= 32 * 3


def test_blocks_come_early_and_add_up(alone, voice_file):
    pipeline = make_pipeline(voices={"anna": voice_file})
    assert get_paged_manager(pipeline) is pipeline.text_pipeline.kv_manager
    for request, whole in zip(requests(voice="anna"), alone, strict=True):
        steps_before = pipeline.engine.num_steps
        chunks = list(pipeline.stream(request))
        assert [chunk.chunk_id for chunk in chunks] == list(range(len(chunks)))
        assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        sizes = [len(chunk.tokens) for chunk in chunks]
        assert sizes[0] == min(5, len(whole.tokens)) and all(size == 10 for size in sizes[1:-1])
        assert np.array_equal(np.concatenate([chunk.audio for chunk in chunks]), whole.audio)
        assert chunks[0].processing_time <= chunks[-1].processing_time
        assert all(chunk.final_status is GenerationStatus.ACTIVE for chunk in chunks[:-1])
        assert pipeline.engine.num_steps - steps_before >= len(whole.tokens)
        assert chunks[-1].buffer_speech_tokens == whole.tokens[-4:]
        assert chunks[-1].metadata["final_chunk"] is True and chunks[0].metadata["tokens_generated"] == sizes[0]
    assert not pipeline._contexts


def test_the_first_block_needs_its_own_tokens_only(voice_file):
    pipeline = make_pipeline(voices={"anna": voice_file})
    stream = pipeline.stream(requests(1, voice="anna")[0])
    before = pipeline.engine.num_steps
    first = next(stream)
    assert len(first.tokens) == 5 and pipeline.engine.num_steps - before <= 5 + 3
    stream.close()  # the listener leaves: the request ends and its memory goes back
    assert not pipeline.engine.has_unfinished()
    assert pipeline.engine.replay.context.num_free_rows == 8


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_suspend_in_mid_sentence_changes_no_sample(mode, alone, voice_file):
    pipeline = make_pipeline(voices={"anna": voice_file})
    contexts = [pipeline.new_context(request) for request in requests(voice="anna")]
    parts = {context.request_id: [] for context in contexts}
    for step in range(400):
        if step in (3, 20):
            with pipeline.engine.suspended(mode):
                pass
        for request_id, output in pipeline.execute(contexts).items():
            parts[request_id].append(output)
        if all(context.is_done for context in contexts):
            break
    for context, whole in zip(contexts, alone, strict=True):
        assert np.array_equal(np.concatenate([one.audio for one in parts[context.request_id]]), whole.audio)


def test_next_chunk_gives_each_of_a_batch_its_next_block(voice_file, alone):
    pipeline = make_pipeline(voices={"anna": voice_file})
    contexts = [pipeline.new_context(request) for request in requests(voice="anna")]
    first = pipeline.next_chunk(contexts)
    assert first.keys() == {context.request_id for context in contexts}
    assert all(output.chunk_id == 0 for output in first.values())
    pipeline.release("r0")
    assert contexts[0].is_done and pipeline.next_chunk(contexts).keys() == {"r1", "r2", "r3"}
    pipeline.close()
    assert not pipeline.engine.has_unfinished() and all(context.is_done for context in contexts)


def test_text_between_speech_tokens_is_drawn_and_has_no_sound():
    speech = speech_model(text_marks=[260, 2], interleaved_text=[32, 200])
    opened, (asked,) = open_decoder("tones", config={"vocab_size": NUM_SPEECH}), requests(1, max_tokens=60)
    pipeline = AudioGeneratorPipeline.of_engine(
        make_engine(), TextTokenizer(text_tokenizer()), speech, opened, schedule=BlockSchedule(chunk_size=(5,))
    )
    chunks = list(pipeline.stream(asked))
    letters = text_tokenizer().encode(asked.input, add_special=False)
    prompt = [258, *itertools.chain(*zip(itertools.cycle((260, 261)), letters, strict=False)), 259]
    params = dataclasses.replace(
        asked.sampling_params, allowed_token_ids=speech.drawable(), stop_token_ids=(END,), detokenize=False
    )
    drawn = make_engine().generate([prompt], params)[0].outputs[0].token_ids
    heard = [token for chunk in chunks for token in chunk.tokens]
    assert heard == speech.speech_of(drawn) and 0 < len(heard) < len(drawn) - 1
    sizes = [len(chunk.audio) // 320 for chunk in chunks]
    assert sum(sizes) == len(heard) and all(size == 5 for size in sizes[:-1])


def test_hybrid_models_speak_too():
    pipeline = make_pipeline("hybrid", schedule=BlockSchedule(chunk_size=(4,)))
    whole = make_pipeline("hybrid", schedule=BlockSchedule()).generate(requests(2))
    assert equal(pipeline.generate(requests(2)), whole)


def test_one_block_without_streaming_and_sound_that_goes_on():
    opened = open_decoder("tones", config={"vocab_size": NUM_SPEECH})
    pipeline = make_pipeline()
    (request,) = requests(1)
    whole = list(pipeline.stream(dataclasses.replace(request, streaming=False)))
    assert len(whole) == 1 and whole[0].is_last
    more = dataclasses.replace(request, request_id="more", buffer_speech_tokens=whole[0].buffer_speech_tokens)
    context = pipeline.new_context(more)
    assert context.blocks.decoded_index == 4
    (second,) = pipeline.generate(dataclasses.replace(more, request_id="more2"))
    assert second.tokens == whole[0].tokens and opened.encoder.encode(second.audio) == list(second.tokens)


def test_max_tokens_of_one_and_an_answer_without_a_token():
    pipeline = make_pipeline()
    one = AudioGenerationRequest(input="Hi", sampling_params=SamplingParams(max_tokens=1, seed=0))
    (output,) = pipeline.generate(one)
    assert len(output.tokens) <= 1 and output.is_last
    ends = SamplingParams(max_tokens=9, logit_bias={END: 1e9})
    (silent,) = pipeline.generate(AudioGenerationRequest(input="Hi", sampling_params=ends))
    assert silent.tokens == () and len(silent.audio) == 0 and silent.final_status is GenerationStatus.END_OF_SEQUENCE


def test_figures_count_what_was_spoken():
    pipeline = make_pipeline()
    outputs = pipeline.generate(requests(2))
    figures = {family.name: next(iter(family.series.values())).value for family in pipeline.families()
               if family.name.startswith("megatron_infer_speech")}  # fmt: skip
    sound = sum(output.seconds for output in outputs)
    assert figures["megatron_infer_speech_seconds_total"] == pytest.approx(sound)
    assert figures["megatron_infer_speech_first_chunks_total"] == 2
    assert figures["megatron_infer_speech_windows_total"] >= 4
    assert figures["megatron_infer_speech_decoder_queue"] == 0


def steps_of(settings, count: int = 4) -> list[list[int]]:
    """For each request the steps of the engine in which it drew, of so many that come at once."""
    pipeline = make_pipeline(schedule=BlockSchedule(chunk_size=(1,)), **settings)
    contexts = [pipeline.new_context(request) for request in requests(count, max_tokens=20)]
    drew = {context.request_id: [] for context in contexts}
    while any(not context.is_done for context in contexts):
        before = {one.request_id: len(one.blocks.tokens) for one in contexts}
        pipeline.execute(contexts)
        for one in contexts:
            if len(one.blocks.tokens) > before[one.request_id]:
                drew[one.request_id].append(pipeline.engine.num_steps)
    return list(drew.values())


def test_at_most_max_queue_size_tg_are_spoken_at_once():
    steps = steps_of({"max_queue_size_tg": 2})
    assert min(one[0] for one in steps[2:]) > min(one[-1] for one in steps[:2])
    assert max(one[0] for one in steps_of({})) < min(one[-1] for one in steps_of({}))


def test_a_prompt_waits_while_min_batch_size_tg_are_spoken():
    prompts = {"max_tokens": 48}  # of about one prompt
    eager = steps_of(prompts)
    patient = steps_of(prompts | {"min_batch_size_tg": 1})
    assert max(one[0] for one in eager) < min(one[-1] for one in eager)
    assert patient[1][0] > patient[0][-1]


def test_rows_for_wandb_have_the_figures_of_speech():
    class Writer:
        rows: list[dict[str, float]] = []

        def log(self, data):
            self.rows.append(data)

        def define_metric(self, name, step_metric=None):
            pass

    pipeline = make_pipeline(metrics_writer=Writer(), logging_step_interval=1)
    whole = pipeline.generate(requests(2))
    (again,) = pipeline.generate(requests(1, prefix="again"))
    sound = sum(output.seconds for output in whole)
    key = next(name for name in Writer.rows[-1] if name.endswith("speech_seconds_total"))
    assert sound < Writer.rows[-1][key] <= sound + again.seconds
    assert [row[key] for row in Writer.rows] == sorted(row[key] for row in Writer.rows)


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"input": ""}, InvalidPrompt, "input is empty"),
        ({"input": " \n"}, InvalidPrompt, "input is empty"),
        ({"input": "x" * 4097}, InvalidPrompt, "4,097 characters, the limit is 4,096"),
        ({"voice": "ana"}, RequestError, "did you mean 'anna'"),
        ({"voice": "anna", "audio_prompt_tokens": (1,)}, RequestError, "both given"),
        ({"audio_prompt_tokens": (64,)}, RequestError, "audio_prompt_tokens holds 64"),
        ({"buffer_speech_tokens": (-1,)}, RequestError, "buffer_speech_tokens holds -1"),
        ({"voice": "anna", "buffer_speech_tokens": (64,)}, RequestError, "buffer_speech_tokens holds 64"),
        ({"sampling_params": SamplingParams(logprobs=1)}, RequestError, "logprobs is 1, which does nothing for speech"),
        ({"sampling_params": {"max_tokens": 3}}, RequestError, "must be SamplingParams"),
        ({"instructions": "slowly"}, RequestError, "instructions is given, but the model knows none"),
        ({"audio_prompt_transcription": "x"}, RequestError, "transcription is given"),
        ({"sampling_params": SamplingParams(allowed_token_ids=[1])}, RequestError, "allowed_token_ids"),
    ],
)
def test_bad_request_is_refused_with_the_remedy(fields, error, message, voice_file):
    pipeline = shared_pipeline(voice_file)
    with pytest.raises(error, match=message):
        pipeline.new_context(AudioGenerationRequest(**{"input": "Hello."} | fields))


_shared = {}


def shared_pipeline(voice_file):
    if "one" not in _shared:
        _shared["one"] = make_pipeline(voices={"anna": voice_file})
    return _shared["one"]


def test_a_request_that_cannot_be_served_leaves_the_others_alone(voice_file, alone):
    pipeline = make_pipeline(voices={"anna": voice_file})
    contexts = [pipeline.new_context(request) for request in requests(voice="anna")]
    long = pipeline.new_context(AudioGenerationRequest(input="word " * 200, request_id="long"))
    with pytest.raises(RequestError, match="1,002 tokens, limit is 239"):
        pipeline.execute([long])
    pipeline.release("long")
    sound = {context.request_id: [] for context in contexts}
    while any(not context.is_done for context in contexts):
        for request_id, output in pipeline.execute(contexts).items():
            sound[request_id].append(output.audio)
    for context, whole in zip(contexts, alone, strict=True):
        assert np.array_equal(np.concatenate(sound[context.request_id]), whole.audio)


def test_a_second_request_of_the_same_id_is_refused_and_the_first_speaks_on(voice_file, alone):
    pipeline = shared_pipeline(voice_file)
    (first, *_), (second, *_) = requests(voice="anna"), requests()
    parts = pipeline.stream(first)
    heard = [next(parts).audio]
    for ask in (lambda: list(pipeline.stream(second)), lambda: pipeline.generate(second)):
        with pytest.raises(DuplicateRequest, match="request id 'r0' is that of another request"):
            ask()
    heard += [part.audio for part in parts]
    assert np.array_equal(np.concatenate(heard), alone[0].audio)
    with pytest.raises(RequestError, match="it must be AudioGenerationRequest"):
        pipeline.generate("Hello.")


def test_model_and_decoder_that_do_not_go_together_are_refused():

    tokenizer, engine = TextTokenizer(text_tokenizer()), make_engine()

    def make(speech, schedule=None, **config):
        opened = open_decoder("tones", config={"vocab_size": NUM_SPEECH} | config)
        return AudioGeneratorPipeline.of_engine(engine, tokenizer, speech, opened, schedule=schedule)

    with pytest.raises(ConfigError, match="vocab_size is 64 in the model and 32 in the decoder"):
        make(speech_model(), vocab_size=32)
    with pytest.raises(ConfigError, match="frame_rate is 25 in the model and 50"):
        make(speech_model(frame_rate=25))
    with pytest.raises(ModelError, match="no speech tokens 300 to 363"):
        make(speech_model(first_token=300))
    for name in ("text_marks", "interleaved_text"):
        with pytest.raises(ModelError, match=f"{name} is the tokens 260 to 264; they must be text tokens"):
            make(speech_model(**{name: [260, 5]}))
    two = {"codebooks": 2, "samples_per_token": 160}
    with pytest.raises(ConfigError, match="chunk_size has 5, which is no multiple of the 2 tokens of a frame"):
        make(speech_model(codebooks=2), BlockSchedule(chunk_size=(4, 5)), **two)
    with pytest.raises(ConfigError, match="buffer is 3, which is no multiple"):
        make(speech_model(codebooks=2), BlockSchedule(chunk_size=(4,), buffer=3), **two)
    with pytest.warns(match=r"depends on 4 tokens before it.* -?\d+\.\d dB"):
        make(speech_model(), BlockSchedule(chunk_size=(4,), buffer=2, block_causal=True), behind=2)


def test_several_codebooks_with_a_delay_speak_whole_frames(tmp_path):

    opened = open_decoder("tones", config={"vocab_size": NUM_SPEECH, "codebooks": 2, "samples_per_token": 160})
    sounds = []
    for chunks in (None, (4, 6)):
        pipeline = AudioGeneratorPipeline.of_engine(
            make_engine(), TextTokenizer(text_tokenizer()), speech_model(codebooks=2, delay=True), opened,
            schedule=BlockSchedule(chunk_size=chunks, prepend=PrependPromptSpeechTokens.ONCE),
        )  # fmt: skip
        sounds.append(pipeline.generate(requests(3, audio_prompt_tokens=VOICE)))
    assert equal(*sounds) and all(len(output.tokens) % 2 == 0 and output.tokens for output in sounds[0])
