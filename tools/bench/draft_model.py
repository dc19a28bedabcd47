"""A draft model beside one token a step: tokens a second over real prompts, and what drafting costs.

    python tools/bench/draft_model.py [--layers 30] [--set copy] [--at-once 1] [--rounds 3] [--num-speculative-tokens 4]
    python tools/bench/draft_model.py --draft PATH         another model

The draft is the model's own first layers with its final norm and output layer; all of them: the model itself, whose
drafts are all kept. Answers are greedy. Both engines run in turn, each round starts with the other one; their tokens
must be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from typing import Any

import torch
from speculative import make_llm, read_prompts, run

from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.model_loader.build import build_model
from megatron_infer.model_loader.sources import open_source


def first_layers(name: str, count: int) -> torch.nn.Module:
    """A live model of the first `count` layers of `name`, in bfloat16."""
    source = open_source(name)
    description, whole = source.config(), build_model(source, dtype="bfloat16")
    cut = build_model(
        replace(description, transformer={**description.transformer, "num_layers": count}), dtype="bfloat16"
    )
    weights = whole.state_dict()
    cut.load_state_dict({key: weights[key] for key in cut.state_dict()})
    return cut


def compare(args: argparse.Namespace) -> dict[str, Any]:
    draft = args.draft if args.draft is not None else first_layers(args.model, args.layers)
    drafting = SpeculativeConfig(
        method="draft",
        draft_model=draft,
        num_speculative_tokens=args.num_speculative_tokens,
        adaptive=args.adaptive,
    )
    engines = {"off": make_llm(args, None), "draft": make_llm(args, drafting)}
    prompts = read_prompts(engines["off"], args.set)[: args.num_prompts]
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for llm in engines.values():
        run(llm, prompts[: args.at_once], args)
    for number in range(args.rounds):
        answers = {}
        for name in list(engines) if number % 2 else list(engines)[::-1]:
            answers[name], rate = run(engines[name], prompts, args)
            rates[name].append(round(rate, 1))
        assert answers["off"] == answers["draft"], "other tokens with drafts"
    found = engines["draft"].engine.spec_decode_metrics()
    assert found is not None
    return {
        "draft": args.draft or f"{args.layers} layers",
        "set": args.set,
        "at_once": args.at_once,
        "tok_s": rates,
        "ratio": statistics.median(rates["draft"]) / statistics.median(rates["off"]),
        "acceptance_rate": found.acceptance_rate,
        "mean_tokens_per_step": found.mean_tokens_per_step,
        "num_verifications": found.num_verifications,
        "seconds_drafting": found.seconds_drafting,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", metavar="PATH")
    parser.add_argument("--layers", type=int, default=30, metavar="N")
    parser.add_argument("--set", choices=["copy", "chat"], default="copy")
    parser.add_argument("--num-prompts", type=int, default=6, metavar="N")
    parser.add_argument("--at-once", type=int, default=1, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--num-speculative-tokens", type=int, default=4, metavar="N")
    parser.add_argument("--adaptive", action=argparse.BooleanOptionalAction, default=True)
    print(json.dumps(compare(parser.parse_args())))


if __name__ == "__main__":
    main()
