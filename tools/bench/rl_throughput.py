"""Rollouts inside a training loop against TRL's generation with transformers: same weights, prompts, dtype, threads.

    python tools/bench/rl_throughput.py [--dtype float32] [--prompts 8] [--group-size 8] [--max-tokens 256] [--rounds 3]

A round of ours is what a loop does: wake up, draw every group, sleep, take over changed weights; all of it counts. A
round of TRL's is the call that GRPOTrainer 1.16 makes without vLLM: every prompt once for each sample, left-padded, one
`generate` that runs to the longest answer; tokens behind an end of sequence do not count. They take turns. Both have
the same dtype: float32 is what GRPOTrainer loads a model in unless it is told otherwise.
"""

from __future__ import annotations

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is imported

# ruff: noqa: E402
import argparse
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.entrypoints.llm import chat_prompt
from megatron_infer.kernels.threads import apply_cpu_settings
from megatron_infer.memory.device import Device, choose_dtype
from megatron_infer.model_loader.build import build_model
from megatron_infer.model_loader.description_shape import shape_of
from megatron_infer.model_loader.sources import open_source
from megatron_infer.rl.session import RolloutSession

TOPICS = ["the sea", "a bee", "snow", "the moon", "bread", "a river", "gold", "the wind", "salt", "a horse"]


WARM_UP_TOKENS = 16


class Ours:
    """A session whose weights change after every rollout."""

    def __init__(self, session: RolloutSession, prompts: list[list[int]], args: argparse.Namespace) -> None:
        self._session, self._prompts, self._args = session, prompts, args
        self.switch_s: list[float] = []

    def round(self, number: int, max_tokens: int) -> int:
        """-> tokens drawn."""
        args, started = self._args, time.perf_counter()
        params = [
            SamplingParams(n=args.group_size, max_tokens=max_tokens, logprobs=0, seed=number * 1000 + place)
            for place in range(len(self._prompts))
        ]
        with self._session.generating() as roll:
            begun = time.perf_counter()
            groups = roll.generate(self._prompts, params)
            drawn = time.perf_counter()
        with self._session.training():
            pass
        self._session.update_weights()
        self.switch_s.append(time.perf_counter() - started - (drawn - begun))
        return sum(group.num_tokens for group in groups)

    def train(self) -> None:
        """Between rounds: every weight changes, and the engine has to notice."""
        with torch.no_grad():
            for parameter in self._session.model.parameters():
                parameter.mul_(1.0)


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
        self._model, self._eos = model, torch.tensor(eos_ids)
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
    def round(self, number: int, max_tokens: int) -> int:
        torch.manual_seed(number)
        self._config.max_new_tokens = max_tokens
        drawn = self._model.generate(input_ids=self._ids, attention_mask=self._mask, generation_config=self._config)[
            :, self._ids.shape[1] :
        ]
        ended = torch.isin(drawn, self._eos).int().cumsum(1)
        return int(((ended == 0) | ((ended == 1) & torch.isin(drawn, self._eos))).sum())


def load_transformers(path: Path, dtype: torch.dtype) -> Any:
    """The same weights in transformers: a directory, or a .gguf file, which it dequantises."""
    import transformers

    transformers.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path, dtype=dtype) if path.is_dir() else load(path.parent, gguf_file=path.name, dtype=dtype)
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="an alias, a Hugging Face directory, a .gguf file")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=8, help="at most 10 (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256, help="TRL's own default (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device = Device("cpu")
    threads = apply_cpu_settings().num_threads
    source = open_source(args.model)
    plan, dtype, tokenizer = source.config(), choose_dtype(args.dtype, device, trains=True), source.tokenizer()
    name = str(dtype).removeprefix("torch.")
    questions = [f"Tell me something about {topic}." for topic in TOPICS[: args.prompts]]
    prompts = [chat_prompt(tokenizer, [{"role": "user", "content": question}]) for question in questions]
    wanted = {"buffer_size_gb": 0.5, "logprobs_mode": "processed"}
    shape = shape_of(plan, dtype=name)
    config = machine_config(wanted, shape, is_cuda=False, available_bytes=device.available_bytes())
    session = RolloutSession(build_model(source, dtype=dtype), config, tokenizer, eos_ids=plan.eos_ids)
    ours = Ours(session, prompts, args)
    theirs = Theirs(load_transformers(Path(source.path), dtype), prompts, tuple(plan.eos_ids), args)
    rates: dict[str, list[tuple[float, float]]] = {"megatron_infer": [], "transformers, as TRL calls it": []}
    machine = f"{platform.processor() or platform.machine()}, load average {os.getloadavg()[0]:.0f}"
    print(f"{machine}, {threads} threads, {name}; {args.prompts} x {args.group_size}")
    for number in range(args.rounds + 1):  # the first round warms up
        for (side, found), draw in zip(rates.items(), (ours.round, theirs.round), strict=True):
            started, busy = time.perf_counter(), time.process_time()
            tokens = draw(number, args.max_tokens if number else WARM_UP_TOKENS)
            seconds, cpu = time.perf_counter() - started, time.process_time() - busy
            if number:
                found.append((tokens / seconds, tokens / cpu))
                print(f"round {number}  {side:<29} {tokens:6d} tokens {seconds:6.1f} s {cpu:6.1f} CPU s")
        ours.train()
    for place, unit in enumerate(("s", "CPU second (which other load on the machine hardly changes)")):
        first, second = (statistics.median(pair[place] for pair in found) for found in rates.values())
        print(f"median: {first:.1f} against {second:.1f} tokens a {unit}: {first / second:.2f} times")
    switch = statistics.median(ours.switch_s[1:])
    print(f"switch, within ours: {switch * 1e3:.0f} ms a round")


if __name__ == "__main__":
    main()
