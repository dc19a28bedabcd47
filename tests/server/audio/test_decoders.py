"""Audio decoders: what a window sounds like alone, in company, in blocks, and beside the library's own decoding."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.kernels.native import native_build
from megatron_infer.server.audio.blocks import BlockSchedule, PrependPromptSpeechTokens, SpeechBlocks, Window
from megatron_infer.server.audio.checks import snr_db
from megatron_infer.server.audio.codec import Codec, CodecConfig
from megatron_infer.server.audio.decoder import OpenedDecoder, decode_windows
from megatron_infer.server.audio.layout import SpeechFormat
from megatron_infer.server.audio.registry import open_decoder

NEVER, ONCE, ROLLING = PrependPromptSpeechTokens
SMALL = CodecConfig(channels=(16, 24, 32), codebook_size=64, code_size=8)


def window_of(tokens, **parts) -> Window:
    parts = {"num_prompt": 0, "num_left": 0, "num_new": len(tokens)} | parts
    return Window(tokens=tuple(tokens), block=0, is_last=True, **parts)


def spoken(opened: OpenedDecoder, answer, schedule: BlockSchedule, prompt=()) -> np.ndarray:
    """The sound of an answer, block by block."""
    blocks, sounds = SpeechBlocks(schedule, prompt=prompt), []
    blocks.add(answer)
    blocks.end()
    while (window := blocks.next_window()) is not None:
        sounds += decode_windows(opened.decoder, [window])
        blocks.advance(window)
    return np.concatenate(sounds)


def random_tokens(count: int, size: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(size) for _ in range(count)]


@pytest.fixture(scope="module")
def codec_file(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("codec") / "codec.safetensors"
    Codec(SMALL).save(path)
    return path


# ------------------------------------------------------------------ tones


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 127), min_size=1, max_size=30),
    st.lists(st.integers(0, 127), max_size=12),
    st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    st.integers(0, 12),
    st.sampled_from(PrependPromptSpeechTokens),
    st.booleans(),
    st.booleans(),
)
def test_tones_in_blocks_sound_as_at_once_and_tokens_come_back(answer, prompt, chunks, buffer, prepend, one, two):
    opened = TONES
    flags = {"prepend": prepend, "block_causal": one, "prompt_causal": two, "buffer": buffer}
    sound = spoken(opened, answer, BlockSchedule(chunk_size=chunks, **flags), prompt)
    assert sound.dtype == np.float32 and len(sound) == 320 * len(answer)
    assert np.array_equal(sound, spoken(opened, answer, BlockSchedule(**flags), prompt))
    assert opened.encoder.encode(sound) == answer


TONES = open_decoder("tones")
WIDE = open_decoder("tones", config={"behind": 2, "ahead": 1})


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 127), min_size=1, max_size=25), st.lists(st.integers(0, 127), max_size=8))
@pytest.mark.parametrize("prepend", [NEVER, ROLLING])
def test_with_buffer_and_lookahead_of_the_decoders_reach_blocks_are_exact(prepend, answer, prompt):
    schedule = {"buffer": WIDE.decoder.left_context, "right_context": WIDE.decoder.right_context, "prepend": prepend}
    schedule |= {"block_causal": True, "prompt_causal": True}
    at_once = spoken(WIDE, answer, BlockSchedule(**schedule), prompt)
    assert np.array_equal(spoken(WIDE, answer, BlockSchedule(chunk_size=(3, 5), **schedule), prompt), at_once)


def test_a_buffer_below_the_decoders_reach_and_each_causal_flag_are_heard():
    answer, prompt = random_tokens(24, 128), random_tokens(6, 128, seed=1)

    def sound(**settings) -> np.ndarray:
        return spoken(WIDE, answer, BlockSchedule(**{"chunk_size": (6,), "buffer": 4} | settings), prompt)

    base = {"block_causal": True, "right_context": 2}
    assert np.array_equal(sound(**base), sound(**base, chunk_size=None))
    assert not np.array_equal(sound(**base, buffer=3), sound(**base, chunk_size=None))
    assert not np.array_equal(sound(right_context=2), sound(**base))  # what is hidden from the buffer is missed
    once = {**base, "prepend": ONCE}
    assert not np.array_equal(sound(**once), sound(**base))
    assert not np.array_equal(sound(**once, prompt_causal=True), sound(**once))
    for settings_ in (base, once):  # tokens come back all the same
        assert WIDE.encoder.encode(sound(**settings_)) == answer


# ------------------------------------------------------------------ company


def decoders(codec_file) -> list[OpenedDecoder]:
    return [TONES, WIDE, open_decoder("codec", str(codec_file))]


def test_company_and_padding_change_no_sample(codec_file):
    for opened in decoders(codec_file):
        size = opened.format.vocab_size
        windows = [window_of(random_tokens(length, size, seed=length), num_new=length) for length in (1, 7, 20, 20, 33)]
        windows.append(window_of(random_tokens(12, size), num_prompt=3, num_left=4, num_new=5))
        together = decode_windows(opened.decoder, windows)
        for window, sound in zip(windows, together, strict=True):
            assert len(sound) == window.num_new * opened.decoder.samples_per_token
            assert np.array_equal(sound, decode_windows(opened.decoder, [window])[0])


def test_padding_is_silent(codec_file):
    for opened in decoders(codec_file):
        tokens = torch.tensor([random_tokens(10, opened.format.vocab_size)])
        sound = opened.decoder.decode(tokens, torch.tensor([6]), None)
        assert sound.shape == (1, 10 * opened.decoder.samples_per_token)
        assert not sound[:, int(6 * opened.decoder.samples_per_token) :].any() and sound.any()


# ------------------------------------------------------------------ the codec


@pytest.mark.parametrize("codebooks", [1, 2])
def test_codec_in_blocks_is_exact_from_its_left_context_on(codebooks, tmp_path):
    torch.manual_seed(codebooks)
    path = tmp_path / "codec.safetensors"
    Codec(CodecConfig(channels=(16, 24, 32), codebook_size=64, code_size=8, codebooks=codebooks)).save(path)
    opened = open_decoder("codec", str(path))
    context, answer = opened.decoder.left_context, random_tokens(90 * codebooks, 64)
    assert context == 8 * codebooks and opened.format.codebooks == codebooks
    at_once = spoken(opened, answer, BlockSchedule())
    for buffer in (context, context + 6 * codebooks):
        for chunks in ((2 * codebooks,), (6 * codebooks, 14 * codebooks, 30 * codebooks)):
            streamed = spoken(opened, answer, BlockSchedule(chunk_size=chunks, buffer=buffer))
            assert np.array_equal(streamed, at_once)
    assert not np.array_equal(spoken(opened, answer, BlockSchedule(chunk_size=(10 * codebooks,))), at_once)


def test_number_of_threads_changes_no_sample(codec_file):
    opened = open_decoder("codec", str(codec_file))
    windows = [window_of(random_tokens(length, 64)) for length in (60, 9, 60)]
    threads = torch.get_num_threads()
    try:
        sounds = []
        for number in (1, 2):
            torch.set_num_threads(number)
            sounds.append(np.concatenate(decode_windows(opened.decoder, windows)))
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(*sounds)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        CodecConfig(codebooks=2, strides=(5, 8, 8), channels=(20, 9, 33), dilations=((2,), (), (1, 5)), code_size=7),
    ],
)
def test_the_native_codec_has_the_samples_of_torchs(config, tmp_path, monkeypatch):
    torch.manual_seed(1)
    codec = Codec(config)
    for weight in codec.decoder.parameters():
        weight.data.mul_(3)  # reaches the limit of activations
    codec.save(tmp_path / "codec.safetensors")
    windows = [window_of(random_tokens(length, 512 if config.codebooks > 1 else 64)) for length in (34, 2)]
    native = open_decoder("codec", str(tmp_path / "codec.safetensors")).decoder

    def no_compiler():
        raise native_build.NativeUnavailable("no compiler")

    monkeypatch.setattr(native_build, "load", no_compiler)
    plain = open_decoder("codec", str(tmp_path / "codec.safetensors")).decoder
    ours, theirs = decode_windows(native, windows), decode_windows(plain, windows)
    assert all(np.array_equal(*pair) and pair[0].any() for pair in zip(ours, theirs, strict=True))


def test_training_computes_what_the_exact_copy_does_but_for_rounding():
    torch.manual_seed(0)
    codec = Codec(SMALL)
    sound = torch.randn(2, 40 * SMALL.hop) / 8
    tokens, codes = codec.quantise(codec.frames(sound))
    exact = codec.exact()
    assert (exact.quantise(exact.frames(sound.double()))[0] == tokens).float().mean() > 0.9
    assert snr_db(codec.sound(codes).detach().numpy(), exact.sound(codes.detach().double()).numpy()) > 40
    loss = (codec.sound(codes) - sound).square().mean()
    loss.backward()
    assert all(one.grad is not None for one in codec.decoder.parameters())


def test_the_codec_that_examples_train_keeps_its_limits():
    config = CodecConfig()
    assert config.format == SpeechFormat(vocab_size=512, frame_rate=Fraction(50)) and config.left_frames == 8
    assert sum(one.numel() for one in Codec(config).parameters()) <= 1_000_000
    with pytest.raises(ConfigError, match="parameters, the limit is"):
        Codec(CodecConfig(channels=(256, 256, 256)))
    with pytest.raises(ConfigError, match="100 frames a second"):
        CodecConfig(strides=(10, 4, 4))


# ------------------------------------------------------------------ the library's


def library_model(name: str, **changes):
    import transformers as hf

    torch.manual_seed(0)
    if name == "mimi":
        sizes = {"hidden_size": 32, "num_filters": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
                 "num_key_value_heads": 2, "intermediate_size": 64, "codebook_size": 32, "codebook_dim": 16,
                 "vector_quantization_hidden_dimension": 16, "num_quantizers": 4, "upsample_groups": 32}  # fmt: skip
        model = hf.MimiModel(hf.MimiConfig(**sizes))
    elif name == "encodec":
        sizes = {"hidden_size": 16, "num_filters": 4, "codebook_size": 32, "codebook_dim": 16}
        model = hf.EncodecModel(hf.EncodecConfig(**sizes))
    else:
        sizes = {"encoder_hidden_size": 4, "decoder_hidden_size": 64, "codebook_size": 32, "n_codebooks": 4,
                 "hidden_size": 64}  # fmt: skip
        model = hf.DacModel(hf.DacConfig(**sizes, **changes))
    with torch.no_grad():
        for buffer_name, tensor in model.named_buffers():
            if buffer_name.endswith(("embed", "embed_sum")):
                tensor.normal_()
    return model.eval()


@pytest.fixture(scope="module", params=["mimi", "encodec", "dac"])
def library(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = library_model(request.param)
    model.save_pretrained(folder)
    return request.param, model, open_decoder(request.param, str(folder), {"codebooks": 4})


def test_library_codecs_sound_as_the_library_decodes(library):
    name, model, opened = library
    codes = torch.randint(0, 32, (1, 4, 12), generator=torch.Generator().manual_seed(1))
    tokens = codes[0].T.flatten().tolist()
    with torch.inference_mode():
        if name == "encodec":
            wanted = model.decode(codes[None], [None]).audio_values
        else:
            wanted = model.decode(audio_codes=codes).audio_values
    sound = decode_windows(opened.decoder, [window_of(tokens)])[0]
    assert np.allclose(sound, wanted.flatten().numpy(), atol=1e-6) and np.abs(sound).max() > 0
    assert len(sound) == 12 * 4 * opened.decoder.samples_per_token
    sizes = {"mimi": (24_000, Fraction(25, 2)), "encodec": (24_000, Fraction(75)), "dac": (16_000, Fraction(125, 4))}
    assert (opened.decoder.sample_rate, opened.format.frame_rate) == sizes[name]
    voice = opened.encoder.encode(np.sin(np.arange(24_000, dtype=np.float32) / 9))
    assert voice and len(voice) % 4 == 0 and max(voice) < 32


def test_sound_that_a_library_cuts_short_is_as_long_as_its_tokens(tmp_path):
    """The upsampling of DAC's 24 kHz model has a ratio of 5."""
    model = library_model("dac", upsampling_ratios=[8, 5, 4, 2], downsampling_ratios=[2, 4, 5, 8])
    model.save_pretrained(tmp_path)
    decoder = open_decoder("dac", str(tmp_path), {"codebooks": 4}).decoder
    with torch.inference_mode():
        cut = model.decode(audio_codes=torch.zeros(1, 4, 6, dtype=torch.int64)).audio_values
    (sound,) = decode_windows(decoder, [window_of([0] * 24)])
    assert cut.numel() < len(sound) == 6 * 320
    assert np.allclose(sound[: cut.numel()], cut.flatten().numpy(), atol=1e-6)


def test_library_codecs_improve_with_the_buffer_and_dac_is_exact_within_its_reach(library):
    name, _, opened = library
    answer = random_tokens(4 * 60, 32)
    at_once = spoken(opened, answer, BlockSchedule())
    ahead = opened.decoder.right_context
    found = [
        snr_db(at_once, spoken(opened, answer, BlockSchedule(chunk_size=(40,), buffer=buffer, right_context=ahead)))
        for buffer in (0, 16, 4 * 40)
    ]
    assert found[0] < found[2]
    if name == "dac":
        assert opened.decoder.left_context <= 4 * 12 and found[2] > 100


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "audio_decoder is empty; give one of tones, codec, mimi, encodec, dac"),
        (("tone",), "did you mean 'tones'"),
        (("codec",), "audio_decoder_weights is empty, but codec has weights"),
        (("codec", "/no/where"), "there is no /no/where"),
        (("tones", "weights"), "tones has no weights"),
        (("tones", "", {"vocab": 3}), "did you mean 'vocab_size'"),
        (("tones", "", {"vocab_size": 0}), "vocab_size is 0"),
        (("tones", "", {"vocab_size": 500}), "500 tones need 1,002 samples_per_token"),
        (("codec", __file__), "is no safetensors file"),
    ],
)
def test_bad_decoder_is_refused_with_the_remedy(arguments, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        open_decoder(*arguments)


def test_file_that_is_no_codec_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="is no codec"):
        open_decoder("codec", str(tmp_path / "other.safetensors"))
