"""Data-parallel replicas are engines of their own: equal greedy answers, seeds of their own, no word between them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import engine_ranks as ranks
import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

MODELS: dict[str, Any] = {
    "attention": lambda: tiny_gpt(**ranks.GPT),
    "experts": lambda: tiny_gpt(**ranks.GPT, **EXPERTS),
    "hybrid": lambda: tiny_hybrid("M*-ME", **ranks.HYBRID),
}
SETTINGS = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_tokens": 40, "seed": 11}
DRAWN = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
WITH_SEED = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True, seed=5)
SPOKEN = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all_single",
    "broadcast",
    "barrier",
    "isend",
    "irecv",
    "new_group",
    "send",
    "recv",
)


def greedy(kind: str) -> dict[str, Any]:
    """A replica's answers, over a suspend in each mode."""
    settings = SETTINGS | ({"prefix_caching_mamba_gb": 0.01} if kind == "hybrid" else {})
    engine = ranks.make_engine(MODELS[kind](), **settings)
    for i, (prompt, params) in enumerate(ranks.workload()):
        engine.add_request(prompt, params, request_id=str(i), stream="final")
    done, modes = [], ["persist", "offload", "recompute"]
    while engine.has_unfinished():
        done += [output for output in engine.step() if output.finished]
        if modes and len(done) >= 2:
            engine.suspend(modes.pop())
            engine.resume()
    assert not modes
    return ranks.account(done)


def drawn(params: SamplingParams, **settings: Any) -> list[list[int]]:
    engine = ranks.make_engine(MODELS["attention"](), **SETTINGS | settings)
    outputs = engine.generate([[7, 8, 9], list(range(40))], params)
    return [output.outputs[0].token_ids for output in outputs]


def silent() -> Any:
    """Within it nothing may be said to another process."""
    said = AssertionError("a replica spoke to another")
    return mock.patch.multiple(torch.distributed, **{name: mock.Mock(side_effect=said) for name in SPOKEN})


def on_rank(rank: int, size: int, folder: Path) -> None:
    new_groups()
    assert MODELS["attention"]().pg_collection.dp.size() == size
    with silent():
        for kind in MODELS if rank == 0 else reversed(MODELS):  # each at its own time
            ranks.assert_same_account(greedy(kind), torch.load(folder / f"{kind}.pt"))
        mine = {
            "offset": drawn(DRAWN, offset_sampling_seed_by_dp_rank=True),
            "equal": drawn(DRAWN, offset_sampling_seed_by_dp_rank=False),
            "its own": drawn(WITH_SEED, offset_sampling_seed_by_dp_rank=True),
        }
    everyones: list[Any] = [None] * size
    torch.distributed.all_gather_object(everyones, mine)
    first, second = everyones
    alone = torch.load(folder / "drawn.pt")
    assert first["offset"] == first["equal"] == second["equal"] == alone["equal"]
    assert all(a != b for a, b in zip(first["offset"], second["offset"], strict=True))
    assert first["its own"] == second["its own"] == alone["its own"]
    torch.distributed.barrier()
    if rank == 1:
        (folder / "gone").write_text(str(os.getpid()))
        os._exit(0)
    wait_for_the_end_of_the_other(folder)
    ranks.assert_same_account(greedy("hybrid"), torch.load(folder / "hybrid.pt"))
    (folder / "alone").touch()
    os._exit(0)  # there is nobody left for a barrier


def wait_for_the_end_of_the_other(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(int((folder / "gone").read_text() or "0"), 0)
        except FileNotFoundError:
            pass
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError("the other replica did not end")


@pytest.mark.timeout(280)
def test_two_replicas_answer_as_one_process_with_seeds_of_their_own_and_without_each_other(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for kind in MODELS:
        torch.save(greedy(kind), tmp_path / f"{kind}.pt")
    torch.save({"equal": drawn(DRAWN), "its own": drawn(WITH_SEED)}, tmp_path / "drawn.pt")
    run_on_ranks(on_rank, 2, tmp_path)
    assert (tmp_path / "alone").exists()
