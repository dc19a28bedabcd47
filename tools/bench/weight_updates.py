"""Seconds of a whole weight update of a server of SmolLM2: by a trainer's broadcasts, and from a file.

    python tools/bench/weight_updates.py [--rounds 5]
    python tools/bench/weight_updates.py --model DIRECTORY --vllm-python PYTHON      and vLLM's server, float32 too

One engine behind an HTTP server, float32. Per round, one after the other: SGLang's routes with the trainer's tensors in
buckets of 64 MiB; vLLM's routes with the tensors packed; the tensors written to a safetensors file and read by
/update_weights_from_disk. Each ends when the engine serves. The trainer is a thread of this process. vLLM's server has
the same client as vLLM's routes here, with the tensors one by one, and vllm_gloo.py for a transport; `megatron-infer
convert smollm2 DIRECTORY` makes the directory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("support", "server", "coordinator")]

from broadcasting_trainer import Trainer, described  # noqa: E402
from control_case import call, serving_with_control  # noqa: E402
from serve_case import vllm_served  # noqa: E402

from megatron_infer import DynamicInferenceEngine, InferenceConfig, build_model, open_source  # noqa: E402
from megatron_infer.rl.weight_receiver import WeightReceiver  # noqa: E402

BUCKET_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2", help="a name, or a directory of Hugging Face")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="of the environment that has vLLM")
    given = parser.parse_args()
    rounds = given.rounds
    source = open_source(given.model)
    model = build_model(source, dtype=torch.float32)
    tensors = {name: one.float() * 1.05 for name, one in source.tensors()}  # as if trained
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(".")
    path = folder / "megatron-infer-bench.safetensors"
    engine = DynamicInferenceEngine(model, InferenceConfig(buffer_size_gb=0.5))
    receiver = WeightReceiver(engine, weights_root=str(folder))
    try:
        with contextlib.ExitStack() as stack:
            case = stack.enter_context(
                serving_with_control(
                    engine, text=False, weights_root=str(folder), commands_of=lambda _: receiver.commands()
                )
            )
            case.http.timeout = 600
            ways = {
                "broadcast": by_sglang(case, tensors),
                "broadcast, vLLM's routes": by_vllm(case, tensors, None if given.vllm_python else 1 << 30),
                "file": by_file(case, tensors, path),
            }
            if given.vllm_python is not None:
                theirs = stack.enter_context(vllm(given.vllm_python, given.model))
                ways["vLLM's server"] = by_vllm(theirs, tensors)
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, way in ways.items():
                    began = time.perf_counter()
                    way()
                    seconds[name].append(time.perf_counter() - began)
            if given.vllm_python is not None:
                print("greedy tokens, here and of vLLM's server:", answer(case), answer(theirs), sep="\n  ")
    finally:
        path.unlink(missing_ok=True)
    size = sum(one.nbytes for one in tensors.values()) / 2**20
    print(f"{len(tensors)} tensors, {size:.0f} MiB, {rounds} rounds")
    for name, found in seconds.items():
        print(f"{name:24} median {statistics.median(found):.2f} s, best {min(found):.2f} s")


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


@contextlib.contextmanager
def vllm(python: str, directory: str) -> Iterator[Any]:
    """vLLM's server, which has `http`."""
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        plugin = Path(folder, "vllm_gloo-1.dist-info")
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-gloo\nVersion: 1\n")
        (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo = vllm_gloo:register\n")
        shutil.copy(Path(__file__).with_name("vllm_gloo.py"), folder)
        options = ("--enforce-eager", "--weight-transfer-config", '{"backend": "gloo"}')
        environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": folder}
        with (
            vllm_served(python, directory, "float32", threads, *options, **environment) as url,
            httpx.Client(base_url=url, timeout=600) as client,
        ):
            yield SimpleNamespace(http=client)


def answer(case: Any) -> list[int]:
    """Greedy tokens."""
    body = {"model": call(case, "/v1/models", method="GET")["data"][0]["id"], "prompt": [504, 3575, 282, 4649, 314]}
    body |= {"temperature": 0, "max_tokens": 16, "return_token_ids": True}
    found: list[int] = call(case, "/v1/completions", body)["choices"][0]["token_ids"]
    return found


def by_vllm(case: Any, tensors: dict[str, torch.Tensor], buffer_bytes: int | None = None) -> Callable[[], None]:
    """buffer_bytes: of packed tensors."""
    trainer = Trainer("stateless")
    trainer.begin()
    where = {"master_address": "127.0.0.1", "master_port": trainer.port, "rank_offset": 1, "world_size": 2}
    call(case, "/init_weight_transfer_engine", {"init_info": {**where, "packed": buffer_bytes is not None}})
    trainer.joined()

    def update() -> None:
        call(case, "/pause?mode=keep")
        call(case, "/start_weight_update")
        trainer.send(tensors.values(), buffer_bytes=buffer_bytes)
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
