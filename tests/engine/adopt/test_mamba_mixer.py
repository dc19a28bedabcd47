"""The mixer that trains on a CPU is the Mamba-2 of its definition: values and gradients, whatever the lengths."""

from __future__ import annotations

import contextlib
import math
import types

import pytest
import torch
import torch.nn.functional as F

from megatron_infer.models import mamba_mixer
from megatron_infer.models.mamba_mixer import SlottedMambaMixer
from megatron_infer.models.mamba_scan import chunk_scan
from megatron_infer.testing.tiny import tiny_hybrid, tiny_mamba


def by_definition(x, dt, decay, b, c):
    """One position after the other."""
    heads = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(heads, 2), c.repeat_interleave(heads, 2)
    state, out = torch.zeros(*x.shape[1:], b.shape[-1], dtype=x.dtype), []
    for t in range(len(x)):
        state = state * torch.exp(dt[t] * decay)[..., None, None]
        state = state + (dt[t][..., None] * x[t])[..., None] * b[t][:, :, None]
        out.append((state * c[t][:, :, None]).sum(-1))
    return torch.stack(out)


def scan_inputs(length: int, dtype=torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, dt = draw(length, 2, 4, 3), F.softplus(draw(length, 2, 4))
    decay, b, c = -torch.exp(draw(4)), draw(length, 2, 2, 5), draw(length, 2, 2, 5)
    return [part.to(dtype).requires_grad_() for part in (x, dt, decay, b, c)]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 27])
def test_chunked_scan_and_its_gradients_are_the_recurrence(length):
    ours, theirs = scan_inputs(length), scan_inputs(length)
    y, expected = chunk_scan(*ours, chunk=8), by_definition(*theirs)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    (y * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-11)


def test_a_scan_that_forgets_at_once_stays_finite_and_exact():
    """A decay of exp(-300) a position: differences of prefix sums would be noise in fp32."""
    ours, theirs = scan_inputs(40, torch.float32), scan_inputs(40)
    with torch.no_grad():
        for inputs in (ours, theirs):
            inputs[2].copy_(torch.tensor([-300.0, -0.01, -30.0, -3.0]))
    y, expected = chunk_scan(*ours, chunk=32), by_definition(*theirs)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert all(torch.isfinite(part.grad).all() for part in ours)


def loss_and_gradients(model, ids, **how):
    model.zero_grad()
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    loss = model(ids, positions, None, labels=ids.roll(-1, 1), **how).mean()
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("settings", [{}, {"norm_groups": 1}, {"mamba_num_groups": 1}, {"mamba_num_heads": 6}])
def test_gradients_of_every_parameter_are_those_of_the_recurrence_in_float64(settings, monkeypatch):
    ids = torch.randint(0, 128, (2, 37), generator=torch.Generator().manual_seed(0))
    single, double = (tiny_hybrid("M*M-", **settings).train() for _ in range(2))
    for layer in single.decoder.layers:
        if hasattr(layer, "mixer"):
            layer.mixer.chunk_size = 16  # three chunks
    loss, gradients = loss_and_gradients(single, ids)
    double.double().config.params_dtype = torch.float64
    monkeypatch.setattr(
        "megatron_infer.models.mamba_scan.chunk_scan",
        lambda *inputs, chunk: by_definition(*(x.double() for x in inputs)),
    )
    expected_loss, expected = loss_and_gradients(double, ids)
    assert relative(loss, expected_loss) < 1e-6
    worst = {name: relative(gradients[name], expected[name]) for name in expected}
    assert max(worst.values()) < 1e-5, max(worst, key=worst.get)
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def test_packed_sequences_each_begin_from_an_empty_state():
    mixer = tiny_mamba(num_layers=1).decoder.layers[0].mixer
    hidden = torch.randn(12, 1, 64, generator=torch.Generator().manual_seed(0))
    packed = types.SimpleNamespace(cu_seqlens_q=torch.tensor([0, 5, 6, 10]), cu_seqlens_q_padded=None)
    with torch.no_grad():
        together, _ = mixer(hidden, packed_seq_params=packed)
        for first, end in ((0, 5), (5, 6), (6, 10), (10, 12)):
            torch.testing.assert_close(together[first:end], mixer(hidden[first:end])[0])


def test_a_sequence_does_not_see_the_batch_or_the_future():
    mixer = tiny_mamba(num_layers=1).decoder.layers[0].mixer
    hidden = torch.randn(300, 3, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = mixer(hidden)[0]
        torch.testing.assert_close(mixer(hidden[:, 1:2])[0], whole[:, 1:2])
        torch.testing.assert_close(mixer(hidden[:141])[0], whole[:141])


def test_initial_weights_are_in_the_ranges_of_megatron_core():
    mixer = tiny_mamba(num_layers=1, randomize=False).decoder.layers[0].mixer
    dt = F.softplus(mixer.dt_bias)
    assert dt.min() >= 1e-3 and dt.max() <= 0.1
    assert mixer.A_log.min() >= 0 and mixer.A_log.max() <= math.log(16)
    assert torch.equal(mixer.D, torch.ones(16)) and torch.equal(mixer.norm.weight, torch.ones(128))
    bf16 = tiny_mamba(num_layers=1, params_dtype=torch.bfloat16).decoder.layers[0].mixer
    kinds = {name: parameter.dtype for name, parameter in bf16.named_parameters()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {"A_log", "D"}


def test_bfloat16_training_forward_is_near_fp32():
    exact, rounded = tiny_mamba(), tiny_mamba(params_dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    ids, positions = torch.arange(50)[None], torch.arange(50)[None]
    with torch.no_grad():
        a, b = exact(ids, positions, None), rounded(ids, positions, None)
    assert b.dtype == torch.bfloat16
    assert (a - b).abs().mean() < 0.02 * a.abs().mean()


def test_a_mixer_refuses_contexts_that_are_not_ours():
    mixer = tiny_mamba(num_layers=1).decoder.layers[0].mixer
    assert type(mixer) is SlottedMambaMixer
    with pytest.raises(NotImplementedError, match="megatron-core's own inference needs its MambaMixer"):
        mixer(torch.zeros(1, 1, 64), types.SimpleNamespace(is_static_batching=lambda: True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mamba_num_heads": 5}, "5 mamba heads cannot be divided by 2"),
        ({"mamba_head_dim": 7}, "128 expand"),
        ({"norm_groups": 3}, "128 channels of a rank cannot be divided by 3"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_figures(settings, message):
    with pytest.raises(Exception, match=message):
        tiny_mamba(num_layers=1, **settings)


@pytest.mark.parametrize(("drawn", "asks"), [(True, True), (False, False)])
def test_weights_that_will_be_loaded_need_no_seeded_generator(monkeypatch, drawn, asks):
    asked = []
    tracker = types.SimpleNamespace(fork=lambda: asked.append(True) or contextlib.nullcontext())
    monkeypatch.setattr(mamba_mixer.mcore, "get_cuda_rng_tracker", lambda: tracker)
    with mamba_mixer.init_generator(types.SimpleNamespace(use_cpu_initialization=False, perform_initialization=drawn)):
        assert bool(asked) is asks
