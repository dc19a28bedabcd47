"""examples/speech: grammar, vocabulary and judge; with the extra [speech] also the whole of it in seconds."""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_infer.errors import InvalidPrompt, ModelError
from megatron_infer.server.audio.layout import SpeechFormat

SCRIPTS = Path(__file__).parents[3] / "examples" / "speech"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The scripts import each other by their bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        before = set(sys.modules)
        yield
        for name in set(sys.modules) - before:
            if str(SCRIPTS) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def test_held_out_sentences_are_never_trained_on():
    import text

    kept, source = text.held_out(), text.training(seed=0)
    assert len(set(kept)) == len(kept) == 100
    assert not set(kept) & {next(source) for _ in range(3000)}


def test_the_grammar_reaches_all_of_its_rules_and_words():
    import text

    rules = set(re.findall(r"<(\w+)>", " ".join(text.RULES.values())))
    assert rules == set(text.RULES) - {"sentence"}
    rng, spoken = random.Random(3), set()
    for _ in range(6000):
        spoken |= set(text.sentence(rng).split())
    assert spoken == set(text.vocabulary()) and len(spoken) > 150
    assert all(f"<{rule}> = " in text.jsgf() for rule in rules)


def test_words_are_tokens_and_others_are_named():
    import vocabulary

    tokenizer = vocabulary.tokenizer()
    ids = tokenizer.encode("Seventeen ships left the harbour.")
    assert [vocabulary.WORDS[token] for token in ids] == ["seventeen", "ships", "left", "the", "harbor"]
    with pytest.raises(InvalidPrompt, match="'zebras', '17'"):
        tokenizer.encode("Seventeen zebras left the harbor 17")


def test_the_description_is_a_speech_model(tmp_path):
    import vocabulary

    tokenizer = vocabulary.tokenizer()
    speech = vocabulary.write_description(tmp_path, SpeechFormat(vocab_size=512, codebooks=1, frame_rate=50))
    speech.check_vocabulary(vocabulary.FIRST_SPEECH + 512)
    assert tokenizer.vocab_size == vocabulary.FIRST_SPEECH == speech.first_token
    assert tokenizer.token_id("<|end|>") == vocabulary.END == speech.end_token
    ids = speech.prompt_ids({"text": tokenizer.encode("she sold")}, [5, 6])
    first = vocabulary.FIRST_SPEECH
    she, sold = vocabulary.WORDS.index("she"), vocabulary.WORDS.index("sold")
    zero, one = vocabulary.MARKS[:2]
    assert ids == [first + 5, first + 6, vocabulary.VOICE_MARK, zero, she, one, sold, vocabulary.TEXT_MARK]
    assert speech.speech_of([zero, she, first + 3, one, sold, first + 4, vocabulary.END]) == [3, 4]
    assert set(speech.drawable()) >= {*vocabulary.MARKS, she, sold, first, vocabulary.END}


def test_balanced_phrases_hold_every_word_about_as_often():
    import text

    drawn = {}
    for name, source in (("plain", lambda one: one), ("balanced", text.balanced)):
        phrases = source(one.split() for one in text.training(seed=0))
        counts = Counter(word for words in itertools.islice(phrases, 600) for word in words)
        drawn[name] = min(counts[word] for word in text.vocabulary())
    assert drawn["balanced"] >= 2 * max(1, drawn["plain"]) and drawn["balanced"] >= 5


def test_an_answer_says_each_word_before_its_sound(tmp_path):
    import train_lm
    import vocabulary

    speech = vocabulary.write_description(tmp_path, SpeechFormat(vocab_size=8))
    phrase = train_lm.Phrase(["she", "sold"], "anna", [[1, 2], [3]])
    ids, start, weights = train_lm.sequence(phrase, {"anna": [[7]]}, speech, random.Random(0))
    (she, sold), (zero, one), first = (
        map(vocabulary.WORDS.index, phrase.words),
        vocabulary.MARKS[:2],
        speech.first_token,
    )
    assert ids[start:] == [zero, she, first + 1, first + 2, one, sold, first + 3, vocabulary.END]
    assert ids[start - 1] == vocabulary.TEXT_MARK and first + 7 in ids[:start]
    assert weights == [3, 3, 1, 1, 3, 3, 1, 3]


def test_copies_are_random_words_of_which_only_the_words_count(tmp_path):
    import train_lm
    import vocabulary

    speech = vocabulary.write_description(tmp_path, SpeechFormat(vocab_size=8))
    ids, start, weights = train_lm.copy(speech, random.Random(0))
    assert ids[0] == vocabulary.VOICE_MARK and ids[1 : start - 1] == ids[start:] and len(ids) - start == len(weights)
    assert weights == [0, train_lm.TEXT_WEIGHT] * (len(weights) // 2) and 6 <= len(weights) <= 20


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [("a b c", "a b c", 0), ("a b c", "", 3), ("a b c", "a c", 1), ("a b", "a x b", 1), ("a b c", "x b y z", 3)],
)
def test_word_errors_are_the_fewest_changes(said, heard, errors):
    import judge

    assert judge.word_errors(said, heard) == errors


def test_codes_beyond_what_a_file_may_hold_are_scaled_without_a_change_of_sound():
    import train_codec

    from megatron_infer.server.audio.codec import Codec, CodecConfig

    torch.manual_seed(0)
    codec = Codec(CodecConfig(channels=(8, 16, 16), codebook_size=32, code_size=8))
    codec.codes.data.mul_(20)
    with pytest.raises(ModelError, match="codes"):
        codec.exact()
    sound = torch.randn(1, 3200)
    with torch.no_grad():
        tokens, codes = codec.quantise(codec.frames(sound))
        before = codec.sound(codes)
        train_codec.bound_codes(codec)
        again, codes = codec.quantise(codec.frames(sound))
        after = codec.sound(codes)
    assert torch.equal(tokens, again) and torch.equal(before, after)
    codec.exact()


def test_resampling_keeps_a_tone():
    import teacher

    seconds = np.arange(22_050) / 22_050
    there = teacher.resample(np.sin(2 * np.pi * 440 * seconds).astype(np.float32), 22_050)
    wanted = np.sin(2 * np.pi * 440 * np.arange(teacher.RATE) / teacher.RATE)
    assert len(there) == teacher.RATE and np.abs(there - wanted).max() < 1e-3


@pytest.mark.long
def test_the_whole_of_it_in_seconds(tmp_path):
    """Codec and model are trained, and `speak` speaks with them; what they say is noise."""
    for package in ("espeakng_loader", "pocketsphinx"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the extra [speech] is not installed: {package}")
    folder, sound = tmp_path / "voice", tmp_path / "out.wav"
    for script in ("train_codec.py", "train_lm.py"):
        _run(str(SCRIPTS / script), "--quick", "--out-dir", str(folder))
    assert (folder / "metadata.json").is_file() and list((folder / "samples").glob("*.wav"))
    say = ["--text", "Seventeen ships left the harbor.", "--voice", "anna", "--max-tokens", "60", "--logit-bias"]
    import vocabulary

    say.append(f"{vocabulary.END}=-100")
    _run("-m", "megatron_infer.cli.main", "speak", str(folder), *say, "--output", str(sound))
    frames, rest = divmod(sound.stat().st_size - 44, 2 * 320)
    assert rest == 0 and 0 < frames < 60  # words and marks among the 60 tokens have no sound
    said = _run(str(SCRIPTS / "judge.py"), str(folder), "--sentences", "1", "--systems", "teacher", "--voices", "anna")
    assert "| teacher | anna |" in said


def _run(*arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
