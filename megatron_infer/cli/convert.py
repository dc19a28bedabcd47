"""`megatron-infer convert`: a torch_dist checkpoint, or another source, as a Hugging Face directory of safetensors."""

from __future__ import annotations

import argparse
import math
from typing import Any

from megatron_infer.cli.loading import note
from megatron_infer.config.layout import DTYPES
from megatron_infer.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="write a checkpoint as safetensors with a Hugging Face config",
        description="Write a model as a Hugging Face directory: config.json, *.safetensors, tokenizer files. No code "
        "of the checkpoint runs. The model is held in this process's memory.",
    )
    parser.add_argument("model", metavar="MODEL", help="torch_dist checkpoint, .gguf file, directory, hub id or alias")
    parser.add_argument("directory", metavar="DIRECTORY", help="new directory to write")
    parser.add_argument(
        "--hf-config",
        metavar="DIR",
        help="of a checkpoint that does not say how its model is built: a Hugging Face directory of the same model",
    )
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of the weights (auto: the checkpoint's)")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB", help="most GiB in one file (5)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_infer.models.loading.hf_export import write_hugging_face
    from megatron_infer.models.loading.sources import open_source

    if not 0 < args.max_shard_gb < math.inf:
        raise ConfigError(f"--max-shard-gb is {args.max_shard_gb:g}, it must be a finite number of GiB above 0")
    note(f"reading {args.model} ...")
    done = write_hugging_face(
        open_source(args.model, hf_config=args.hf_config),
        args.directory,
        dtype=None if args.dtype == "auto" else args.dtype,
        max_shard_bytes=int(args.max_shard_gb * 2**30),
    )
    if done.no_tokenizer is not None:
        note(f"without a tokenizer: {done.no_tokenizer}")
    size = f"{done.num_tensors} tensors, {done.num_bytes / 2**20:,.1f} MiB in {done.num_files} files"
    print(f"{args.directory}: {done.architecture}, {size}")
    return 0
