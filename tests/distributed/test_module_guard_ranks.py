"""Every change of a model's modules at every time, on both of two tensor-parallel ranks, is served or refused.

What tests/engine/adopt/test_module_guard.py holds for one process; a change on one rank alone is in test_tp_calls.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks
from module_guard_case import CHANGES, GREEDY, PROMPT, SETTINGS, Change, answer, check_equal, config_of, read, refusing

from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.rl.session import RolloutSession
from megatron_infer.testing.tiny import tiny_gpt


def model_of(seed: int) -> Any:
    return tiny_gpt(**SETTINGS, seed=seed, randomize=False, tensor_model_parallel_size=2)


@contextlib.contextmanager
def engine_on(model: Any) -> Any:
    engine = DynamicInferenceEngine(model, config_of(model))
    try:
        yield engine
    finally:
        engine.rank_group.lockstep.close()


def fresh_answer(model: Any) -> tuple[list[int], list[float]]:
    with engine_on(model) as engine:
        return answer(engine)


def run_to_end(engine: DynamicInferenceEngine) -> tuple[list[int], list[float]]:
    """Of the one request, on the leader; other ranks have no output of it."""
    done = []
    while engine.has_unfinished():
        done += [output for output in engine.step() if output.finished]
    return read(done[0]) if done else ([], [])


def add_on_leader(engine: DynamicInferenceEngine, rank: int) -> None:
    if rank == 0:
        engine.add_request(PROMPT, GREEDY)


def before_adoption(change: Change, rank: int, model: Any, donor: Any) -> None:
    undo = change.make(model, donor)
    if words := change.refusal(is_adopted=False):
        with refusing(words):
            DynamicInferenceEngine(model, config_of(model))
        undo()
    fresh_answer(model)


def while_idle(change: Change, rank: int, model: Any, donor: Any) -> None:
    with engine_on(model) as engine:
        before = answer(engine)
        undo = change.make(model, donor)
        if not change.words:
            check_equal(answer(engine), fresh_answer(model))
            return
        add_on_leader(engine, rank)
        for call in (engine.step, engine.step, engine.verify_weights):
            with refusing(change.words):
                call()
        assert engine.weight_version == 0
        undo()
        engine.verify_weights()
        found = run_to_end(engine)
        if rank == 0:
            check_equal(found, before)


def between_rollouts(change: Change, rank: int, model: Any, donor: Any) -> None:
    session = RolloutSession(model, config_of(model))
    try:
        with session.generating() as roll:
            before = roll.generate([PROMPT], GREEDY)[0].samples[0]
        undo = change.make(model, donor)
        if change.words:
            for call in (session.update_weights, session.generating().__enter__):
                with refusing(change.words):
                    call()
            undo()
        else:
            session.update_weights()
        with session.generating() as roll:
            found = roll.generate([PROMPT], GREEDY)[0].samples[0]
        if change.words:
            assert found.token_ids == before.token_ids
        else:
            check_equal((found.token_ids, found.raw_logprobs), fresh_answer(model))
    finally:
        session.engine.rank_group.lockstep.close()


def in_flight(change: Change, rank: int, model: Any, donor: Any) -> None:
    with engine_on(model) as engine:
        before = answer(engine)
        add_on_leader(engine, rank)
        for _ in range(2):
            engine.step()
        undo = change.make(model, donor)
        if change.words:
            for _ in range(2):
                with refusing(change.words):
                    engine.step()
            assert engine.stats().num_running + engine.stats().num_waiting == 1 and engine.weight_version == 0
            undo()
            found = run_to_end(engine)
            if rank == 0:
                check_equal(found, before)
            return
        run_to_end(engine)
        check_equal(answer(engine), fresh_answer(model))


def while_suspended(change: Change, rank: int, model: Any, donor: Any) -> None:
    with engine_on(model) as engine:
        before = answer(engine)
        add_on_leader(engine, rank)
        engine.step()
        engine.suspend("recompute")
        undo = change.make(model, donor)
        if change.words:
            for _ in range(2):
                with refusing(change.words):
                    engine.resume()
            undo()
        engine.resume()
        run_to_end(engine)
        check_equal(answer(engine), before if change.words else fresh_answer(model))


TIMES = {one.__name__: one for one in (in_flight, before_adoption, while_idle, between_rollouts, while_suspended)}


def run_changes(rank: int, size: int, folder: str, time: str, names: list[str]) -> None:
    new_groups(tensor_model_parallel_size=2)
    for name in names:
        try:
            TIMES[time](CHANGES[name], rank, model_of(1), model_of(2))
        except BaseException as error:
            error.add_note(f"change: {name}")
            raise
        torch.distributed.barrier()


@pytest.mark.one_in(8)
@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("part", range(2))
def test_every_change_on_two_ranks_is_served_or_refused(time, part, tmp_path: Path):
    run_on_ranks(run_changes, 2, tmp_path, time, [*CHANGES][part::2])
