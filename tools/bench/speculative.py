"""Speculative decoding beside one token a step: tokens a second over real prompts, and what a step of drafts costs.

    python tools/bench/speculative.py [--set copy] [--at-once 1] [--rounds 3] [--max-tokens 128] [--json out.json]
    python tools/bench/speculative.py --steps              seconds of a step by rows and by tokens of each row

Sets (speculative_NAME.jsonl): "copy" are 24 prompts whose answers repeat them (edits of code, JSON reshaped, quoting
summaries), "chat" are 12 free questions, "json" are 8 that are answered by a schema. Answers are greedy and end where
the model ends them. The engines run in turn, each round starts with another one; their tokens must be the same.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.entrypoints.llm import LLM, chat_prompt
from megatron_infer.scheduler.draft_depth import Proposal
from megatron_infer.scheduler.drafts import Proposer
from megatron_infer.scheduler.request import Request
from megatron_infer.testing.inspect import inspect

OFF, ON, ORACLE = "off", "drafts", "oracle"
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


def make_llm(args: argparse.Namespace, speculative: SpeculativeConfig | None) -> LLM:
    config = InferenceConfig(
        buffer_size_gb=1, max_requests=32, max_tokens=2048, block_size_tokens=16, speculative=speculative
    )
    return LLM(args.model, config=config)


def run(
    engine: DynamicInferenceEngine, work: list[tuple[list[int], SamplingParams]], at_once: int
) -> tuple[list[list[int]], float]:
    """(answers, tokens a second) with at most `at_once` requests in flight."""
    waiting, places = list(enumerate(work))[::-1], {}
    answers: list[list[int]] = [[] for _ in work]
    begun = time.perf_counter()
    while waiting or places:
        while waiting and len(places) < at_once:
            place, (prompt, params) = waiting.pop()
            places[engine.add_request(prompt, params, stream="final")] = place
        for output in engine.step():
            answers[places.pop(output.request_id)] = output.outputs[0].token_ids
    return answers, sum(map(len, answers)) / (time.perf_counter() - begun)


class Oracle:
    """What the n-grams propose as far as it is right, which it knows from earlier answers."""

    def __init__(self, proposer: Proposer, sequences: list[list[int]]) -> None:
        self._proposer, self._sequences = proposer, {tuple(one[:KNOWN_BY]): one for one in sequences}

    def propose(self, request: Request, most: int) -> Proposal:
        found, length = self._proposer.propose(request, most), len(request.tokens)
        whole = self._sequences[tuple(request.tokens[:KNOWN_BY])][length:]
        right = next((n for n, (a, b) in enumerate(zip(found.tokens, whole, strict=False)) if a != b), len(whole))
        return found._replace(tokens=found.tokens[:right])


def compare(args: argparse.Namespace) -> dict[str, Any]:
    depth = {"num_speculative_tokens": args.num_speculative_tokens}
    ngrams = {"ngram_min": args.ngram_min, "ngram_max": args.ngram_max}
    method = tuple(args.method.split(","))
    llm = make_llm(args, None)
    engines = {
        OFF: llm.engine,
        ON: make_llm(args, SpeculativeConfig(method=method, adaptive=args.adaptive, **depth, **ngrams)).engine,
    }
    work = read_work(llm, args.set, args)
    work *= args.repeat or -(-FULL * args.at_once // len(work))
    for engine in engines.values():
        run(engine, work[: args.at_once], args.at_once)
    if args.oracle:
        answers, _ = run(engines[OFF], work, args.at_once)
        engines[ORACLE] = make_llm(args, SpeculativeConfig(adaptive=False, **depth, **ngrams)).engine
        drafts = inspect(engines[ORACLE]).drafts
        assert drafts is not None
        known = [prompt + answer for (prompt, _), answer in zip(work, answers, strict=True)]
        drafts.proposer = Oracle(drafts.proposer, known)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for number in range(args.rounds):
        answers_of = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            answers_of[name], rate = run(engines[name], work, args.at_once)
            rates[name].append(rate)
        assert all(answers == answers_of[OFF] for answers in answers_of.values()), "other tokens with drafts"
    found = engines[ON].spec_decode_metrics()
    assert found is not None
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "set": args.set,
        "at_once": args.at_once,
        "num_requests": len(work),
        "num_answer_tokens": sum(map(len, answers_of[OFF])),
        "tok_s": rates,
        "ratio": medians[ON] / medians[OFF],
        "ratio_of_oracle": medians[ORACLE] / medians[OFF] if args.oracle else None,
        "acceptance_rate": found.acceptance_rate,
        "mean_tokens_per_step": found.mean_tokens_per_step,
        "accepted_per_position": found.accepted_per_position,
        "drafted_per_position": found.drafted_per_position,
        "seconds_drafting": found.seconds_drafting,
    }


class Always:
    """Drafts a fixed number of tokens, right or wrong."""

    count = 0

    def propose(self, request: object, most: int) -> Proposal:
        return Proposal([5] * min(most, self.count))


def step_seconds(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step by rows, and by tokens of each row."""
    table: dict[str, dict[str, float]] = {}
    for rows in (1, 8, 32):
        llm = make_llm(args, SpeculativeConfig(num_speculative_tokens=7, adaptive=False))
        drafts, draw = inspect(llm.engine).drafts, random.Random(0)
        assert drafts is not None
        drafts.proposer = proposer = Always()
        for _ in range(rows):
            prompt = [draw.randrange(100, 20_000) for _ in range(100)]
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
    parser.add_argument("--method", default="ngram", help="ngram, grammar, or both with a comma")
    parser.add_argument("--at-once", type=int, default=1, metavar="N")
    parser.add_argument(
        "--repeat", type=int, metavar="N", help=f"times that each prompt is run in a round; default: {FULL} x N in all"
    )
    parser.add_argument("--oracle", action="store_true", help="also draft what n-grams propose as far as it is right")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--num-speculative-tokens", type=int, default=7, metavar="N")
    parser.add_argument("--ngram-min", type=int, default=2, metavar="N")
    parser.add_argument("--ngram-max", type=int, default=4, metavar="N")
    parser.add_argument("--adaptive", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", action="store_true", help="measure steps instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    report = step_seconds(args) if args.steps else compare(args)
    if not args.steps:
        print(json.dumps({**report, "tok_s": {k: [round(x, 1) for x in v] for k, v in report["tok_s"].items()}}))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
