"""Memory of a switch: packed copies stay if the cache stays, and weights are read once."""

from __future__ import annotations

import pytest
import torch
from session_case import make_session, prompts, train_step

from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.memory.device import Device
from megatron_infer.rl.session import RolloutSession
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture
def session():
    made = make_session(tiny_gpt(init_method_std=0.2).train())
    if made.engine.kernels.packed.layout.name != "native panels":
        pytest.skip("nothing is packed in panels here")
    return made


def answers_in(session) -> list[list[int]]:
    with session.generating() as roll:
        return [group.samples[0].token_ids for group in roll.generate(prompts(), PARAMS)]


def copies(session) -> dict[int, int]:
    return {key: copy.data_ptr() for key, copy in session.engine.kernels.packed._packed.items()}


def test_persist_packs_the_new_weights_over_the_old_copies(session):
    answers_in(session)
    before, packed = copies(session), session.engine.kernels.packed
    for step in range(2):
        with session.training() as report:
            assert packed.num_bytes > 0 and report.tags["weights"].bytes_freed == 0
            assert report.tags["weights"].bytes_resident > packed.num_bytes
            train_step(session.model, step)
        session.update_weights()
        got = answers_in(session)
        assert copies(session) == before
        session.engine.verify_weights()
        assert got == answers_in(make_session(session.model))


@pytest.mark.parametrize("how", [{"mode": "offload"}, {"mode": "recompute"}, {"tags": ["weights"]}], ids=str)
def test_the_copies_are_released_when_memory_is_released(session, how):
    engine, packed = session.engine, session.engine.kernels.packed
    held = packed.num_bytes
    assert engine.suspend(**how).tags["weights"].bytes_freed == held > 0 == packed.num_bytes
    engine.resume()
    assert packed.num_bytes == held
    engine.suspend("persist")
    assert packed.num_bytes == held
    assert engine.suspend(**how).tags["weights"].bytes_freed == held > 0 == packed.num_bytes
    engine.resume()
    engine.verify_weights()


@pytest.mark.parametrize("mode", ["persist", "offload"])
def test_an_update_and_a_resume_read_every_weight_once_each(session, mode, monkeypatch):
    guard, read = session.engine.weights.guard, []
    checksums = guard._checksums
    monkeypatch.setattr(guard, "_checksums", lambda weights: read.extend(map(id, weights)) or checksums(weights))
    packed = {id(weight) for weight in inspect(session.engine).adopted.packable_weights()}
    session.engine.suspend(mode)
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.data.mul_(1.1)
    session.update_weights()
    assert sorted(read) == sorted(map(id, session.model.parameters()))
    read.clear()
    session.engine.resume()
    assert len(set(read)) == len(read) and not packed & set(read), "what is packed is summed up on the way"
    assert session.weight_version == 1


@pytest.mark.parametrize("mode", ["persist", "recompute"])
def test_writes_through_data_after_an_update_are_detected_at_resume(session, mode):
    session.engine.suspend(mode)
    session.update_weights()
    with torch.no_grad():
        session.model.decoder.layers[0].mlp.linear_fc1.weight.data[0, 0] += 1.0
    session.engine.resume()
    assert session.weight_version == 2
    assert answers_in(session) == answers_in(make_session(session.model))


def test_after_a_failed_resume_the_next_one_has_the_weights_of_its_own_time(session):
    def fail(event) -> None:
        if "checksums" in str(event):
            raise KeyboardInterrupt

    answers_in(session)
    session.engine.suspend("persist")
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.data.mul_(1.2)
    session.engine.lifecycle.observers.append(fail)
    with pytest.raises(KeyboardInterrupt):
        session.engine.resume()
    session.engine.lifecycle.observers.clear()
    assert session.engine.state == "suspended"
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.data.mul_(1.2)
    session.engine.resume()
    session.engine.verify_weights()
    assert answers_in(session) == answers_in(make_session(session.model))


@pytest.mark.parametrize("options", [None, {"max_requests": 8, "logprobs_mode": "processed"}])
def test_options_that_are_not_given_are_those_of_the_machine_and_the_model(monkeypatch, options):
    """As those of LLM and of the commands: on a CPU a quarter of the free memory, 4 GiB at most."""
    for free_gib, want_gib in ((8, 2.0), (64, 4.0)):
        monkeypatch.setattr(Device, "available_bytes", lambda self, free=free_gib: free << 30)
        model = tiny_gpt()
        engine = RolloutSession(model, options, meter=None).engine
        assert engine.config.buffer_size_gb == want_gib
        want = machine_config(options or {}, engine.shape, is_cuda=False, available_bytes=free_gib << 30)
        assert engine.config == want.on_device(is_cuda=False)
    assert engine.config.max_requests == (256 if options is None else 8)
