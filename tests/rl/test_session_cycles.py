"""A hundred cycles of suspend, update and resume: memory does not grow, no request is lost, versions increase."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from session_case import PARAMS, copied, fresh_answers, make_session, prompts

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.testing.tiny import tiny_gpt

CYCLES = 100


def tensors_alive() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.long
@pytest.mark.parametrize("mode", ["persist", "recompute", "offload"])
def test_a_hundred_cycles_leave_nothing_behind(mode):
    model = tiny_gpt(init_method_std=0.2).train()
    twin = copied(model)
    session = make_session(model, suspend_mode=mode)
    long = SamplingParams(temperature=0.0, max_tokens=CYCLES + 8, ignore_eos=True)
    with session.generating():
        session.engine.add_request([5, 6, 7], long, request_id="long", stream="final")
    sizes, finished, output = [], 0, None
    for cycle in range(CYCLES):
        if cycle in (20, CYCLES - 1):
            sizes.append((tensors_alive(), sys.getallocatedblocks(), resident_mib()))
        with session.training(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 if cycle % 2 else 0.999)
        report = session.transition(twin.state_dict()) if cycle % 10 == 9 else session.update_weights()
        version = report if cycle % 10 != 9 else report.update
        assert version.version == session.weight_version == cycle + 1
        with session.generating():
            session.engine.add_request(prompts()[cycle % 3], SamplingParams(temperature=0.0, max_tokens=1))
            for out in session.engine.step():
                finished += out.finished and out.request_id != "long"
    with session.generating():
        while session.engine.has_unfinished():
            for out in session.engine.step():
                output = out if out.request_id == "long" else output
                finished += out.finished and out.request_id != "long"
    assert finished == CYCLES
    assert output is not None and len(output.outputs[0].token_ids) == CYCLES + 8
    versions = [span.policy_version for span in output.outputs[0].spans]
    assert versions == sorted(versions) and versions[-1] == CYCLES and len(set(versions)) >= CYCLES - 1
    (tensors, blocks, mib), (tensors_later, blocks_later, mib_later) = sizes
    assert abs(tensors_later - tensors) <= 2, (tensors, tensors_later)
    # the long request grows by a token, a span and its events each cycle
    assert blocks_later - blocks < 20 * CYCLES, (blocks, blocks_later)
    assert mib_later - mib < 8, (mib, mib_later)
    with session.generating() as roll:
        assert [g.samples[0].token_ids for g in roll.generate(prompts(), PARAMS)] == fresh_answers(model)
