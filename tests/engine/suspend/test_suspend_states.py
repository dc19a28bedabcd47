"""What a suspend takes along of recurrent states; that no answer changes is a row of the tables in test_suspend."""

from __future__ import annotations

import pytest
import torch
from model_kinds import RECURRENT, make_model, prefix_caching
from suspend_case import make_engine

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.testing.inspect import inspect


@pytest.fixture(scope="module", params=RECURRENT)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind) -> torch.nn.Module:
    torch.manual_seed(0)
    return make_model(kind)


def test_offload_takes_the_states_of_live_rows_and_no_more(model):
    engine = make_engine(model)
    for prompt in ([3, 4, 5], [9] * 40, [7] * 20):
        engine.add_request(prompt)
    for _ in range(3):
        engine.step()
    store, context = inspect(engine).store, inspect(engine).context
    assert len(context.held_state_slots()) == 3
    copied = 3 * store.layout.state.slot_bytes + len(context.held_blocks()) * store.layout.block_bytes
    suspended = engine.suspend("offload").tags["kv_cache"]
    assert suspended.bytes_copied == copied and store.resident_bytes() == 0
    assert engine.resume().tags["kv_cache"].bytes_copied == copied
    assert store.host_bytes() == 0


def test_states_of_requests_aborted_while_suspended_stay_behind(model):
    engine = make_engine(model)
    names = [engine.add_request([3 + i] * 20) for i in range(3)]
    engine.step()
    engine.suspend("offload")
    engine.abort(names[1])
    store = inspect(engine).store
    resumed = engine.resume().tags["kv_cache"]
    blocks = len(inspect(engine).context.held_blocks())
    assert resumed.bytes_copied == 2 * store.layout.state.slot_bytes + blocks * store.layout.block_bytes


def test_snapshots_behind_shared_blocks_go_along(kind, model):
    """A request that comes after the resume finds the prefix that a live one holds, and goes on from its state."""
    prompt = [5 + i % 90 for i in range(70)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = make_engine(model).generate([prompt], greedy)[0].outputs[0].token_ids
    engine = make_engine(model, **prefix_caching(kind))
    engine.add_request(prompt, greedy, request_id="holder", stream="final")
    for _ in range(3):
        engine.step()
    assert len(inspect(engine).context.held_state_slots()) > 1, "no snapshot is held"
    engine.suspend("offload")
    engine.resume()
    engine.add_request(prompt, greedy, request_id="late", stream="final")
    done = {}
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert done["late"].num_cached_tokens == 64
    assert done["late"].outputs[0].token_ids == done["holder"].outputs[0].token_ids == plain
