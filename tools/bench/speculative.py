"""Speculative decoding against one token a step: tokens a second over real prompts, and what a step of drafts costs.

    python tools/bench/speculative.py [--set copy] [--at-once 1] [--rounds 3] [--max-tokens 128] [--json out.json]
    python tools/bench/speculative.py --method draft --draft PATH     or --draft-layers N: the model's own first layers
    python tools/bench/speculative.py --steps              seconds of a step by rows and by tokens of each row

Sets (speculative_NAME.jsonl): "copy" are 24 prompts whose answers repeat them (edits of code, JSON reshaped, quoting
summaries), "chat" are 12 free questions, "json" are 8 that are answered by a schema. Answers are greedy and end where
the model ends them, after --max-tokens at the latest; those of several at once after half as many to so many. The
engines take turns of a few steps, at the same place of the same answers, so that all see the same machine; only their
own steps count. Their tokens must be the same. peers.py measures other engines.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_infer.cli.bench import render_drafts, summarize_drafts
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.llm import LLM, chat_prompt
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source
from megatron_infer.scheduler.draft_depth import Proposal
from megatron_infer.scheduler.drafts import Proposer
from megatron_infer.scheduler.request import Request
from megatron_infer.testing.inspect import inspect

OFF, ON, ORACLE = "off", "drafts", "oracle"
TURN = 8
"""Steps of an engine before it may be another one's turn."""
FULL = 4
"""Requests for each that runs at once, so that as many run for most of the time."""
KNOWN_BY = 36
"""First tokens that tell the prompts of a set apart."""


def read_work(llm: LLM, name: str, args: argparse.Namespace) -> list[tuple[list[int], SamplingParams]]:
    """The set's prompts in the model's chat template, and how each is answered."""
    work = []
    for line in Path(__file__).with_name(f"speculative_{name}.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": args.max_tokens, "detokenize": False}
        params = SamplingParams.from_dict(asked | {"structured": found.get("structured")})
        work.append((chat_prompt(llm.tokenizer, [{"role": "user", "content": found["prompt"]}]), params))
    return work


def of_other_lengths(work: list[tuple[list[int], SamplingParams]], most: int) -> list[tuple[list[int], SamplingParams]]:
    """The same with answers of at most half of `most` to `most` tokens. With equal ones, requests without drafts begin
    and end together, and have their prompts computed in one step."""
    half = most // 2
    return [
        (prompt, replace(params, max_tokens=max(1, most - (most - half) * (37 * number % 64) // 63)))
        for number, (prompt, params) in enumerate(work)
    ]


def make_llm(args: argparse.Namespace, speculative: SpeculativeConfig | None) -> LLM:
    config = InferenceConfig(
        buffer_size_gb=1, max_requests=32, max_tokens=2048, block_size_tokens=16, speculative=speculative
    )
    return LLM(args.model, config=config)


class Player:
    """Runs a list of requests on one engine, a few steps at a time, and counts the seconds of these steps."""

    def __init__(
        self, engine: DynamicInferenceEngine, work: list[tuple[list[int], SamplingParams]], at_once: int
    ) -> None:
        self._engine, self._at_once = engine, at_once
        self._waiting, self._places = list(enumerate(work))[::-1], dict[str, int]()
        self.answers: list[list[int]] = [[] for _ in work]
        self.seconds = 0.0

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._places

    @property
    def num_drawn(self) -> int:
        running = inspect(self._engine).scheduler.running
        return sum(map(len, self.answers)) + sum(request.num_output for request in running)

    def play(self, num_steps: int) -> None:
        begun = time.perf_counter()
        for _ in range(num_steps):
            while self._waiting and len(self._places) < self._at_once:
                place, (prompt, params) = self._waiting.pop()
                self._places[self._engine.add_request(prompt, params, stream="final")] = place
            for output in self._engine.step():
                self.answers[self._places.pop(output.request_id)] = output.outputs[0].token_ids
            if self.is_done:
                break
        self.seconds += time.perf_counter() - begun


def play_together(
    engines: dict[str, DynamicInferenceEngine], work: list[tuple[list[int], SamplingParams]], at_once: int
) -> dict[str, tuple[list[list[int]], float]]:
    """(answers, tokens a second) of each engine, with at most `at_once` requests in flight in each."""
    players = {name: Player(engine, work, at_once) for name, engine in engines.items()}
    while going := [one for one in players.values() if not one.is_done]:
        min(going, key=lambda one: one.num_drawn).play(TURN)
    return {name: (one.answers, sum(map(len, one.answers)) / one.seconds) for name, one in players.items()}


def run(
    engine: DynamicInferenceEngine, work: list[tuple[list[int], SamplingParams]], at_once: int
) -> tuple[list[list[int]], float]:
    """(answers, tokens a second) of one engine by itself."""
    return play_together({ON: engine}, work, at_once)[ON]


class Oracle:
    """What the n-grams propose as far as it is right, which it knows from earlier answers."""

    def __init__(self, proposer: Proposer, sequences: list[list[int]]) -> None:
        longest_last = sorted(sequences, key=len)
        self._proposer, self._sequences = proposer, {tuple(one[:KNOWN_BY]): one for one in longest_last}

    def propose(self, request: Request, most: int) -> Proposal:
        found, length = self._proposer.propose(request, most), len(request.tokens)
        whole = self._sequences[tuple(request.tokens[:KNOWN_BY])][length:]
        right = next((n for n, (a, b) in enumerate(zip(found.tokens, whole, strict=False)) if a != b), len(whole))
        return found._replace(tokens=found.tokens[:right])


def drafting_config(args: argparse.Namespace) -> SpeculativeConfig:
    """That of the engine that drafts."""
    asked: dict[str, Any] = {"method": tuple(args.method.split(",")), "adaptive": args.adaptive}
    if "draft" in asked["method"]:
        asked["draft_model"] = args.draft or first_layers(args.model, args.draft_layers)
    return SpeculativeConfig(**asked, num_speculative_tokens=args.num_speculative_tokens)


def first_layers(name: str, count: int) -> torch.nn.Module:
    """A live model of the first `count` layers of `name` with its final norm and output layer, in bfloat16."""
    source = open_source(name)
    description, whole = source.config(), build_model(source, dtype="bfloat16")
    cut = build_model(
        replace(description, transformer={**description.transformer, "num_layers": count}), dtype="bfloat16"
    )
    weights = whole.state_dict()
    cut.load_state_dict({key: weights[key] for key in cut.state_dict()})
    return cut


def compare(args: argparse.Namespace) -> dict[str, Any]:
    llm = make_llm(args, None)
    engines = {OFF: llm.engine, ON: make_llm(args, drafting_config(args)).engine}
    work = read_work(llm, args.set, args)[: args.num_prompts]
    work *= args.repeat or -(-FULL * args.at_once // len(work))
    if args.at_once > 1:
        work = of_other_lengths(work, args.max_tokens)
    for engine in engines.values():
        run(engine, work[: args.at_once], args.at_once)
    if args.oracle:
        answers, _ = run(engines[OFF], work, args.at_once)
        depth = {"num_speculative_tokens": args.num_speculative_tokens}
        engines[ORACLE] = make_llm(args, SpeculativeConfig(adaptive=False, **depth)).engine
        drafts = inspect(engines[ORACLE]).drafts
        assert drafts is not None
        known = [prompt + answer for (prompt, _), answer in zip(work, answers, strict=True)]
        drafts.proposer = Oracle(drafts.proposer, known)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    before = engines[ON].spec_decode_metrics()
    for _ in range(args.rounds):
        found = play_together(engines, work, args.at_once)
        answers = found[OFF][0]
        assert all(one == answers for one, _ in found.values()), "other tokens with drafts"
        for name, (_, rate) in found.items():
            rates[name].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [on / off for on, off in zip(rates[ON], rates[OFF], strict=True)]
    drafted = summarize_drafts(before, engines[ON].spec_decode_metrics())
    print(render_drafts(drafted))
    for name, values in rates.items():
        shown = " ".join(f"{value:.1f}" for value in values)
        ratio = "" if name == ON else f", drafts are {medians[ON] / medians[name]:.2f}x"
        print(f"{name:22} {medians[name]:7.1f} tokens a second (rounds {shown}){ratio}")
    return {
        "set": args.set,
        "at_once": args.at_once,
        "num_requests": len(work),
        "num_answer_tokens": sum(map(len, answers)),
        "tok_s": rates,
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio_of_oracle": statistics.median(a / b for a, b in zip(rates[ORACLE], rates[OFF], strict=True))
        if args.oracle
        else None,
        **drafted,
    }


class Always:
    """Drafts a fixed number of tokens, right or wrong."""

    count = 0

    def propose(self, request: object, most: int) -> Proposal:
        return Proposal([5] * min(most, self.count))


def step_seconds(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step by rows, and by tokens of each row."""
    table: dict[str, dict[str, float]] = {}
    for rows in (1, 8, 16, 32):
        llm = make_llm(args, SpeculativeConfig(num_speculative_tokens=7, adaptive=False))
        drafts, draw = inspect(llm.engine).drafts, random.Random(0)
        assert drafts is not None
        drafts.proposer = proposer = Always()
        for _ in range(rows):
            prompt = [draw.randrange(100, 2000) for _ in range(100)]
            llm.engine.add_request(prompt, SamplingParams(max_tokens=900, ignore_eos=True, detokenize=False))
        for _ in range(5):
            llm.engine.step()
        times: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: []}
        for _ in range(args.rounds):
            for tokens, taken in times.items():
                proposer.count = tokens - 1
                for _ in range(4):
                    begun = time.perf_counter()
                    llm.engine.step()
                    taken.append(1e3 * (time.perf_counter() - begun))
        table[str(rows)] = {str(tokens): statistics.median(taken) for tokens, taken in times.items()}
        print(f"{rows:3} rows", {tokens: f"{ms:.1f} ms" for tokens, ms in table[str(rows)].items()}, flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--set", choices=["copy", "chat", "json"], default="copy")
    parser.add_argument("--method", default="ngram", help="ngram, grammar, draft, or several with commas")
    parser.add_argument("--draft", metavar="PATH", help="the draft model")
    parser.add_argument(
        "--draft-layers", type=int, default=30, metavar="N", help="without --draft: first layers of MODEL"
    )
    parser.add_argument("--num-prompts", type=int, metavar="N", help="the first of the set; default: all")
    parser.add_argument("--at-once", type=int, default=1, metavar="N")
    parser.add_argument(
        "--repeat", type=int, metavar="N", help=f"times that each prompt is run in a round; default: {FULL} x N in all"
    )
    parser.add_argument("--oracle", action="store_true", help="also draft what n-grams propose as far as it is right")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--num-speculative-tokens", type=int, default=7, metavar="N")
    parser.add_argument("--adaptive", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", action="store_true", help="measure steps instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    report = (step_seconds if args.steps else compare)(args)
    if not args.steps:
        print(json.dumps({**report, "tok_s": {k: [round(x, 1) for x in v] for k, v in report["tok_s"].items()}}))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
