"""The exact forward trains: gradients of the stock modules, the engine's bits, and everything as before afterwards."""

from __future__ import annotations

import pytest
import torch
from engines import logprobs_of
from exact_case import BF16, MODELS, VOCAB, differing, make_engine, model_of, run, workload

from megatron_infer.errors import AdoptionError, ModelError
from megatron_infer.models import moe
from megatron_infer.models.exact_forward import exact_logprobs, exact_math, token_logprobs
from megatron_infer.models.mcore_compat import Float16Module
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.usefixtures("native_kernels")
LENGTH = 37


def batch(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(4, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(LENGTH)[None].expand(rows, -1), ids.roll(-1, 1)


def gradients(model: torch.nn.Module, *, exact: bool, **more) -> dict[str, torch.Tensor]:
    ids, positions, labels = batch()
    model.zero_grad()
    if exact:
        with exact_math(model):
            loss = model(ids, positions, None, labels=labels, **more)
    else:
        loss = model(ids, positions, None, labels=labels, **more)
    weights = torch.linspace(-1, 2, loss.numel()).view(loss.shape)
    (loss * weights).mean().backward()  # behind the context: the graph needs nothing of it
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", [name for name in MODELS if "bf16" not in name])
def test_gradients_are_those_of_the_stock_forward(name, mode):
    model = model_of(name)
    getattr(model, mode)()
    stock, exact = gradients(model, exact=False), gradients(model, exact=True)
    assert stock.keys() == exact.keys()
    for key, wanted in stock.items():
        assert (exact[key] - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9, key


@pytest.mark.parametrize("name", ["tied bf16", "hybrid bf16"])
def test_gradients_of_bf16_models_agree_within_their_rounding(name):
    model = model_of(name)
    stock, exact = gradients(model, exact=False), gradients(model, exact=True)
    assert stock.keys() == exact.keys()
    for key, wanted in stock.items():
        assert exact[key].dtype is wanted.dtype
        assert (exact[key] - wanted).float().norm() <= 0.15 * wanted.float().norm(), key


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch_gives_the_engines_bits(name):
    """What a trainer does: rows padded on the right, logits, the drawn tokens' log probabilities."""
    model = model_of(name).train()
    work = workload(5, sampled=True)[:3]
    outputs = run(make_engine(model), work)
    sequences = [p + o.outputs[0].token_ids for (p, _), o in zip(work, outputs, strict=True)]
    longest = max(map(len, sequences))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in sequences])
    mask = torch.ones(1, 1, longest, longest, dtype=torch.bool).triu(1)
    positions = torch.arange(longest)[None].expand(len(ids), -1)
    with exact_math(model) as exact:
        logits = model(ids, positions, mask)
        loss = model(ids, positions, None, labels=ids.roll(-1, 1))
    logprobs = token_logprobs(logits[:, :-1], ids[:, 1:], vocab_size=exact.vocab_size)
    assert logprobs.requires_grad
    assert torch.equal(-loss[:, :-1], logprobs)
    scored = exact_logprobs(model, sequences)
    for row, whole, (prompt, _), output in zip(logprobs, scored, work, outputs, strict=True):
        assert torch.equal(row[: len(whole)], whole)
        sample = output.outputs[0]
        assert row[len(prompt) - 1 : len(whole)].tolist() == logprobs_of(sample)


@pytest.mark.parametrize("padding", [0, 3])
def test_packed_sequences_are_scored_each_by_itself(padding):
    from megatron.core.packed_seq_params import PackedSeqParams

    model = model_of("hybrid")
    sequences = [list(range(5, 40)), [9], list(range(60, 20, -1))]
    starts, places = torch.tensor([0, 35, 36, 76]), torch.arange(4) * padding
    padded = {"cu_seqlens_q_padded": starts + places, "cu_seqlens_kv_padded": starts + places} if padding else {}
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, **padded)
    ids = torch.tensor([[token for row in sequences for token in row + [0] * padding]])
    with exact_math(model), torch.no_grad():
        logits = model(ids, None, None, packed_seq_params=packed)[0]
    for begin, row, whole in zip(starts + places, sequences, exact_logprobs(model, sequences), strict=False):
        assert torch.equal(token_logprobs(logits[begin : begin + len(row) - 1], torch.tensor(row[1:])), whole)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_are_a_log_softmax_with_its_gradient(temperature):
    logits = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tokens = torch.randint(0, 33, (3, 5), generator=torch.Generator().manual_seed(1))
    ours = token_logprobs(logits, tokens, temperature=temperature, vocab_size=33)
    theirs = (logits[..., :33] / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    weights = torch.linspace(-1, 1, 15).view(3, 5)
    (mine,) = torch.autograd.grad((ours * weights).sum(), logits)
    (wanted,) = torch.autograd.grad((theirs * weights).sum(), logits)
    torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-5)


def test_gradients_go_through_exact_logprobs():
    model = model_of("swiglu")
    sequences = [list(range(5, 40)), [9, 8]]
    model.zero_grad()
    graded = exact_logprobs(model, sequences, grad=True)
    assert all(torch.equal(a, b) for a, b in zip(graded, exact_logprobs(model, sequences), strict=True))
    assert [len(row) for row in graded] == [34, 1]
    (-torch.cat(graded).sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputation_keeps_bits_and_gradients(granularity):
    model = model_of("experts").train()
    plain = gradients(model, exact=True)
    model.config.recompute_granularity = granularity
    again = gradients(model, exact=True)
    assert all(torch.equal(plain[key], again[key]) for key in plain)


@pytest.mark.parametrize("pairs", [1, 7, 40])
def test_experts_have_the_same_bits_in_any_groups(pairs, monkeypatch):
    model, sequences = model_of("experts"), [list(range(5, 40)), [9, 8]]
    whole, gradients_of_whole = exact_logprobs(model, sequences), gradients(model, exact=True)
    monkeypatch.setattr(moe, "GROUP_PAIRS", pairs)
    assert all(torch.equal(a, b) for a, b in zip(exact_logprobs(model, sequences), whole, strict=True))
    found = gradients(model, exact=True)
    for name, wanted in gradients_of_whole.items():
        torch.testing.assert_close(found[name], wanted, msg=name)


def test_the_stock_forward_is_back_afterwards():
    model = model_of("tied bf16")
    ids, positions, _ = batch()
    keys, own = list(model.state_dict()), set(model.__dict__)
    with torch.no_grad():
        before = model(ids, positions, None)
        with pytest.raises(RuntimeError, match="on the way"), exact_math(model):
            inside = model(ids, positions, None)
            with exact_math(model):
                assert torch.equal(model(ids, positions, None), inside)
            assert torch.equal(model(ids, positions, None), inside)
            raise RuntimeError("on the way")
        assert torch.equal(model(ids, positions, None), before)
    assert not torch.equal(inside, before)
    assert list(model.state_dict()) == keys and set(model.__dict__) == own


def test_a_model_in_megatron_ddp_trains_and_stays_exact():
    with cpu_shim(3):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        inner = tiny_gpt(vocab_size=VOCAB, **BF16, max_sequence_length=256)
        model = DistributedDataParallel(
            inner.config, DistributedDataParallelConfig(), Float16Module(inner.config, inner)
        ).train()
        engine = make_engine(model)
        work = workload(5, sampled=False)[:3]
        for _ in range(2):
            outputs = run(engine, work)
            assert differing(model, work, outputs)[0] == 0
            model.zero_grad_buffer()
            ids, positions, labels = batch()
            with exact_math(model):
                model(ids, positions, None, labels=labels).mean().backward()
            model.finish_grad_sync()
            with torch.no_grad():
                for parameter in inner.parameters():
                    assert parameter.main_grad.abs().sum() > 0
                    parameter.data -= (0.5 * parameter.main_grad).to(parameter.dtype)
            assert differing(model, work, outputs)[0] > 0
            engine.refresh_weights()


REFUSALS = {
    "dropout": ({"hidden_dropout": 0.1}, {}, "hidden_dropout=0.1, and dropout is random"),
    "auxiliary loss": (
        {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.01},
        {},
        "moe_aux_loss_coeff=0.01, and the balancing loss",
    ),
    "mask": ({}, {"attention_mask": torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool)}, "not the causal one"),
    "positions": ({}, {"position_ids": torch.arange(LENGTH)[None] + 1}, "position_ids are not"),
    "embeddings": ({}, {"decoder_input": torch.zeros(LENGTH, 2, 64)}, "decoder_input is given"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_would_not_be_exact_is_refused_by_name(what):
    settings, more, message = REFUSALS[what]
    model = tiny_gpt(**settings).train()
    ids, positions, _ = batch()
    arguments = {"position_ids": positions, "attention_mask": None} | more
    with exact_math(model), pytest.raises(ModelError, match=message):
        model(ids, **arguments)


def test_hooks_of_inner_modules_are_refused():
    model = tiny_gpt()
    model.decoder.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(AdoptionError, match="forward hook"), exact_math(model):
        pass


def test_empty_sequences_are_refused():
    with pytest.raises(ModelError, match="each needs at least one"):
        exact_logprobs(tiny_gpt(), [[1, 2], []])
