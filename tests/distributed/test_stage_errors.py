"""Over pipeline stages an error of one stage's forward is one on all stages, and the next call goes on."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo_ranks import new_groups, run_on_ranks, stage_ends
from session_case import PARAMS, make_session, prompts
from training_case import loss_over, sequences_of

from megatron_infer.errors import ModelError, OtherRankFailed, WrongState
from megatron_infer.models import core_attention
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

SEQUENCES = sequences_of([10, 12, 9])
LAYOUTS = {"PP2": (2, 1), "PP3": (3, 1), "TP2 x PP2": (2, 2)}
"""Pipeline stages, and tensor-parallel ranks of each."""


@contextmanager
def broken(breaks: bool, at: int = 1) -> Iterator[None]:
    """The trainer's forward of this rank raises in its `at`-th call."""
    calls = []

    def attend(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if breaks and len(calls) == at:
            raise ModelError("no kernel for this stage")
        return F.scaled_dot_product_attention(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_attention, "F", SimpleNamespace(**vars(F) | {"scaled_dot_product_attention": attend}))
        yield


def check_calls(session: Any, stage: int, victim: int) -> None:
    optimizer = torch.optim.SGD(session.model.parameters(), lr=0.1)
    error = ModelError if stage == victim else OtherRankFailed
    want = session.score(SEQUENCES)
    for at in (1, 2):
        with broken(stage == victim, at), pytest.raises(error, match="no kernel for this stage"):
            session.score(SEQUENCES, micro_batch_tokens=12)
        for got, mine in zip(session.score(SEQUENCES), want, strict=True):
            assert torch.equal(got, mine)
    with session.training():
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=12)
        grads = [parameter.grad.clone() for parameter in session.model.parameters()]
        session.zero_grad(optimizer)
        for at in (1, 2):
            with broken(stage == victim, at), pytest.raises(error, match="no kernel for this stage"):
                session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=12)
            with pytest.raises(WrongState, match="zero_grad"):
                session.step(optimizer)
            session.zero_grad(optimizer)
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=12)
        for grad, parameter in zip(grads, session.model.parameters(), strict=True):
            assert torch.equal(grad, parameter.grad)
        session.zero_grad(optimizer)


class Warnings(logging.Handler):
    """What the package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def check_meter(session: Any, stage: int, victim: int) -> None:
    """The session's own meter is off from then on, with one warning; the engine goes on."""
    log, seen, answers = logging.getLogger("megatron_infer"), Warnings(), []
    log.addHandler(seen)
    for _ in range(2):
        with ExitStack() as trainers_forward, session.generating() as roll:
            answers.append([group.samples[0].token_ids for group in roll.generate(prompts(), PARAMS)])
            trainers_forward.enter_context(broken(stage == victim))
    assert answers[0] == answers[1]
    log.removeHandler(seen)
    assert len(seen.texts) == 1 and "no mismatch meter" in seen.texts[0], seen.texts
    assert "no kernel for this stage" in seen.texts[0]


ASKS_FOR_CUDA: dict[str, dict[str, Any]] = {
    "pipeline stages": {"pipeline_model_parallel_size": 2},
    "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "experts": {"expert_model_parallel_size": 2, **EXPERTS},
    "recomputation": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def on_cpus(rank: int, size: int, folder: Path) -> None:
    """Parts of megatron-core's training that need CUDA: an error that names the remedy, and the remedy holds."""
    for name, sizes in ASKS_FOR_CUDA.items():
        new_groups(**{key: value for key, value in sizes.items() if key.endswith("parallel_size")})
        ends = stage_ends(rank, 2) if name == "pipeline stages" else {}
        with cpu_shim():
            session = make_session(tiny_gpt(num_layers=2, **sizes, **ends), settings={"collective_timeout_s": 60})
        optimizer = torch.optim.SGD(session.model.parameters(), lr=0.1)
        with session.training():
            with pytest.raises(ModelError, match=r"CUDA.* within `with megatron_infer.testing.cpu_shim.cpu_shim\(\):`"):
                session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
            session.zero_grad(optimizer)
            with cpu_shim():
                session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
                assert session.step(optimizer).weight_version == 1, name
        session.engine.rank_group.lockstep.close()


def test_a_stage_of_one_session_counts_its_errors_apart_from_those_of_other_layouts() -> None:
    """Rank 0 has raised in a session with rank 2 before it raises in another one with rank 1."""
    import torch.distributed as dist

    store, processes = dist.HashStore(), []
    for rank in (0, 1):
        spec = importlib.util.find_spec("megatron_infer.distributed.rank_group")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # the counters of a process
        places = {"get_rank": lambda rank=rank: rank, "_get_default_store": lambda: store}
        module.dist = SimpleNamespace(**places, distributed_c10d=SimpleNamespace(**places))
        module.ALONE_S = 0.1
        processes.append(module)

    def raises(rank: int, *stage: int) -> bool:
        group = SimpleNamespace(groups=SimpleNamespace(stage_ranks=set(stage)), ranks=stage)
        return processes[rank].RankGroup.whole_stage_raises(group)

    assert not raises(0, 0, 2), "rank 2 has not raised"
    for module in processes:
        module.ALONE_S = 1.0
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            assert list(threads.map(raises, (0, 1), (0, 0), (1, 1))) == [True, True], "one goes on, the other waits"


@pytest.mark.long
@pytest.mark.timeout(120)
def test_training_that_needs_cuda_names_the_remedy_on_a_cpu(tmp_path: Path) -> None:
    run_on_ranks(on_cpus, 2, tmp_path)


def on_stages(rank: int, size: int, folder: Path, name: str, victims: list[int]) -> None:
    num_stages, tp = LAYOUTS[name]
    sizes = {"pipeline_model_parallel_size": num_stages, "tensor_model_parallel_size": tp}
    stage = rank // tp
    for victim in victims:
        new_groups(**sizes)
        with cpu_shim(4):
            ends = stage_ends(stage, num_stages)
            session = make_session(
                tiny_gpt(num_layers=num_stages, **sizes, **ends).train(),
                settings={"collective_timeout_s": 60},
                meter={"share": 1.0},
            )
            check_calls(session, stage, victim)
            check_meter(session, stage, victim)
        session.engine.rank_group.lockstep.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "victims"),
    [
        ("PP2", [0, 1]),
        pytest.param("PP3", [1, 2], marks=pytest.mark.long),
        pytest.param("TP2 x PP2", [0, 1], marks=pytest.mark.long),
    ],
)
def test_an_error_of_one_stage_is_one_of_all_and_the_next_call_goes_on(
    tmp_path: Path, name: str, victims: list[int]
) -> None:
    num_stages, tp = LAYOUTS[name]
    run_on_ranks(on_stages, num_stages * tp, tmp_path, name, victims)
