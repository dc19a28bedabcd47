"""What structured output costs a step: matching, masks and their application for so many rows, beside the forward.

    python tools/bench/structured.py [--rows 32] [--steps 40] [--model smollm2] [--json out.json]

Rows walk through a language by tokens drawn evenly from what is allowed, each with its own schema instance. Times are
the least and the median of the steps; the forward is a decoding step of the model with as many rows, structured or not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.entrypoints.llm import LLM
from megatron_infer.sampling.grammar_matchers import Grammars
from megatron_infer.sampling.token_masks import forbid
from megatron_infer.scheduler.request import Request

ITEM = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "price": {"type": "number"},
        "kind": {"enum": ["book", "film", "game"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["title", "price", "kind", "tags"],
    "additionalProperties": False,
}
LANGUAGES: dict[str, dict[str, Any]] = {
    "json schema": {"json_schema": {"type": "array", "items": ITEM, "minItems": 50}},
    "any object": {"json_object": True},
    "regex": {"regex": "([a-zA-Z ]{3,40}, [0-9]{2,5}; )+\\."},
}


def walk(tokenizer: Any, vocab: int, language: dict[str, Any], rows: int, steps: int) -> dict[str, float]:
    """Milliseconds a step."""
    grammars, structured = Grammars(tokenizer, vocab), StructuredOutput(**language)
    begun = time.perf_counter()
    grammars.cache.check(StructuredOutput(regex="x"))
    vocabulary_s = time.perf_counter() - begun
    begun = time.perf_counter()
    grammars.cache.check(structured)
    compile_ms = 1e3 * (time.perf_counter() - begun)
    params = SamplingParams(structured=structured, max_tokens=None)
    requests = [
        Request(id=str(row), tokens=[1], prompt_len=1, params=params, max_total=1 << 20, seed=row)
        for row in range(rows)
    ]
    logits, rng = torch.randn(rows, vocab), random.Random(0)
    masks_ms, apply_ms, advance_ms = [], [], []
    for _ in range(steps):
        begun = time.perf_counter()
        masks = grammars.masks(requests)
        masks_ms.append(1e3 * (time.perf_counter() - begun))
        assert masks is not None
        begun = time.perf_counter()
        forbid(logits.clone(), masks.bits_GW, None)
        apply_ms.append(1e3 * (time.perf_counter() - begun))
        for row, request in enumerate(requests):
            bits = np.flatnonzero(np.unpackbits(masks.bits_GW[row].view(np.uint8), bitorder="little"))
            request.tokens.append(int(bits[rng.randrange(len(bits))]))
        begun = time.perf_counter()
        complete = [grammars.advance(request) for request in requests]
        advance_ms.append(1e3 * (time.perf_counter() - begun))
        for row, done in enumerate(complete):
            if done:
                requests[row] = Request(
                    id=f"{row} again", tokens=[1], prompt_len=1, params=params, max_total=1 << 20, seed=row
                )
    return {
        "vocabulary_s": vocabulary_s,
        "compile_ms": compile_ms,
        "masks_ms": statistics.median(masks_ms),
        "masks_most_ms": max(masks_ms),
        "advance_ms": statistics.median(advance_ms),
        "apply_ms": statistics.median(apply_ms),
    }


def model_steps(llm: LLM, rows: int, steps: int) -> dict[str, float]:
    """Milliseconds of decoding steps of free rows, of structured ones, and of free ones again."""
    prompts = [llm.tokenizer.encode(f"Item {row}: ") for row in range(rows)]  # type: ignore[union-attr]
    language = StructuredOutput(**LANGUAGES["json schema"])
    found = {}
    for name, structured in (("free", None), ("structured", language), ("free again", None)):
        params = SamplingParams(structured=structured, max_tokens=steps, temperature=1.0, seed=1, ignore_eos=True)
        for prompt in prompts:
            llm.engine.add_request(prompt, params, stream="final")
        times = []
        while llm.engine.has_unfinished():
            begun = time.perf_counter()
            llm.engine.step()
            times.append(1e3 * (time.perf_counter() - begun))
        found[name] = statistics.median(times[2:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm = LLM(args.model, threads=args.threads, config={"max_requests": max(args.rows, 8), "max_sequence_length": 512})
    vocab = llm.engine.shape.vocab_size
    result: dict[str, Any] = {"rows": args.rows, "vocab": vocab, "threads": args.threads}
    for name, language in LANGUAGES.items():
        result[name] = walk(llm.tokenizer, vocab, language, args.rows, args.steps)
        print(name, {key: round(value, 2) for key, value in result[name].items()}, flush=True)
    result["steps_ms"] = model_steps(llm, args.rows, args.steps)
    print("step", {key: round(value, 1) for key, value in result["steps_ms"].items()})
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
