"""Changed weights are noticed, whichever way they were written."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from engines import finish, make_engine
from model_kinds import make_model
from torch import nn

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.kernels.checksum import content_sums
from megatron_infer.kernels.select import choose
from megatron_infer.models.weights.change_guard import OffloadedWeights, WeightGuard, guarded_tensors
from megatron_infer.rl.updates import WeightUpdate
from megatron_infer.testing.tiny import tiny_gpt


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 32, bias=False), nn.LayerNorm(32))


@pytest.fixture(params=["chosen here", "sum"])
def guard(request, model) -> WeightGuard:
    chosen = choose("cpu", torch.float32, specs=[], block_size=16)
    return WeightGuard(model.parameters, checksums=content_sums if request.param == "sum" else chosen.checksums)


def optimizer_step(model: nn.Module) -> None:
    model(torch.randn(4, 48)).square().sum().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()


def write_through_data(model: nn.Module) -> None:
    model[2].weight.data[3] += 1e-3


def repoint(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.clone()


def replace_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


@pytest.mark.parametrize(
    ("write", "moves", "changes"),
    [
        (lambda model: model(torch.randn(2, 48)), False, False),
        (optimizer_step, True, True),
        (write_through_data, False, True),  # if that moves, version counters see it: the content check may be dropped
        (repoint, True, True),
        (replace_parameter, False, True),
    ],
    ids=["a forward", "an optimizer's step", "through data", "repointed", "replaced"],
)
def test_a_write_is_seen_at_every_step_or_by_content_until_it_is_accepted(guard, model, write, moves, changes):
    write(model)
    assert (guard.moved(), guard.changed()) == (moves, changes)
    guard.accept()
    assert not guard.moved() and not guard.changed()


def test_a_buffer_that_checkpoints_hold_is_guarded_and_a_scratch_buffer_is_not(model):
    model[0].register_buffer("expert_bias", torch.zeros(8))
    model[0].register_buffer("tokens_per_expert", torch.zeros(8), persistent=False)
    guard = WeightGuard(lambda: guarded_tensors(model), checksums=content_sums)
    model[0].tokens_per_expert += 1
    assert not guard.moved() and not guard.changed()
    model[0].expert_bias += 1
    assert guard.moved() and guard.changed()


@pytest.mark.parametrize("piece_bytes", [1 << 26, 24], ids=["one piece", "pieces that end within a weight"])
def test_weights_laid_up_leave_their_memory_and_come_back_in_the_same_tensors(model, monkeypatch, piece_bytes):
    monkeypatch.setattr("megatron_infer.models.weights.change_guard.PIECE_BYTES", piece_bytes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    references = list(model.parameters())
    offloaded = OffloadedWeights(lambda: guarded_tensors(model), pinned=False)
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in references)
    steps = []
    offloaded.offload(steps.append)
    assert offloaded.num_bytes == num_bytes and len(steps) == len(references)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in references)

    def full(what: str) -> None:
        if what.endswith("2 of 5"):
            raise MemoryError("planted")

    with pytest.raises(MemoryError):
        offloaded.reload(full)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in references), "half of them came back"
    offloaded.reload(steps.append)
    assert offloaded.num_bytes == 0
    assert all(a is b for a, b in zip(references, model.parameters(), strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(MemoryError):
        offloaded.offload(full)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert offloaded.num_bytes == 0


def test_an_interrupted_accept_has_accepted_nothing(model):
    """Else a change that was seen once would never be seen again while requests run."""
    left = [100]

    def checksums(weights: Sequence[torch.Tensor]) -> list[int]:
        left[0] -= len(weights)
        if left[0] < 0:
            raise KeyboardInterrupt
        return content_sums(weights)

    guard = WeightGuard(model.parameters, checksums=checksums)
    with torch.no_grad():
        model[0].weight.mul_(2)
    left[0] = 2
    with pytest.raises(KeyboardInterrupt):
        guard.accept()
    assert guard.moved()
    guard.invalidate()
    left[0] = 100
    assert guard.moved() and guard.changed()
    guard.accept()
    assert not guard.moved() and not guard.changed()


def test_an_interrupt_while_weights_leave_loses_none(model, monkeypatch):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offloaded, left = OffloadedWeights(lambda: guarded_tensors(model), pinned=False), [2]
    resize = torch.UntypedStorage.resize_

    def interrupted(storage: torch.UntypedStorage, size: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        offloaded.offload(lambda what: None)
    offloaded.reload(lambda what: None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_made_in_inference_mode_are_guarded_by_content():
    with torch.inference_mode():
        weight = torch.randn(16, 32)
    guard = WeightGuard(lambda: [weight], checksums=content_sums)
    assert not guard.changed()
    with torch.inference_mode():
        weight.add_(1)
    assert guard.changed()


@pytest.fixture
def experts() -> nn.Module:
    """Parameters side by side in one storage, as in Megatron's flat buffers, and two strided ones that share memory."""
    torch.manual_seed(0)
    storage, model = torch.randn(4 * 96 + 12 * 12), nn.Module()
    square = storage[4 * 96 :].view(12, 12)
    parts = [*storage[: 4 * 96].view(4, 12, 8), square.t(), square[:, :5]]
    for number, part in enumerate(parts):
        parameter = nn.Parameter(torch.empty(0))
        parameter.data = part
        model.register_parameter(f"weight{number}", parameter)
    return model


@pytest.mark.parametrize("checksums", ["chosen here", "sum"])
def test_a_change_of_any_weight_in_a_shared_storage_is_seen(experts, checksums):
    chosen = choose("cpu", torch.float32, specs=[], block_size=16)
    guard = WeightGuard(experts.parameters, checksums=content_sums if checksums == "sum" else chosen.checksums)
    first, second, third, fourth, square, columns = experts.parameters()
    for weight in (first, second, third, fourth, square, columns):
        assert not guard.moved() and not guard.changed()
        weight.data[2, 3] += 1e-3
        assert not guard.moved() and guard.changed()
        guard.accept()
        with torch.no_grad():
            weight.add_(1)
        assert guard.moved(), "each counts its own versions: the storage has none"
        guard.accept()
    kept = first.data.clone()
    first.data.copy_(third.data)
    third.data.copy_(kept)
    assert not guard.moved() and guard.changed(), "two weights exchanged: the same addresses, the same sum of all"
    guard.accept()
    second.data = fourth.data
    assert guard.moved() and guard.changed(), "re-pointed: the old storage shows nothing of it"


def test_an_allocation_that_replaces_a_weights_memory_is_seen(guard, model):
    weight, content = model[0].weight, model[0].weight.detach().clone()
    storage = weight.untyped_storage()
    storage.resize_(0)
    taken = torch.empty_like(content)  # else the allocator may give the same address again
    storage.resize_(content.nbytes)
    weight.data.copy_(content)
    assert torch.equal(weight, content) and taken.data_ptr() != weight.data_ptr()
    assert guard.moved() == guard.changed() == (weight.data_ptr() not in guard.addresses)
    guard.accept()
    weight.data = content
    assert guard.moved() and guard.changed(), "the same object, the same content, another storage"
    guard.accept()
    weight.data = content.view(-1)[: 32 * 48].view(32, 48)
    assert not guard.moved() and guard.changed(), "the same address, fewer rows"


PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(5, 25))


def make_owner(model: nn.Module, *, owns: bool = True) -> DynamicInferenceEngine:
    return make_engine(model, owns_weights=owns)


def answer(engine: DynamicInferenceEngine) -> list[int]:
    return engine.generate(PROMPT, PARAMS)[0].outputs[0].token_ids


@pytest.mark.parametrize("owns", [False, True])
def test_an_engine_that_owns_its_weights_does_not_read_them_after_idling(owns, monkeypatch):
    model = tiny_gpt(init_method_std=0.2, seed=5)
    engine = make_owner(model, owns=owns)
    reads, checksums = [], engine.weights.guard._checksums
    monkeypatch.setattr(engine.weights.guard, "_checksums", lambda weights: reads.append(1) or checksums(weights))
    first = answer(engine)
    assert answer(engine) == first and engine.weight_version == 0
    assert len(reads) == (0 if owns else 2)
    engine.weights.unpack()  # an owner has freed them
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(-1.3)
    second = answer(engine)
    assert engine.weight_version == 1 and second != first and second == answer(make_owner(model))
    norm = model.decoder.final_layernorm
    norm.weight = nn.Parameter(-norm.weight.detach())
    third = answer(engine)
    engine.weights.unpack()
    assert engine.weight_version == 2 and third != second and third == answer(make_owner(model))
    for parameter in model.decoder.parameters():
        parameter.data = parameter.data * -1.3
    fourth = answer(engine)
    assert engine.weight_version == 3 and fourth != third and fourth == answer(make_owner(model))


@pytest.mark.parametrize("told", ["refresh_weights", "pause", "suspend"])
def test_an_engine_that_owns_its_weights_reads_them_where_a_caller_stops_it(told):
    model = tiny_gpt(init_method_std=0.2, seed=5)
    engine = make_owner(model)
    first = answer(engine)
    if told == "pause":
        engine.pause()
    elif told == "suspend":
        engine.suspend("persist")
    engine.weights.unpack()
    for parameter in model.decoder.parameters():
        parameter.data.mul_(-1.3)
    {"refresh_weights": engine.refresh_weights, "pause": engine.unpause, "suspend": engine.resume}[told]()
    assert engine.weight_version == 1
    assert answer(engine) == answer(make_owner(model)) != first


@pytest.mark.parametrize("owns", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_the_step_after_an_update_that_failed_looks_at_the_weights(owns, running, monkeypatch):
    """Every tensor was written, in a way that no version counts, and the end of the update failed."""
    model = tiny_gpt(init_method_std=0.2, seed=5)
    engine = make_owner(model, owns=owns)
    first = answer(engine)
    if running:
        engine.add_request(PROMPT, PARAMS, request_id="running")
        engine.step()
    update = WeightUpdate(engine)
    for local in update.target.inventory.tensors:
        live = update.writable(local).data
        live.mul_(-1.3 if live.dim() > 1 else 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(engine.weights, "accept", lambda *given: (_ for _ in ()).throw(MemoryError("planted")))
        with pytest.raises(Exception, match="planted"):
            update.finish()
    if running:
        engine.step()
        assert engine.weight_version == 1
    finish(engine)
    assert answer(engine) == answer(make_owner(model)) != first
    assert engine.weight_version == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("write", ["in place", "through data"])
def test_weights_that_change_under_running_requests_reach_the_packed_copies(overlap, write):
    """What runs on after an update is computed with the new weights: a request added then equals a fresh engine's."""
    model = tiny_gpt(init_method_std=0.2, seed=5)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine = make_engine(model, overlap=overlap, prefix="lru")
    prompt = list(range(5, 45))
    old = engine.generate(prompt, params)[0].outputs[0].token_ids
    engine.add_request(prompt, params, request_id="running")
    for _ in range(4):
        engine.step()
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            (parameter.data if write == "through data" else parameter).mul_(-1.3)
    if write == "through data":
        engine.refresh_weights()
    engine.add_request(prompt, params, request_id="new")
    done = {name: output.outputs[0].token_ids for name, output in finish(engine).items()}
    fresh = make_engine(model).generate(prompt, params)[0].outputs[0].token_ids
    assert engine.stats().weight_version == 1
    assert fresh != old and done["new"] == fresh
    assert len(done["running"]) == 12 and done["running"][:3] == old[:3]


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_suspended_engine_keeps_no_replaced_parameter_alive(kind, mode):
    """Training may replace parameters; the memory of the old ones is free at once, also after a version was set."""
    model = make_model(kind)
    engine = make_engine(model)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine.generate([[5, 6, 7]], params)
    engine.suspend(mode)
    for announced in (False, True):
        old = []
        for module in list(model.modules()):
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    old.append(weakref.ref(parameter))
                    setattr(module, name, nn.Parameter(parameter.detach() * 0.9))
        del module, parameter
        gc.collect()
        assert not [one for one in old if one() is not None]
        if announced:
            engine.set_weight_version(5)
    engine.resume()
    assert engine.weight_version == 5
    tokens = engine.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    assert tokens == make_engine(model).generate([[5, 6, 7]], params)[0].outputs[0].token_ids


def test_weights_held_weakly_are_compared_as_before(guard, model):
    guard.hold_weakly()
    assert not guard.moved() and not guard.changed()
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert guard.moved() and guard.changed()
    guard.accept()
    assert not guard.moved() and not guard.changed()
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    gc.collect()
    assert guard.moved() and guard.changed(), "a weight that exists no more"
    guard.accept()
    guard.hold()
    assert not guard.moved() and not guard.changed()
    model[2].weight.data[3] += 1e-3
    assert guard.changed()
