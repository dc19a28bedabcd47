"""What weight_dtype=int8 and int4 do to a model's log probabilities and greedy choices, beside what bfloat16 does.

    python tools/bench/weight_dtype_accuracy.py [--model smollm2] [--moved] [--tokens 48] [--samples 4] [--json FILE]

Two kinds of text are scored by engines that differ in one thing: passages of this repository's documentation, and the
model's own answers to questions, drawn at temperature 1 by an int8 engine, as a rollout would. A difference is one of
log probabilities of a given token; `same choice` counts positions whose likeliest token is the same. With --moved all
engines have other weights, which are not those of a 4-bit file: each is moved by up to half a step of its block.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.llm import LLM

ROOT = Path(__file__).parents[2]
PASSAGE = 256
"""Tokens of a passage."""
PAGES = ("rl.md", "server.md", "suspend_resume.md", "metrics.md", "parallel.md", "security.md", "lora.md", "clients.md")
DTYPES = ("float32", "bfloat16")
ENGINES = {
    "float32": ("float32", "auto"),
    "bfloat16": ("bfloat16", "auto"),
    "int8, float32": ("float32", "int8"),
    "int8, bfloat16": ("bfloat16", "int8"),
    "int4, float32": ("float32", "int4"),
    "int4, bfloat16": ("bfloat16", "int4"),
}
"""Name -> (dtype, weight_dtype)."""
DRAWS = "int8, bfloat16"
"""The engine that answers the questions."""
PAIRS = [("float32", "bfloat16"), *((dtype, f"{name}, {dtype}") for name in ("int8", "int4") for dtype in DTYPES)]
BLOCK = 32
Scores = list[tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def move_weights(llm: LLM) -> None:
    generator = torch.Generator().manual_seed(0)
    llm.engine.weights.unpack()
    for weight in llm.engine.model.parameters():
        if weight.ndim == 2:
            blocks = weight.float().unflatten(1, (-1, BLOCK))
            step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
            moved = blocks + step * (torch.rand(blocks.shape, generator=generator) - 0.5)
            weight.copy_(moved.flatten(1))
    llm.engine.refresh_weights()


def load(model: str, name: str, *, moved: bool) -> LLM:
    dtype, weight_dtype = ENGINES[name]
    config = InferenceConfig(
        weight_dtype=weight_dtype, buffer_size_gb=0.25, max_sequence_length=1024, max_tokens=1024, max_requests=32
    )
    llm = LLM(model, dtype=dtype, config=config)
    if moved:
        move_weights(llm)
    return llm


def texts(llm: LLM, tokens: int, samples: int) -> dict[str, list[tuple[list[int], int]]]:
    """Kind -> (token ids, first one that is scored) of each text."""
    passages = []
    for page in PAGES:
        ids = llm.tokenizer.encode((ROOT / "docs" / page).read_text(encoding="utf-8"))
        passages += [(ids[at : at + PASSAGE], 1) for at in (0, PASSAGE)]
    lines = (ROOT / "tools/bench/speculative_chat.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines[:16]]
    outputs = llm.chat(chats, SamplingParams(n=samples, max_tokens=tokens, temperature=1.0, seed=1))
    answers = [
        (out.prompt_token_ids + one.token_ids, len(out.prompt_token_ids)) for out in outputs for one in out.outputs
    ]
    return {"documentation": passages, "own answers": answers}


def score(llm: LLM, found: list[tuple[list[int], int]]) -> Scores:
    """(log probabilities of the given tokens, likeliest tokens) of each text."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    scores = []
    for (ids, first), output in zip(found, llm.generate([ids for ids, _ in found], params), strict=True):
        rows = output.prompt_logprobs[first:]
        given = [row[token].logprob for row, token in zip(rows, ids[first:], strict=True)]
        best = [min(row, key=lambda token, row=row: row[token].rank) for row in rows]
        scores.append((torch.tensor(given), torch.tensor(best)))
    return scores


def compare(one: Scores, other: Scores) -> dict[str, float]:
    a, b = (torch.cat([given for given, _ in scores]) for scores in (one, other))
    same = torch.cat([x == y for (_, x), (_, y) in zip(one, other, strict=True)]).double().mean()
    difference = (a - b).abs()
    return {
        "tokens": len(a),
        "mean": float(difference.mean()),
        "median": float(difference.median()),
        "largest": float(difference.max()),
        "perplexity": float((-a.mean()).exp()),
        "its perplexity": float((-b.mean()).exp()),
        "kl_k3": float(((a - b).exp() - 1 - (a - b)).mean()),
        "same choice": float(same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--moved", action="store_true", help="weights that are not those of a 4-bit file")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--samples", type=int, default=4, help="answers to each of 16 questions")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, list[tuple[list[int], int]]] = {}
    scores: dict[str, dict[str, Scores]] = {}
    for name in (DRAWS, *(name for name in ENGINES if name != DRAWS)):
        llm = load(args.model, name, moved=args.moved)
        found = found or texts(llm, args.tokens, args.samples)
        scores[name] = {kind: score(llm, of_kind) for kind, of_kind in found.items()}
    report: list[dict[str, Any]] = []
    print("| text | tokens | engines | perplexity | mean | median | largest | KL (k3) | same choice |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in found:
        for one, other in PAIRS:
            row = compare(scores[one][kind], scores[other][kind])
            report.append({"text": kind, "engines": [one, other], **row})
            print(
                f"| {kind} | {row['tokens']:,} | {one} and {other} "
                f"| {row['perplexity']:.3f} -> {row['its perplexity']:.3f} "
                f"| {row['mean']:.4f} | {row['median']:.4f} | {row['largest']:.2f} | {row['kl_k3']:.5f} "
                f"| {row['same choice']:.1%} |",
                flush=True,
            )
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
