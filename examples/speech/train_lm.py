"""Train the model that speaks: a voice and words in, speech tokens of the codec out.

    python examples/speech/train_lm.py --out-dir voice --minutes 18       after train_codec.py, into the same directory
    python examples/speech/train_lm.py --out-dir voice --quick            seconds, for tests: it says noise
    megatron-infer speak voice/ --voice anna --text "Seventeen ships left the harbor." --output out.wav

A megatron-core GPTModel in megatron-core's DDP with megatron-core's Adam. One live model trains and speaks: every
--speak-every steps the session's engine says a held-out sentence with the weights of that moment. In the end the
directory is a torch_dist checkpoint with speech.json, tokenizer and codec, which `speak`, `serve` and a trainer load.
Phrases grow from single words to sentences, so that the model first learns which word it is at.
"""

from __future__ import annotations

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is imported

# ruff: noqa: E402
import argparse
import itertools
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import text
import torch
from teacher import FRAME, RATE, VOICES, Teacher, write_wav
from torch import Tensor
from vocabulary import END, FIRST_SPEECH, MARKS, VOICE_FRAMES, WORDS, tokenizer, write_description

from megatron_infer import SamplingParams
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.models.loading.sources import open_source
from megatron_infer.rl.session import RolloutSession
from megatron_infer.server.audio.codec import Codec, CodecDecoder
from megatron_infer.server.audio.speech_model import SpeechModel

sys.path.append(str(Path(__file__).parents[1]))
from grpo_trainer import Trainer, megatron_trainer, on_cpu

MAX_LENGTH = 768
"""Tokens of voice, text and speech together."""
MAX_WORDS = (2, 5, 99)
"""The longest phrase of each stage of training, in words."""
TEXT_WEIGHT = 3.0
"""Weight of marks, words and the end in the loss: they are few, and each decides over a word's sound."""
COPIES, COPIED_WORDS = 6, 10
"""Texts of random words in a step, and the longest of them."""
SHARE_SHUFFLED = 0.7
"""Phrases whose words stand in random order: what is spoken follows from the prompt, not from the grammar."""
SHARE_WITHOUT_VOICE = 0.05
LR, WARM_STEPS = 2e-3, 30
VOICE_TEXT = "please open the small door"
"""What anna.wav and ben.wav say the beginning of."""
TEMPERATURE, TOP_K = 0.6, 20
"""How it speaks while it trains, and how the judge hears it."""


Voices = dict[str, list[list[int]]]
"""Voice -> beginnings of its sentences, as speech tokens."""


@dataclass(frozen=True, slots=True)
class Phrase:
    words: list[str]
    voice: str
    sounds: list[list[int]]
    """Speech tokens of each word; those of the silence at the end are the last word's."""

    @property
    def beginning(self) -> list[int]:
        """What a voice's prompt holds."""
        return list(itertools.chain(*self.sounds))[:VOICE_FRAMES]


def describe(codec: Codec, *, quick: bool) -> ModelDescription:
    hidden, layers = (64, 2) if quick else (256, 4)
    return ModelDescription(
        architecture="MegatronGPT",
        transformer={
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": hidden // 32,
            "num_query_groups": hidden // 32,
            "kv_channels": 32,
            "ffn_hidden_size": 2 * hidden,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation": "silu",
            "add_bias_linear": False,
        },
        vocab_size=FIRST_SPEECH + codec.config.codebook_size,
        max_sequence_length=MAX_LENGTH,
        eos_ids=(END,),
        name="voice",
    )


def initialise(model: torch.nn.Module, *, seed: int) -> None:
    """Random weights: norms at one, matrices at a scale that keeps the residual stream's."""
    generator = torch.Generator().manual_seed(seed)
    depth = 2 * model.config.num_layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            into_stream = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            parameter.normal_(0.0, 0.02 if "embedding" in name else parameter.shape[1] ** -0.5, generator=generator)
            parameter.mul_(depth**-0.5 if into_stream else 1.0)


def phrases(codec: Codec, teacher: Teacher, *, per_stage: int, seed: int) -> list[list[Phrase]]:
    """For each of `MAX_WORDS` phrases of at most as many words, in random voices; words come about as often."""
    rng, made, source = random.Random(seed), list[list[Phrase]](), text.training(seed=seed)
    for most in MAX_WORDS:
        stage = list[Phrase]()
        for words in text.balanced(_cut(one.split(), most, rng) for one in source):
            voice = rng.choice(list(VOICES))
            if rng.random() < SHARE_SHUFFLED:
                rng.shuffle(words)
            stage.append(Phrase(words, voice, _sounds(codec, teacher, words, voice)))
            if len(stage) == per_stage:
                break
        made.append(stage)
    return made


def _cut(words: list[str], most: int, rng: random.Random) -> list[str]:
    """All of them, or where there are more than `most` as many in a row, or fewer."""
    if len(words) <= most:
        return words
    begin = rng.randrange(len(words) - most + 1)
    return words[begin : begin + rng.randint(1, most)]


def _sounds(codec: Codec, teacher: Teacher, words: list[str], voice: str) -> list[list[int]]:
    """The codec's tokens of a spoken phrase, cut where its words end."""
    ends = list(itertools.accumulate(teacher.num_frames(word, voice) for word in words))
    sound = torch.from_numpy(teacher.speak(" ".join(words), voice))[None]
    with torch.inference_mode():
        tokens = codec.quantise(codec.frames(sound))[0].flatten().tolist()
    return [tokens[begin:end] for begin, end in itertools.pairwise([0, *ends[:-1], len(tokens)])]


def stage_of(done: float, rng: random.Random) -> int:
    """The stage to draw a phrase of, after a share `done` of the training."""
    newest = 0 if done < 0.15 else 1 if done < 0.35 else 2
    return newest if rng.random() < 0.8 else rng.randrange(newest + 1)


Sequence = tuple[list[int], int, list[float]]
"""Token ids, how many of them are the prompt, and the weights of the others in the loss."""


def sequence(phrase: Phrase, voices: Voices, speech: SpeechModel, rng: random.Random) -> Sequence:
    voice = [] if rng.random() < SHARE_WITHOUT_VOICE else rng.choice(voices[phrase.voice])
    words = [WORDS.index(word) for word in phrase.words]
    prompt = speech.prompt_ids({"text": words}, voice)
    answer = [
        token
        for mark, word, sound in zip(itertools.cycle(MARKS), words, phrase.sounds)
        for token in (mark, word, *(FIRST_SPEECH + one for one in sound))
    ]
    answer.append(END)
    return [*prompt, *answer], len(prompt), [1.0 if one >= FIRST_SPEECH else TEXT_WEIGHT for one in answer]


def copy(speech: SpeechModel, rng: random.Random) -> Sequence:
    """Random words and the same again, without sound: what a word is follows from the prompt alone, not from grammar.
    Only the words count: what comes behind one here is no model for an answer."""
    words = [rng.randrange(len(WORDS)) for _ in range(rng.randint(3, COPIED_WORDS))]
    prompt = speech.prompt_ids({"text": words})
    answer = [token for pair in zip(itertools.cycle(MARKS), words) for token in pair]
    return [*prompt, *answer], len(prompt), [TEXT_WEIGHT * (one < len(WORDS)) for one in answer]


def train(
    session: RolloutSession,
    trainer: Trainer,
    made: list[list[Phrase]],
    voices: Voices,
    speech: SpeechModel,
    codec: CodecDecoder,
    options: argparse.Namespace,
) -> float:
    """Returns the mean loss of a token over the last tenth of the steps."""
    rng, begin, losses = random.Random(options.seed), time.perf_counter(), list[float]()
    seconds = 8.0 if options.quick else 60 * options.minutes
    for step in itertools.count():
        done = (time.perf_counter() - begin) / seconds
        if done >= 1:
            break
        done = 0.5 + done / 2 if options.resume else done
        for group in trainer.optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARM_STEPS) * (0.05 + 0.95 * math.cos(math.pi * done / 2))
        drawn = [copy(speech, rng) for _ in range(COPIES)]
        tokens = 0
        while tokens < options.batch_tokens:
            drawn.append(sequence(rng.choice(made[stage_of(done, rng)]), voices, speech, rng))
            tokens += len(drawn[-1][0])
        weights = [torch.tensor(weights) for _, _, weights in drawn]
        total = float(torch.cat(weights).sum())

        def loss_of(
            scores: list[Tensor], indices: list[int], weights: list[Tensor] = weights, total: float = total
        ) -> Tensor:
            return -torch.cat([weights[at] * one for at, one in zip(indices, scores, strict=True)]).sum() / total

        with session.training():
            starts = [start for _, start, _ in drawn]
            report = session.score_and_backward([ids for ids, _, _ in drawn], loss_of, start=starts)
            with on_cpu():
                session.step(trainer.optimizer)
        losses.append(report.loss)
        if step % 50 == 0:
            recent = losses[-50:]
            print(f"lm: step {step:,}  {100 * done:.0f} %  loss {sum(recent) / len(recent):.3f}", flush=True)
        if step and step % options.speak_every == 0:
            sentence, name = text.held_out()[step % 100], list(VOICES)[step % len(VOICES)]
            sound = speak(session, speech, codec, sentence, voices[name][0], seed=step)
            write_wav(options.out_dir / "samples" / f"step{step}.wav", sound)
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def speak(
    session: RolloutSession, speech: SpeechModel, codec: CodecDecoder, sentence: str, voice: list[int], *, seed: int
) -> np.ndarray:
    """A sentence with the weights of this moment: float32 [samples]."""
    prompt = speech.prompt_ids({"text": tokenizer().encode(sentence)}, voice)
    params = SamplingParams(
        max_tokens=MAX_LENGTH - len(prompt),
        temperature=TEMPERATURE,
        top_k=TOP_K,
        seed=seed,
        allowed_token_ids=speech.drawable(),
    )
    with session.generating() as roll:
        (group,) = roll.generate([prompt], params)
    tokens = speech.speech_of(group.samples[0].token_ids)
    return codec.decode(torch.tensor([tokens]), torch.tensor([len(tokens)]), None)[0].numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-dir", type=Path, default=Path("voice"), help="holds codec.safetensors")
    parser.add_argument("--minutes", type=float, default=18.0, help="of training (%(default)s)")
    parser.add_argument("--phrases", type=int, default=600, help="of each of three lengths (%(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="of a step (%(default)s)")
    parser.add_argument("--speak-every", type=int, default=200, help="steps between samples (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on with the model in --out-dir; give another --seed")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    options = parser.parse_args()
    if options.quick:
        options.phrases, options.batch_tokens, options.speak_every = 8, 256, 5
    file = options.out_dir / "codec.safetensors"
    if not file.is_file():
        parser.error(f"there is no {file}; train it first: train_codec.py --out-dir {options.out_dir}")
    codec = Codec.load(file)
    if codec.config.codebooks != 1:
        parser.error(f"{file} has {codec.config.codebooks} codebooks; train it with --codebooks 1")
    (options.out_dir / "samples").mkdir(exist_ok=True)
    speech, teacher = write_description(options.out_dir, codec.config.format), Teacher()
    for name in VOICES:
        write_wav(options.out_dir / f"{name}.wav", teacher.speak(VOICE_TEXT, name)[: VOICE_FRAMES * FRAME])
    made = phrases(codec, teacher, per_stage=options.phrases, seed=options.seed)
    voices = {
        name: [one.beginning for one in made[-1] if one.voice == name and len(one.beginning) == VOICE_FRAMES]
        for name in VOICES
    }
    frames = sum(len(sound) for stage in made for one in stage for sound in one.sounds)
    print(f"lm: {frames * FRAME / RATE / 60:.0f} minutes of sound")
    description = describe(codec, quick=options.quick)
    model = build_model(open_source(str(options.out_dir)) if options.resume else description)
    if not options.resume:
        initialise(model, seed=options.seed)
    count = sum(one.numel() for one in model.parameters())
    print(f"lm: {count:,} parameters", flush=True)
    trainer = megatron_trainer(model, lr=LR)
    config = InferenceConfig(buffer_size_gb=0.05, max_sequence_length=MAX_LENGTH)
    session = RolloutSession(trainer.model, config, tokenizer(), eos_ids=[END], model_name="voice", meter=None)
    loss = train(session, trainer, made, voices, speech, CodecDecoder(codec), options)
    save_checkpoint(session.model, options.out_dir, tokenizer=tokenizer(), description=description)
    print(f"lm: loss {loss:.3f} a token, {math.exp(loss):.1f} codes to choose from")


if __name__ == "__main__":
    main()
