"""Seconds of a whole weight update of a server of SmolLM2: by a trainer's broadcasts, and from a file.

    python tools/bench/weight_updates.py [--rounds 5]

One engine behind an HTTP server, float32. Per round, one after the other: SGLang's routes with the trainer's tensors in
buckets of 64 MiB; vLLM's routes with the tensors packed; the tensors written to a safetensors file and read by
/update_weights_from_disk. Each ends when the engine serves. The trainer is a thread of this process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("support", "server", "coordinator")]

from broadcasting_trainer import Trainer, described  # noqa: E402
from control_case import call, serving_with_control  # noqa: E402

from megatron_infer import DynamicInferenceEngine, InferenceConfig, build_model, open_source  # noqa: E402
from megatron_infer.rl.weight_receiver import WeightReceiver  # noqa: E402

BUCKET_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    model = build_model(open_source("smollm2"), dtype=torch.float32)
    named = {name: one for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}
    tensors = {name: one.detach().clone().contiguous() for name, one in named.items()}
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(".")
    path = folder / "megatron-infer-bench.safetensors"
    engine = DynamicInferenceEngine(model, InferenceConfig(buffer_size_gb=0.5))
    receiver = WeightReceiver(engine, weights_root=str(folder))
    try:
        with serving_with_control(
            engine, text=False, weights_root=str(folder), commands_of=lambda _: receiver.commands()
        ) as case:
            case.http.timeout = 600
            ways = {"broadcast": by_sglang(case, tensors), "broadcast, packed": by_vllm(case, tensors)}
            ways["file"] = by_file(case, tensors, path)
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, way in ways.items():
                    began = time.perf_counter()
                    way()
                    seconds[name].append(time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)
    size = sum(one.nbytes for one in tensors.values()) / 2**20
    print(f"{len(tensors)} tensors, {size:.0f} MiB, {rounds} rounds")
    for name, found in seconds.items():
        print(f"{name:20} median {statistics.median(found):.2f} s, best {min(found):.2f} s")


def by_sglang(case: Any, tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
    trainer = Trainer()
    trainer.begin()
    where = {"master_address": "127.0.0.1", "master_port": trainer.port, "rank_offset": 1, "world_size": 2}
    call(case, "/init_weights_update_group", {**where, "group_name": trainer.name, "backend": "gloo"})
    trainer.joined()
    parts: list[dict[str, torch.Tensor]] = [{}]
    for name, one in tensors.items():
        if sum(each.nbytes for each in parts[-1].values()) > BUCKET_BYTES:
            parts.append({})
        parts[-1][name] = one

    def update() -> None:
        call(case, "/pause_generation", {})
        for part in parts:
            trainer.send(part.values())
            call(case, "/update_weights_from_distributed", {**described(part), "group_name": trainer.name})
            assert trainer.sent()
        call(case, "/continue_generation", {})

    return update


def by_vllm(case: Any, tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
    trainer = Trainer("stateless")
    trainer.begin()
    where = {"master_address": "127.0.0.1", "master_port": trainer.port, "rank_offset": 1, "world_size": 2}
    call(case, "/init_weight_transfer_engine", {"init_info": {**where, "packed": True}})
    trainer.joined()

    def update() -> None:
        call(case, "/pause?mode=keep")
        call(case, "/start_weight_update")
        trainer.send(tensors.values(), buffer_bytes=1 << 30)
        call(case, "/update_weights", {"update_info": described(tensors, "dtype_names")})
        assert trainer.sent()
        call(case, "/finish_weight_update")
        call(case, "/resume")

    return update


def by_file(case: Any, tensors: dict[str, torch.Tensor], path: Path) -> Callable[[], None]:
    def update() -> None:
        call(case, "/pause_generation", {})
        save_file(tensors, path)
        call(case, "/update_weights_from_disk", {"model_path": path.name})
        call(case, "/continue_generation", {})

    return update


if __name__ == "__main__":
    main()
