"""Size, write time and read time of a rollout as a sample file, as msgpack samples and as JSON.

    python tools/bench/sample_file.py [--tokens 512] [--layers 24] [--top-k 8]

64 samples in 8 groups, with raw and processed log probabilities, a top-p support of 1 to 40 ids a token and the experts
of every position. The limit printed is the arrays' own bytes: 4 a token id, 8 for two log probabilities, 1/8 for the
mask, 4 a support word and 4 a count, 1 an expert.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_infer.outputs.token_support import TokenSupport
from megatron_infer.rl import sample_codec, sample_file
from megatron_infer.rl.samples import RolloutGroup, RolloutSample
from megatron_infer.scheduler.request import VersionSpan

VOCAB, PROMPT = 50_000, 256


def make_groups(tokens: int, layers: int, top_k: int) -> list[RolloutGroup]:
    rng = np.random.default_rng(0)
    groups = []
    for index in range(8):
        prompt = rng.integers(0, VOCAB, PROMPT).tolist()
        samples = []
        for _ in range(8):
            rows = [np.sort(rng.integers(0, VOCAB, rng.integers(1, 40))).astype(np.int32) for _ in range(tokens)]
            samples.append(
                RolloutSample(
                    prompt_ids=prompt,
                    token_ids=rng.integers(0, VOCAB, tokens).tolist(),
                    text="word " * tokens,
                    logprobs=(-rng.random(tokens, dtype=np.float32)).tolist(),
                    raw_logprobs=(-rng.random(tokens, dtype=np.float32)).tolist(),
                    spans=[VersionSpan(0, 3, 3, 3)],
                    loss_mask=[1] * tokens,
                    support=TokenSupport.of_rows(VOCAB, rows),
                    routing=rng.integers(0, 64, (PROMPT + tokens - 1, layers, top_k)).astype(np.uint8),
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


def best(work: Callable[[], Any], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="of each answer (512)")
    parser.add_argument("--layers", type=int, default=24, help="mixture-of-experts layers (24)")
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token (8)")
    options = parser.parse_args()
    groups = make_groups(options.tokens, options.layers, options.top_k)
    samples = [sample for group in groups for sample in group.samples]
    whole, limit = sample_file.encode(groups), limit_bytes(groups)
    messages = [sample_codec.encode_sample(sample) for sample in samples]
    text = as_json(groups)
    print(f"{len(samples)} samples of {options.tokens} tokens; the arrays' own bytes: {limit / 1e6:.1f} MB")
    for name, size, write, read in (
        ("file", len(whole), lambda: sample_file.encode(groups), lambda: sample_file.decode(whole)),
        (
            "msgpack",
            sum(map(len, messages)),
            lambda: [sample_codec.encode_sample(sample) for sample in samples],
            lambda: [sample_codec.decode_sample(message) for message in messages],
        ),
        ("JSON", len(text), lambda: as_json(groups), lambda: json.loads(text)),
    ):
        print(
            f"{name:8} {size / 1e6:8.1f} MB  {size / limit:5.2f}x   write {best(write) * 1e3:7.0f} ms   "
            f"read {best(read) * 1e3:7.0f} ms"
        )


if __name__ == "__main__":
    main()
