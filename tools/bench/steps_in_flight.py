"""Steps in flight on a device whose answers come late: tokens/s at max_steps_in_flight 1, 2, 4 and with overlap.

    python tools/bench/steps_in_flight.py [--device-ms 4] [--late-ms 0,2,8] [--requests 16] [--tokens 64] [--json FILE]

The device is simulated: a tiny model is computed by the host when its step is launched, which stands for the host's
work; a clock stands for the device's. A step takes --device-ms there, after the step before it, and the host can read
its tokens --late-ms after it has ended. Tokens are the same in every case.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.memory.device import Device, HostRead
from megatron_infer.testing.tiny import tiny_gpt

CASES = {
    "1": {"max_steps_in_flight": 1},
    "overlap": {"overlap": True},
    "2": {"max_steps_in_flight": 2},
    "4": {"max_steps_in_flight": 4},
}


class LateDevice(Device):
    """The CPU, with a clock that says when a step's tokens can be read."""

    def __init__(self, device_s: float, late_s: float) -> None:
        super().__init__("cpu")
        self._device_s, self._late_s, self._free_at = device_s, late_s, 0.0

    def begin_read(self, *tensors: Tensor) -> HostRead:
        self._free_at = max(time.perf_counter(), self._free_at) + self._device_s
        return LateRead(self, tensors, self._free_at + self._late_s)


class LateRead(HostRead):
    def __init__(self, device: Device, tensors: tuple[Tensor, ...], at: float) -> None:
        super().__init__(device, tensors)
        self._at = at

    def is_done(self) -> bool:
        return time.perf_counter() >= self._at

    def wait(self) -> tuple[Tensor, ...]:
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return super().wait()


def measure(
    case: dict[str, object], device: Device, requests: int, tokens: int
) -> tuple[float, float, list[list[int]]]:
    """-> (tokens per second, the host's CPU ms of a step, tokens)."""
    torch.manual_seed(0)
    config = InferenceConfig(max_requests=requests, max_sequence_length=tokens + 64, buffer_size_gb=0.1, **case)
    with mock.patch("megatron_infer.engine.build.Device", lambda name: device):
        engine = DynamicInferenceEngine(tiny_gpt(max_sequence_length=tokens + 64, init_method_std=0.2), config)
    prompts = [[5 + number, 7, 9, 11] for number in range(requests)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.generate(prompts, params)  # warms up
    steps, cpu, began = engine.num_steps, time.process_time(), time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    drawn = [one.outputs[0].token_ids for one in outputs]
    return sum(map(len, drawn)) / seconds, cpu / (engine.num_steps - steps) * 1e3, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-ms", type=float, default=4.0)
    parser.add_argument("--late-ms", default="0,2,8")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    best = args.requests / args.device_ms * 1e3
    found: dict[str, dict[str, float]] = {}
    expected = None
    print(f"a step of {args.requests} requests takes the device {args.device_ms:g} ms: {best:,.0f} tokens/s at most\n")
    print("| tokens/s, share of that | " + " | ".join(CASES) + " |")
    print("|---|" + "---|" * len(CASES))
    host_ms = []
    for late in args.late_ms.split(","):
        rates: dict[str, float] = {}
        for _ in range(args.rounds):
            for name, case in CASES.items():
                device = LateDevice(args.device_ms / 1e3, float(late) / 1e3)
                rate, cpu_ms, tokens = measure(case, device, args.requests, args.tokens)
                expected = expected or tokens
                assert tokens == expected, f"{name} changes the tokens"
                rates[name] = max(rate, rates.get(name, 0.0))
                host_ms.append(cpu_ms)
        found[late] = rates
        print(f"| read {late} ms later | " + " | ".join(f"{r:,.0f} ({r / best:.0%})" for r in rates.values()) + " |")
    print(f"\nbest of {args.rounds} rounds; the host's work takes {min(host_ms):.1f} ms a step")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
