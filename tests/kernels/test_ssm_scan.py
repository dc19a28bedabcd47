"""Every scan backend agrees with the recurrence in float64 and with transformers' mixer, and touches nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scan_case import DELTA, SPEC, check_case, make_case

from megatron_infer.kernels.ssm import DeltaSpec, LayerStates, SsmSpec, SsmWeights
from megatron_infer.kernels.torch import ssm_torch

DTYPES = [torch.float32, torch.bfloat16]
MIXED = [(1, 5), (1, 1), (1, 9), (100, 100), (70, 200), (2, 2), (3, 10), (1, 1), (1, 30), (64, 64), (130, 140)]
"""Decode rows, fresh prompts, chunks that go on, and slices of one token behind them."""
CAPTURES = [(3, 1), (3, 2), (3, 64), (4, 50), (5, 1), (10, 64), (10, 127)]


@pytest.mark.parametrize("spec", [SPEC, DELTA])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_mixed_step_with_captures_and_padding(make_scan, spec, dtype):
    case = make_case(MIXED, spec=spec, captures=CAPTURES, num_decode=3, num_padding=4, dtype=dtype)
    backend = make_scan(dtype)
    check_case(backend, case)
    y, _ = case.run(backend)
    assert (y[-4:] == 0).all(), "padding tokens give zeros"


@pytest.mark.parametrize("spec", [SPEC, DELTA])
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize(
    "rows", [[(1, 7)], [(1, 1)], [(1, 3), (1, 1), (1, 90)], [(1, 1)] * 5, [(65, 65)], [(31, 40), (9, 9)], [(128, 128)]]
)
def test_steps_of_one_kind(make_scan, rows, consecutive, spec):
    decode = sum(q == 1 for q, _ in rows)
    check_case(make_scan(torch.float32), make_case(rows, spec=spec, num_decode=decode, consecutive=consecutive))


def test_a_row_goes_on_from_its_convolutions_state_where_few_tokens_are_left_before_a_stretch_ends(make_scan):
    check_case(make_scan(torch.float32), make_case([(254, 254), (9, 40)]))


SHAPES = {
    "one group": {"num_groups": 1},
    "a group a head": {"num_groups": 6},
    "eight groups": {"num_heads": 16, "num_groups": 8, "head_dim": 8},
    "smallest": {"num_heads": 1, "num_groups": 1, "head_dim": 8, "state_dim": 16, "conv_width": 2},
    "three taps": {"conv_width": 3},
    "one tap": {"conv_width": 1},
    "heads of one channel": {"num_heads": 4, "num_groups": 4, "head_dim": 1},
    "one of everything": {"num_heads": 1, "num_groups": 1, "head_dim": 1, "state_dim": 1, "conv_width": 1},
    "six taps": {"conv_width": 6},
    "largest": {"num_heads": 2, "num_groups": 1, "head_dim": 128, "state_dim": 256},
    "odd": {"num_heads": 9, "num_groups": 3, "head_dim": 13, "state_dim": 37},
    "odd, wide": {"num_heads": 3, "num_groups": 1, "head_dim": 65, "state_dim": 200},
    "2.7b": {"num_heads": 4, "num_groups": 1, "head_dim": 64, "state_dim": 128},
    "large, two groups": {"num_heads": 4, "num_groups": 2, "head_dim": 64, "state_dim": 128},
    "state of 96": {"state_dim": 96},
    "state of 64": {"state_dim": 64, "head_dim": 20},
    "dt clamped": {"dt_min": 0.05, "dt_max": 0.2},
}


@pytest.mark.parametrize("base", [SPEC, DELTA])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_layers(make_scan, base, shape):
    if base is DELTA and shape == "dt clamped":
        pytest.skip("a delta net has no step sizes")
    rows = [(1, 4), (1, 1), (3, 3), (70, 71), (2, 40)]
    case = make_case(
        rows,
        spec=dataclasses.replace(base, **SHAPES[shape]),
        captures=[(2, 2), (3, 2), (3, 66)],
        num_decode=2,
        num_padding=1,
    )
    check_case(make_scan(torch.float32), case, tolerance=3e-5)


@pytest.mark.parametrize("conv_bias", [True, False])
@pytest.mark.parametrize("channel_skip", [True, False])
def test_a_skip_of_each_channel_and_no_convolution_bias(make_scan, conv_bias, channel_skip):
    rows = [(1, 4), (20, 30), (5, 5)]
    case = make_case(rows, num_decode=1, conv_bias=conv_bias, channel_skip=channel_skip)
    check_case(make_scan(torch.float32), case)


@pytest.mark.parametrize("spec", [SPEC, DELTA])
@pytest.mark.parametrize("conv_dtype", DTYPES)
@pytest.mark.parametrize("ssm_dtype", DTYPES)
def test_states_of_another_dtype_than_the_inputs(make_scan, conv_dtype, ssm_dtype, spec):
    for dtype in DTYPES:
        case = make_case(
            [(1, 4), (20, 30), (5, 5), (90, 90)],
            spec=spec,
            captures=[(3, 5)],
            num_decode=1,
            dtype=dtype,
            conv_dtype=conv_dtype,
            ssm_dtype=ssm_dtype,
        )
        check_case(make_scan(dtype), case, tolerance=2e-2)


@pytest.mark.parametrize("spec", [SPEC, DELTA])
def test_steps_that_exceed_the_workspace_are_cut_into_waves(make_scan, monkeypatch, spec):
    monkeypatch.setattr(ssm_torch, "WORKSPACE_BYTES", 1)
    check_case(make_scan(torch.float32), make_case(MIXED, spec=spec, captures=CAPTURES, num_decode=3, num_padding=4))


def test_long_prompt_with_violent_step_sizes(make_scan):
    """Decays of hundreds a token beside tiny ones: sums of them must not cost the small ones their digits."""
    case = make_case([(700, 700)], captures=[(0, 333)])
    case.fused[::7, -6:] += 30.0
    check_case(make_scan(torch.float32), case, tolerance=3e-5)


@pytest.mark.parametrize("log_decay", [20.0, 80.0])
@pytest.mark.parametrize("spec", [SPEC, DELTA])
def test_a_head_that_forgets_everything_at_once_stays_finite(make_scan, log_decay, spec):
    """A_log so large, and one step so large, that fp32 cannot tell sums of decays apart."""
    case = make_case([(200, 200), (70, 100), (1, 1), (1, 9)], spec=spec, captures=[(0, 70)])
    case.weights.decay_H[1:4] = -torch.tensor(log_decay).exp()
    case.fused[50, -1] = 1e9
    y, _ = case.run(make_scan(torch.float32))
    assert y.isfinite().all()
    check_case(make_scan(torch.float32), case, tolerance=3e-5)


@pytest.mark.parametrize("spec", [SPEC, DELTA])
def test_what_one_row_holds_does_not_reach_another(make_scan, spec):
    case = make_case([(1, 4), (1, 5), (66, 66), (40, 80)], spec=spec, num_decode=2)
    backend = make_scan(torch.float32)
    want, want_states = case.run(backend)
    case.fused[1] = float("nan")
    case.fused[10] = float("inf")
    got, states = case.run(backend)
    for span in (slice(0, 1), slice(68, 108)):
        torch.testing.assert_close(got[span], want[span], rtol=1e-5, atol=1e-5)
    assert not got[1].isfinite().any() and not got[10:60].isfinite().all()
    for row in (0, 3):
        slot = int(case.step.table_row[row])
        for after, before in zip(states, want_states, strict=True):
            torch.testing.assert_close(after[slot], before[slot], rtol=1e-5, atol=1e-5)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_steps_match_reference(make_scan, data):
    draw = data.draw
    decode = draw(st.lists(st.integers(1, 50), max_size=5))
    slices = draw(st.lists(st.tuples(st.integers(1, 150), st.integers(0, 9)), min_size=0 if decode else 1, max_size=4))
    rows = [(1, n) for n in decode] + [(q, q + past) for q, past in slices]
    captures = {
        (row, draw(st.integers(1, q - 1)))
        for row, (q, _) in enumerate(rows)
        if q > 1
        for _ in range(draw(st.integers(0, 3)))
    }
    groups = draw(st.integers(1, 3))
    spec = draw(st.sampled_from([SsmSpec, DeltaSpec]))(
        num_heads=groups * draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([8, 11, 16, 32])),
        state_dim=draw(st.sampled_from([16, 24, 64])),
        num_groups=groups,
        conv_width=draw(st.integers(2, 4)),
    )
    dtype = draw(st.sampled_from(DTYPES))
    case = make_case(
        rows,
        spec=spec,
        captures=sorted(captures),
        num_decode=len(decode),
        num_padding=draw(st.integers(0, 3)),
        dtype=dtype,
        conv_bias=draw(st.booleans()),
        channel_skip=draw(st.booleans()),
        consecutive=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    check_case(make_scan(dtype), case, tolerance=3e-5 if dtype is torch.float32 else None)


def transformers_mixer(**sizes):
    """A Mamba-2 mixer of transformers with random parameters of a trained model's kind."""
    pytest.importorskip("transformers")
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(num_hidden_layers=1, vocab_size=8, **sizes)
    torch.manual_seed(0)
    mixer = Mamba2Mixer(config, 0).eval()
    torch.nn.init.normal_(mixer.D)
    torch.nn.init.normal_(mixer.conv1d.bias)
    return config, mixer


@pytest.mark.parametrize("groups", [1, 2])
def test_prompt_then_decode_equals_transformers_mixer(make_scan, groups):
    sizes = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": groups, "chunk_size": 32}
    config, mixer = transformers_mixer(**sizes)
    from transformers import DynamicCache

    spec = SsmSpec(num_heads=8, head_dim=16, state_dim=32, num_groups=groups, conv_width=4)
    weights = SsmWeights(
        conv_CW=mixer.conv1d.weight.squeeze(1),
        conv_bias_C=mixer.conv1d.bias,
        decay_H=-mixer.A_log.exp(),
        skip_H=mixer.D,
        dt_bias_H=mixer.dt_bias,
    )
    prompt, total = 100, 106
    hidden = torch.randn(1, total, 64)
    cache = DynamicCache(config=config)
    want = torch.cat(
        [mixer(hidden[:, :prompt], cache)] + [mixer(hidden[:, i : i + 1], cache) for i in range(prompt, total)], dim=1
    )

    case = make_case([(prompt, prompt), (7, 7)], spec=spec)  # beside another row
    states, backend = case.states, make_scan(torch.float32)
    states.conv_SCW[:], states.ssm_SHPN[:] = float("nan"), float("nan")
    gate, xBC, dt = mixer.in_proj(hidden[0]).split([128, spec.num_channels, 8], dim=-1)
    backend.plan(case.step)
    others = torch.randn(7, spec.num_channels), torch.randn(7, 8)
    both = [torch.cat((ours[:prompt], theirs)) for ours, theirs in zip((xBC, dt), others, strict=True)]
    outs = [backend.run(*both, states, weights, spec)[:prompt]]
    slot = int(case.step.table_row[0])
    for i in range(prompt, total):
        one = make_case([(1, i + 1)], spec=spec).step
        one.table_row[0] = slot
        backend.plan(one)
        outs.append(backend.run(xBC[i : i + 1], dt[i : i + 1], LayerStates(*states), weights, spec))
    got = mixer.out_proj(mixer.norm(torch.cat(outs), gate))
    torch.testing.assert_close(got, want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.ssm_SHPN[slot], cache.layers[0].recurrent_states[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.conv_SCW[slot], cache.layers[0].conv_states[0][0], rtol=1e-5, atol=1e-5)
