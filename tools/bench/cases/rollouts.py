"""Rollouts: exact mode in a GRPO step, the mismatch meter, TRL's generation, sample files, memory of gradients."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cases.case import Case, Clock, Done, Measure, Variant
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.llm import chat_prompt
from megatron_infer.kernels.threads import apply_cpu_settings
from megatron_infer.memory.device import Device, choose_dtype
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.sources import open_source
from megatron_infer.outputs.token_support import TokenSupport
from megatron_infer.rl import sample_codec, sample_file
from megatron_infer.rl.mismatch_figures import LIMITS
from megatron_infer.rl.mismatch_meter import MismatchMeter
from megatron_infer.rl.samples import RolloutGroup, RolloutSample
from megatron_infer.rl.session import RolloutSession
from megatron_infer.scheduler.request import VersionSpan
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt

TOPICS = ["the sea", "a bee", "snow", "the moon", "bread", "a river", "gold", "the wind", "salt", "a horse"]


class Setting:
    """A model by name, and prompts about topics in its chat template."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._device = Device("cpu")
        print(f"{apply_cpu_settings().num_threads} threads")
        self.source = open_source(args.model)
        self.plan = self.source.config()
        self.dtype = choose_dtype(args.dtype, self._device, trains=True)
        self._tokenizer = self.source.tokenizer()
        questions = [f"Tell me something about {topic}." for topic in TOPICS[: args.prompts]]
        self.prompts = [chat_prompt(self._tokenizer, [{"role": "user", "content": one}]) for one in questions]

    def session(self, wanted: dict[str, Any], **options: Any) -> RolloutSession:
        shape = shape_of(self.plan, dtype=str(self.dtype).removeprefix("torch."))
        config = machine_config(wanted, shape, is_cuda=False, available_bytes=self._device.available_bytes())
        model = build_model(self.source, dtype=self.dtype)
        return RolloutSession(model, config, self._tokenizer, eos_ids=self.plan.eos_ids, **options)


# ---------------------------------------------------------------------- GRPO


class GrpoStep:
    """The parts of a step of examples/grpo.py, with exact mode and without, on the same answers."""

    def __init__(self, task: str, prompts: int) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
        import grpo
        from grpo_options import options

        self.args = options(None, ["--lr", "0", "--task", task, "--prompts-per-step", str(prompts)])
        self._grpo = grpo
        self._sides: dict[str, Any] = {}
        for mode in ("normal", "exact"):
            self.args.exact = mode == "exact"
            self._sides[mode] = grpo.set_up(self.args, first_step=0)
        self._groups: list[Any] = []
        self._num_rounds = 0

    def generate(self, clock: Clock, mode: str) -> Done:
        import grpo_task

        round_, count = self._num_rounds // len(self._sides), self.args.prompts_per_step
        self._num_rounds += 1
        prompts = grpo_task.batch(self.args.task, round_, count, 0)
        with self._sides[mode][0].generating() as roll, clock:
            self._groups = roll.generate(prompts, self._grpo.sampling(self.args, round_, count))
        return Done(1)

    def train(self, clock: Clock, mode: str) -> Done:
        """On the groups that were drawn last; every group is trained on."""
        for group in self._groups:
            for number, sample in enumerate(group.samples):
                sample.reward = float(number % 2)
        session, trainer, reference, _ = self._sides[mode]
        with session.training(), clock:
            self._grpo.train_on(session, trainer, self._groups, self.args, reference)
        session.update_weights()
        return Done(1)


@contextlib.contextmanager
def grpo_exact(args: argparse.Namespace) -> Iterator[list[Measure]]:
    step = GrpoStep(args.task, args.prompts)

    def variants(part: Callable[[Clock, str], Done]) -> dict[str, Variant]:
        return {mode: partial(part, mode=mode) for mode in ("normal", "exact")}

    size = f"{step.args.prompts_per_step} x {step.args.group_size} answers"
    print(f"{torch.get_num_threads()} threads")
    yield [
        Measure(f"generate, {size}", "step", variants(step.generate)),
        Measure(f"train, {size}", "step", variants(step.train)),
    ]


# ---------------------------------------------------------------------- mismatch meter


class MeteredRounds:
    """Rounds of a loop without its backward pass: draw every group, score every sample."""

    def __init__(self, session: RolloutSession, prompts: list[list[int]], args: argparse.Namespace) -> None:
        self.session = session
        self._prompts = prompts
        self._args = args
        self._num_rounds = 0
        self.groups: list[RolloutGroup] = []

    def round(self, clock: Clock) -> Done:
        args = self._args
        params = SamplingParams(n=args.group_size, max_tokens=args.max_tokens, seed=self._num_rounds)
        self._num_rounds += 1
        with clock:
            with self.session.generating() as roll:
                self.groups = roll.generate(self._prompts, params)
            with self.session.training():
                samples = [sample for group in self.groups for sample in group.samples]
                starts = [len(sample.prompt_ids) for sample in samples]
                self.session.score([sample.ids for sample in samples], start=starts)
        return Done(1)


def largest_figures(
    session: RolloutSession, groups: list[RolloutGroup], size: int
) -> tuple[int, int, dict[str, float]]:
    """Windows of `size` samples -> their number, the number of alarms, and the largest of each figure with a limit."""
    meter = MismatchMeter(session, share=1.0, attribute=False)
    singles = [replace(group, samples=[sample]) for group in groups for sample in group.samples]
    windows = [singles[start : start + size] for start in range(0, len(singles), size)]
    reports = [report for window in windows if (report := meter.observe(window)) is not None]
    worst = {name: max(float(getattr(report.figures, name)) for report in reports) for name in LIMITS}
    return len(reports), meter.num_alarms, worst


@contextlib.contextmanager
def meter(args: argparse.Namespace) -> Iterator[list[Measure]]:
    setting = Setting(args)
    sides = {
        name: MeteredRounds(setting.session({"buffer_size_gb": 0.5}, meter=kind), setting.prompts, args)
        for name, kind in (("without a meter", None), ("with the meter", "auto"))
    }
    size = f"{args.prompts} x {args.group_size} x {args.max_tokens} tokens, {setting.dtype}"
    yield [Measure(size, "round", {name: side.round for name, side in sides.items()})]
    metered = sides["with the meter"]
    found = metered.session.meter
    assert found is not None
    print(f"the meter itself: {found.num_tokens} tokens in {found.num_windows} windows of ", end="")
    print(f"{args.rounds + 1} rounds, {found.seconds:.2f} s in all")
    for size_of_window in (1, 4):
        count, alarms, worst = largest_figures(metered.session, metered.groups, size_of_window)
        shown = ", ".join(f"{name} {value:.3g}" for name, value in worst.items())
        print(f"{count} windows of {size_of_window} samples: {alarms} alarms; at most {shown}")


# ---------------------------------------------------------------------- TRL

WARM_UP_TOKENS = 16


class Ours:
    """A session whose weights change after every rollout."""

    def __init__(self, session: RolloutSession, prompts: list[list[int]], args: argparse.Namespace) -> None:
        self._session = session
        self._prompts = prompts
        self._args = args
        self._num_rounds = 0

    def round(self, clock: Clock) -> Done:
        """Wake up, draw every group, suspend, take over changed weights; all of it counts."""
        args, number = self._args, self._num_rounds
        self._num_rounds += 1
        params = [
            SamplingParams(
                n=args.group_size,
                max_tokens=args.max_tokens if number else WARM_UP_TOKENS,
                logprobs=0,
                seed=number * 1000 + place,
            )
            for place in range(len(self._prompts))
        ]
        drawing = Clock()
        with clock:
            with self._session.generating() as roll, drawing:
                groups = roll.generate(self._prompts, params)
            with self._session.training():
                pass
            self._session.update_weights()
        with torch.no_grad():  # as after a step of training: the engine has to notice
            for parameter in self._session.model.parameters():
                parameter.mul_(1.0)
        count = sum(group.num_tokens for group in groups)
        return Done(count, {"tokens": count, "ms of switching": 1e3 * (clock.seconds - drawing.seconds)})


class Theirs:
    """GRPOTrainer's generation config and call."""

    def __init__(
        self, model: Any, prompts: list[list[int]], eos_ids: tuple[int, ...], args: argparse.Namespace
    ) -> None:
        from transformers import GenerationConfig

        rows = [prompt for prompt in prompts for _ in range(args.group_size)]
        longest = max(map(len, rows))
        self._ids = torch.tensor([[eos_ids[0]] * (longest - len(row)) + row for row in rows])
        self._mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        self._model = model
        self._eos = torch.tensor(eos_ids)
        self._max_tokens = args.max_tokens
        self._num_rounds = 0
        self._config = GenerationConfig(
            do_sample=True,
            pad_token_id=eos_ids[0],
            eos_token_id=list(eos_ids),
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            disable_compile=True,
        )

    @torch.no_grad()
    def round(self, clock: Clock) -> Done:
        torch.manual_seed(self._num_rounds)
        self._config.max_new_tokens = self._max_tokens if self._num_rounds else WARM_UP_TOKENS
        self._num_rounds += 1
        with clock:
            drawn = self._model.generate(
                input_ids=self._ids, attention_mask=self._mask, generation_config=self._config
            )[:, self._ids.shape[1] :]
        ended = torch.isin(drawn, self._eos).int().cumsum(1)
        return Done(int(((ended == 0) | ((ended == 1) & torch.isin(drawn, self._eos))).sum()))


def load_transformers(path: Path, dtype: torch.dtype) -> Any:
    """The same weights in transformers: a directory, or a .gguf file, which it dequantises."""
    import transformers

    transformers.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path, dtype=dtype) if path.is_dir() else load(path.parent, gguf_file=path.name, dtype=dtype)
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    return model.eval()


@contextlib.contextmanager
def trl(args: argparse.Namespace) -> Iterator[list[Measure]]:
    setting = Setting(args)
    session = setting.session({"buffer_size_gb": 0.5, "logprobs_mode": "processed"})
    model = load_transformers(Path(setting.source.path), setting.dtype)
    variants: dict[str, Variant] = {
        "megatron_infer": Ours(session, setting.prompts, args).round,
        "transformers, as TRL calls it": Theirs(model, setting.prompts, tuple(setting.plan.eos_ids), args).round,
    }
    yield [Measure(f"{args.prompts} prompts x {args.group_size} samples, {setting.dtype}", "token", variants)]


# ---------------------------------------------------------------------- sample files

FILE_VOCAB, FILE_PROMPT = 50_000, 256


def make_groups(tokens: int, layers: int, top_k: int) -> list[RolloutGroup]:
    rng = np.random.default_rng(0)
    groups = []
    for index in range(8):
        prompt = rng.integers(0, FILE_VOCAB, FILE_PROMPT).tolist()
        samples = []
        for _ in range(8):
            rows = [np.sort(rng.integers(0, FILE_VOCAB, rng.integers(1, 40))).astype(np.int32) for _ in range(tokens)]
            samples.append(
                RolloutSample(
                    prompt_ids=prompt,
                    token_ids=rng.integers(0, FILE_VOCAB, tokens).tolist(),
                    text="word " * tokens,
                    logprobs=(-rng.random(tokens, dtype=np.float32)).tolist(),
                    raw_logprobs=(-rng.random(tokens, dtype=np.float32)).tolist(),
                    spans=[VersionSpan(0, 3, 3, 3)],
                    loss_mask=[1] * tokens,
                    support=TokenSupport.of_rows(FILE_VOCAB, rows),
                    routing=rng.integers(0, 64, (FILE_PROMPT + tokens - 1, layers, top_k)).astype(np.uint8),
                    reward=1.0,
                )
            )
        groups.append(RolloutGroup(group_id=f"rollout/{index}", prompt_ids=prompt, samples=samples))
    return groups


def as_json(groups: list[RolloutGroup]) -> bytes:
    def plain(sample: RolloutSample) -> dict[str, Any]:
        assert sample.support is not None and sample.routing is not None
        return {
            "token_ids": sample.token_ids,
            "text": sample.text,
            "logprobs": sample.logprobs,
            "raw_logprobs": sample.raw_logprobs,
            "spans": sample.spans,
            "loss_mask": sample.loss_mask,
            "support": [row.tolist() for row in sample.support.rows()],
            "routing": sample.routing.tolist(),
            "reward": sample.reward,
        }

    return json.dumps([[group.prompt_ids, [plain(sample) for sample in group.samples]] for group in groups]).encode()


def limit_bytes(groups: list[RolloutGroup]) -> int:
    samples = [sample for group in groups for sample in group.samples]
    total = sum(4 * len(group.prompt_ids) for group in groups)
    for sample in samples:
        assert sample.support is not None and sample.routing is not None
        length = len(sample.token_ids)
        total += 12 * length + length // 8 + 4 * length + sample.support.ids.nbytes + sample.routing.nbytes
    return total


def coded(clock: Clock, work: Callable[[], object], num_samples: int) -> Done:
    with clock:
        work()
    return Done(num_samples)


@contextlib.contextmanager
def sample_files(args: argparse.Namespace) -> Iterator[list[Measure]]:
    groups = make_groups(args.tokens, args.layers, args.top_k)
    samples = [sample for group in groups for sample in group.samples]
    whole, limit, text = sample_file.encode(groups), limit_bytes(groups), as_json(groups)
    messages = [sample_codec.encode_sample(sample) for sample in samples]
    print(f"{len(samples)} samples of {args.tokens} tokens; the arrays' own bytes: {limit / 1e6:.1f} MB")
    for name, size in (("file", len(whole)), ("msgpack", sum(map(len, messages))), ("JSON", len(text))):
        print(f"{name:8} {size / 1e6:8.1f} MB  {size / limit:5.2f}x")
    writes: dict[str, Callable[[], object]] = {
        "file": lambda: sample_file.encode(groups),
        "msgpack": lambda: [sample_codec.encode_sample(sample) for sample in samples],
        "JSON": lambda: as_json(groups),
    }
    reads: dict[str, Callable[[], object]] = {
        "file": lambda: sample_file.decode(whole),
        "msgpack": lambda: [sample_codec.decode_sample(message) for message in messages],
        "JSON": lambda: json.loads(text),
    }

    def variants(works: dict[str, Callable[[], object]]) -> dict[str, Variant]:
        return {name: partial(coded, work=work, num_samples=1) for name, work in works.items()}

    yield [Measure("write", "rollout", variants(writes)), Measure("read", "rollout", variants(reads))]


# ---------------------------------------------------------------------- memory of gradients


def peak_bytes(clock: Clock, run: Callable[[], Any]) -> int:
    """The most bytes that are allocated at once during `run`, beyond those before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile, clock:
        run()
    live = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def megatron_step(model: Any, batches: list[torch.Tensor]) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(given: Iterator[torch.Tensor], module: Any) -> tuple[torch.Tensor, Any]:
        ids = next(given)
        positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
        losses = module(ids, positions, None, labels=ids.roll(-1, 1))
        return losses, lambda out: (out[:, :-1].mean(), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=batches[0].shape[1],
        micro_batch_size=len(batches[0]),
        forward_only=False,
    )


def gradients(clock: Clock, ddp: Any, run: Callable[[], Any]) -> Done:
    """The peak of one step of training, beyond weights and gradient buffers."""
    ddp.zero_grad_buffer()
    run()  # buffers that are allocated once
    ddp.zero_grad_buffer()
    peak = peak_bytes(clock, run)
    norm = torch.cat([parameter.main_grad.flatten() for parameter in ddp.parameters()]).norm()
    return Done(1, {"peak MiB": peak / 2**20, "gradient norm": float(norm)})


@contextlib.contextmanager
def score_memory(args: argparse.Namespace) -> Iterator[list[Measure]]:
    torch.set_num_threads(1)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    batches = [
        torch.randint(0, args.vocab, (args.rows, args.length), generator=torch.Generator().manual_seed(seed))
        for seed in range(args.micro_batches)
    ]
    sequences = [row.tolist() for batch in batches for row in batch]
    with cpu_shim(4):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        model = tiny_gpt(
            num_layers=args.layers,
            hidden_size=args.hidden,
            ffn_hidden_size=3 * args.hidden,
            vocab_size=args.vocab,
            max_sequence_length=args.length,
            **(recompute if args.recompute else {}),
        )
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        ddp.train()
        session = RolloutSession(ddp, InferenceConfig(buffer_size_gb=0.05, max_sequence_length=args.length))
        num_tokens = len(sequences) * (args.length - 1)
        micro_batch_tokens = args.rows * args.length

        def scored() -> None:
            session.score_and_backward(
                sequences,
                lambda scores, _: -sum(score.sum() for score in scores) / num_tokens,
                micro_batch_tokens=micro_batch_tokens,
            )

        def all_at_once() -> None:
            scores = session.score(sequences, grad=True, micro_batch_tokens=micro_batch_tokens)
            (-torch.cat(scores).mean()).backward()

        runs: dict[str, Callable[[], Any]] = {
            "Megatron's own step": lambda: megatron_step(ddp, batches),
            "session.score_and_backward": scored,
            "session.score(grad=True), one backward": all_at_once,
        }
        variants: dict[str, Variant] = {name: partial(gradients, ddp=ddp, run=run) for name, run in runs.items()}
        size = f"{args.micro_batches} micro-batches of {args.rows} x {args.length} tokens"
        with session.training():
            yield [Measure(f"{args.layers} layers of {args.hidden}, vocabulary {args.vocab}, {size}", "step", variants)]


CASES = {
    "grpo-exact": Case(
        about="A GRPO step of examples/grpo.py with exact mode and without: rollouts and update.\n\n"
        "Every group is trained on, at learning rate 0: both have the same weights and train on the same answers.",
        prepare=grpo_exact,
        options={"task": "facts", "prompts": 8},
    ),
    "meter": Case(
        about="A session's mismatch meter: CPU time of a round, and how near its figures come to an alarm.\n\n"
        "A round draws every group and scores every sample. After the rounds, all samples of the last one in windows\n"
        "of 1 and of 4 samples: the largest figures.",
        prepare=meter,
        options={"model": "smollm2", "dtype": "auto", "prompts": 8, "group_size": 8, "max_tokens": 64},
    ),
    "trl": Case(
        about="Rollouts of a session, and TRL's generation with transformers, on the same weights.\n\n"
        "A round here wakes the engine up, draws every group, suspends and takes over changed weights. A round of\n"
        "TRL's is the call that GRPOTrainer 1.16 makes without vLLM: every prompt once for each sample, left-padded,\n"
        "one `generate` to the longest answer. Tokens after an end of sequence do not count.",
        prepare=trl,
        options={"model": "smollm2", "dtype": "auto", "prompts": 8, "group_size": 8, "max_tokens": 256},
    ),
    "sample-file": Case(
        about="A rollout as a sample file, as msgpack samples and as JSON: size, writing, reading.\n\n"
        "64 samples in 8 groups, with raw and processed log probabilities, a top-p support of 1 to 40 ids a token and\n"
        "the experts of every position. The arrays' own bytes: 4 a token id, 8 for two log probabilities, 1/8 for the\n"
        "mask, 4 a support word and 4 a count, 1 an expert.",
        prepare=sample_files,
        options={"tokens": 512, "layers": 24, "top_k": 8},
    ),
    "score-memory": Case(
        about="Peak memory of a session's gradients and of Megatron's own training step.\n\n"
        "All compute the mean negative log probability of the same sequences on the same model, in megatron-core's\n"
        "DDP, in float32. The peak is of bytes of torch's CPU allocator, beyond weights and gradient buffers.\n"
        "Times include the profiler's.",
        prepare=score_memory,
        rounds=1,
        warms_up=False,
        options={
            "layers": 8,
            "hidden": 256,
            "vocab": 16384,
            "length": 256,
            "rows": 4,
            "micro_batches": 4,
            "recompute": False,
        },
    ),
}
