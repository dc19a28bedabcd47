"""Experts as grouped products in Triton: the same as one expert after the other, whatever the router chose."""

from __future__ import annotations

import pytest
import torch
from engines import finish, make_engine, run, tokens_of
from experts_case import FFN, WIDTH, Layer, choose
from launches import kernels_launched

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.kernels.activations import squared_relu
from megatron_infer.kernels.triton.launch import listening
from megatron_infer.testing.tiny import tiny_hybrid

pytestmark = pytest.mark.triton
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.fixture(scope="module")
def experts(device):
    from megatron_infer.kernels.triton.experts import TritonExperts

    return TritonExperts()


def add(experts, x, chosen, probs, layer, out):
    choice = experts.listed(chosen, probs, layer.weights.top_k)
    return experts.add(x, choice, layer.weights, out)


def check(experts, layer, x, chosen, probs):
    assert experts.supports(layer.weights, x.dtype) is None
    out = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(x)
    want = layer.want(x, chosen, probs, out)
    assert add(experts, x, chosen, probs, layer, out) is out
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    zeros = torch.zeros_like(x)
    assert torch.equal(add(experts, x, chosen, probs, layer, None), add(experts, x, chosen, probs, layer, zeros))


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_sum_over_the_chosen_experts_matches_the_definition(experts, device, dtype, num_tokens):
    check(experts, Layer(device, dtype), *choose(device, dtype, num_tokens))


def test_one_expert_for_all_tokens_and_others_for_none(experts, device):
    layer = Layer(device, torch.float32, top_k=1)
    check(experts, layer, *choose(device, torch.float32, 37, top_k=1, favourite=5))


@pytest.mark.parametrize("activation", [squared_relu, torch.tanh])
def test_biases_and_an_activation_without_gate_or_kernel(experts, device, dtype, activation):
    check(experts, Layer(device, dtype, bias=True, activation=activation), *choose(device, dtype, 9))


@pytest.mark.parametrize("num_tokens", [3, 12])
def test_what_goes_into_fc2_is_rounded_before_and_after_its_weight(experts, device, num_tokens):
    """One expert whose fc2 passes its inputs on: bits of the activation, scaled."""
    dtype = torch.float16
    layer, x = Layer(device, dtype, count=1, top_k=1, activation=squared_relu), torch.randn(num_tokens, WIDTH)
    layer.fc2[0]["weight"] = torch.eye(WIDTH, FFN, device=device, dtype=dtype)
    x, probs = x.to(device, dtype), torch.linspace(0.1, 0.9, num_tokens, device=device)[:, None]
    layer.fc1[0]["weight"] = torch.eye(FFN, WIDTH, device=device, dtype=dtype)
    got = add(experts, x, torch.ones_like(probs, dtype=torch.bool), probs, layer, None)
    want = (x[:, :FFN].float().relu().square().to(dtype).float() * probs).to(dtype)
    assert torch.equal(got[:, :FFN], want) and not got[:, FFN:].any()


@pytest.mark.parametrize("first", [0, 2, 4])
def test_a_rank_adds_its_own_experts_alone(experts, device, first):
    check(experts, Layer(device, torch.float32, first=first, count=2), *choose(device, torch.float32, 20))


def test_a_token_may_choose_fewer_experts_or_none(experts, device):
    x, chosen, probs = choose(device, torch.float32, 7)
    chosen[1, int(chosen[1].int().argmax())] = False
    chosen[3] = False
    check(experts, Layer(device, torch.float32), x, chosen, probs * chosen)


def test_more_tokens_than_are_sorted_at_once(experts, device):
    from megatron_infer.kernels.triton.experts import SORT_TOKENS

    check(experts, Layer(device, torch.float32), *choose(device, torch.float32, SORT_TOKENS + 3))


def test_high_tiles_and_probabilities_of_another_dtype(experts, device, monkeypatch):
    from megatron_infer.kernels.triton import experts as module

    monkeypatch.setattr(module, "tile_sizes", lambda *_: (64, 32, 32, 4, 2))
    x, chosen, probs = choose(device, torch.float16, 150, favourite=1)
    check(experts, Layer(device, torch.float16), x, chosen, probs.float())


def test_a_token_has_the_same_bits_whatever_the_others_choose(experts, device):
    layer, sums = Layer(device, torch.float32), []
    mine = [part[7].clone() for part in choose(device, torch.float32, 20)]
    for seed in (1, 2):
        x, chosen, probs = choose(device, torch.float32, 20, seed=seed)
        x[7], chosen[7], probs[7] = mine
        out = torch.zeros_like(x)
        add(experts, x, chosen, probs, layer, out)
        sums.append(out[7])
    assert torch.equal(*sums)


def test_launches_are_those_of_the_shape_whatever_is_chosen(experts, device):
    """So that a graph can hold them: other choices, and the answer to them is right."""
    layer, seen = Layer(device, torch.float32), []
    x, chosen, probs = choose(device, torch.float32, 20, seed=1)
    out = torch.zeros_like(x)
    with listening(lambda *call: seen.append(call)):
        add(experts, x, chosen, probs, layer, out)
    assert len(seen) == 6
    grids = [call[2] for call in seen]
    seen.clear()
    with listening(lambda *call: seen.append(call)):
        add(experts, *choose(device, torch.float32, 20, seed=2, favourite=3), layer, out)
    assert [call[2] for call in seen] == grids


def test_a_weight_that_moved_is_read_where_it_is_now(experts, device):
    layer, (x, chosen, probs) = Layer(device, torch.float32), choose(device, torch.float32, 9)
    check(experts, layer, x, chosen, probs)
    layer.fc1[2]["weight"] = layer.fc1[2]["weight"] * 3
    check(experts, layer, x, chosen, probs)


def test_weights_that_begin_anywhere_are_loaded_without_wide_loads(experts, device):
    seen, layer = [], Layer(device, torch.float32)
    weight = layer.fc2[1]["weight"]
    layer.fc2[1]["weight"] = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view_as(weight)
    with listening(lambda *call: seen.append(call[-1].get("ALIGNED"))):
        check(experts, layer, *choose(device, torch.float32, 9))
    assert [aligned for aligned in seen if aligned is not None] == 3 * [True, False]


def test_uneven_experts_are_left_to_the_other_path(experts, device):
    x, *_ = choose(device, torch.float32, 3)
    layer = Layer(device, torch.float32)
    layer.fc2[1]["bias"] = torch.zeros(WIDTH, device=device)
    assert "layout of fc2's bias" in experts.supports(layer.weights, x.dtype)
    assert "float64" in experts.supports(layer.weights, torch.float64)
    layer = Layer(device, torch.float16)
    assert "float16" in experts.supports(layer.weights, x.dtype)


def test_no_tokens_are_no_launch(experts, device):
    x, chosen, probs = choose(device, torch.float32, 0)
    with kernels_launched() as launched:
        add(experts, x, chosen, probs, Layer(device, torch.float32), x)
    assert not launched


def test_watched_weights_are_compared_again_only_when_their_watcher_says_so(experts, device):
    layer, given = Layer(device, torch.float32, bias=True), choose(device, torch.float32, 5)
    weights = layer.weights
    weights.watched()
    check(experts, layer, *given)
    reads, tables = [], [weights.addresses(part, "weight").table for part in ("fc1", "fc2")]

    class Reading(dict):
        def __getitem__(self, name):
            reads.append(name)
            return super().__getitem__(name)

    layer.fc1[:], layer.fc2[:] = [Reading(one) for one in layer.fc1], [Reading(one) for one in layer.fc2]
    assert experts.supports(weights, torch.float32) is None
    add(experts, *given, layer, torch.zeros(5, WIDTH, device=device))
    assert not reads
    weights.watched()  # as behind every update: nothing has moved, and a graph goes on with the same tables
    check(experts, layer, *given)
    assert reads and all(
        weights.addresses(part, "weight").table is table for part, table in zip(("fc1", "fc2"), tables, strict=True)
    )
    layer.fc1[2]["weight"] = layer.fc1[2]["weight"].clone() * 2
    layer.fc2[1]["weight"] = layer.fc2[1]["weight"].half()
    weights.watched()
    assert "needs" in experts.supports(weights, torch.float32) or "differ" in experts.supports(weights, torch.float32)
    layer.fc2[1]["weight"] = layer.fc2[1]["weight"].float()
    weights.watched()
    check(experts, layer, *given)


@pytest.mark.parametrize("write", ["in place", "moved", "replaced"])
def test_an_engine_sees_experts_that_training_moves(device, monkeypatch, write):
    """Its guard looks before each step, so that a layer of 128 experts need not."""
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", "triton")
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    work = [([5, 6, 7, 8], SamplingParams(max_tokens=4, **greedy))]
    model = tiny_hybrid("*E", init_method_std=0.3).to(device)
    engine = make_engine(model, max_sequence_length=64, max_requests=2)
    engine.add_request([5, 6, 7, 8], SamplingParams(max_tokens=8, **greedy))
    for _ in range(3):
        engine.step()
    with torch.no_grad():
        for expert in model.decoder.layers[1].mlp.experts.local_experts:
            for linear in (expert.linear_fc1, expert.linear_fc2):
                if write == "in place":
                    linear.weight.mul_(-1.5)
                elif write == "moved":
                    old, linear.weight.data = linear.weight.data, linear.weight.data * -1.5
                    old.fill_(float("nan"))  # who reads there still answers with it
                else:
                    linear.weight = torch.nn.Parameter(linear.weight * -1.5)
    finish(engine)
    found = tokens_of(run(engine, work))
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", "torch")
    assert found == tokens_of(run(make_engine(model, max_sequence_length=64, max_requests=2), work))
    assert engine.weight_version == 1
