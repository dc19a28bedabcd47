"""An engine generates with the adapter that trains on its model, and nothing of it is ever stale."""

from __future__ import annotations

import pytest
import torch
from lora_cases import with_lora
from session_case import answers_in, batch, copied, fresh_answers, make_session
from training_case import loss_over, sequences_of

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import AdoptionError, ConfigError, WrongState
from megatron_infer.kernels.native import native_build
from megatron_infer.models.lora.attach import attach_lora
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

BF16 = {"params_dtype": torch.bfloat16}
EXACT = {"batch_invariant": True, "enable_chunked_prefill": True, "max_tokens": 16, "enable_prefix_caching": True}
SEQUENCES = sequences_of([14, 9, 9])
MODELS = {
    "dense": lambda: tiny_gpt(init_method_std=0.2),
    "biases": lambda: tiny_gpt(init_method_std=0.2, add_bias_linear=True, add_qkv_bias=True),
    "hybrid": lambda: tiny_hybrid("M*-", init_method_std=0.2),
}


def merged_answers(session, adapter) -> list[list[int]]:
    """Tokens of a new engine over the merged model, without the adapter."""
    model = copied(session.model)
    with torch.no_grad():
        for linear in model.modules():
            if (pair := getattr(linear, "lora", None)) is not None:
                linear.weight += adapter.scale * pair.b @ pair.a
                pair.b.zero_()
    return fresh_answers(model)


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_generates_with_the_adapter_that_trains(name):
    session = make_session(MODELS[name](), settings={"enable_prefix_caching": name != "hybrid"})
    without = answers_in(session)
    adapter = with_lora(session.model)  # on a model that an engine has adopted already
    first = answers_in(session)
    assert first != without and first == merged_answers(session, adapter)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=2.0)
    with session.training():
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
        report = session.step(optimizer)
    second = answers_in(session)
    assert second != first and second == merged_answers(session, adapter)
    assert session.update_weights().bytes_copied == 0 and report.update_successful
    before = [weight.clone() for weight in session.model.parameters() if not weight.requires_grad]
    adapter.merge()
    assert answers_in(session) == second
    with pytest.raises(WrongState, match="merged"):
        session.score(SEQUENCES, adapter=None)
    adapter.unmerge()
    assert answers_in(session) == second
    after = [weight for weight in session.model.parameters() if not weight.requires_grad]
    assert all(map(torch.equal, before, after))
    adapter.detach()
    assert answers_in(session) == without


def test_shared_experts_have_pairs_and_routed_ones_have_none():
    model = tiny_hybrid("M*ME", init_method_std=0.2, moe_shared_expert_intermediate_size=32)
    session = make_session(model)
    without, adapter = answers_in(session), with_lora(model, targets=("linear_fc1", "linear_fc2"))
    paths = ["decoder.layers.3.mlp.shared_experts.linear_fc1", "decoder.layers.3.mlp.shared_experts.linear_fc2"]
    assert list(adapter.to_adapter().pairs) == paths
    assert without != answers_in(session) == merged_answers(session, adapter)


def test_a_change_that_nobody_announced_is_seen():
    session = make_session(tiny_gpt(init_method_std=0.2), settings={"enable_prefix_caching": True})
    adapter = with_lora(session.model)
    found = [answers_in(session)]
    for parameter in adapter.parameters()[-2:]:  # through .data, as mixed-precision optimizers write
        parameter.data.mul_(-3)
        found.append(answers_in(session))
        assert found[-1] != found[-2] and found[-1] == merged_answers(session, adapter)


@pytest.mark.parametrize("exact", [False, True], ids=["stock", "exact"])
def test_scores_without_the_adapter_are_the_untouched_models(exact):
    model = tiny_gpt(init_method_std=0.2)
    settings = {"batch_invariant": exact}
    untouched = make_session(copied(model), settings=settings).score(SEQUENCES)
    session = make_session(model, settings=settings)
    with_lora(session.model)
    answers_in(session)
    version = session.weight_version
    with session.generating():
        inside = session.score(SEQUENCES, adapter=None)
    for scores in (inside, session.score(SEQUENCES, adapter=None)):
        assert all(map(torch.equal, scores, untouched))
    assert not any(map(torch.equal, session.score(SEQUENCES), untouched))
    answers_in(session)
    assert session.weight_version == version, "scores of the base model change nothing that the engine sees"
    with pytest.raises(ConfigError, match="frozen"):
        session.score(SEQUENCES, adapter=None, grad=True)
    with pytest.raises(ConfigError, match="french"):
        session.score(SEQUENCES, adapter="french")


@pytest.mark.filterwarnings("ignore:enable_prefix_caching=True finds no prefix")
@pytest.mark.parametrize("name", ["fp32", "bf16", "hybrid bf16"])
def test_ratios_at_learning_rate_zero_are_one(name):
    try:
        native_build.load()
    except native_build.NativeUnavailable as error:
        pytest.skip(f"native kernels: {error}")
    how = {"init_method_std": 0.2} | (BF16 if "bf16" in name else {})
    session = make_session(tiny_hybrid("M*-", **how) if "hybrid" in name else tiny_gpt(**how), settings=EXACT)
    adapter = with_lora(session.model)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.0)
    params = SamplingParams(n=3, temperature=1.0, max_tokens=8, ignore_eos=True, logprobs=0, seed=1)
    for step in range(3):
        with session.generating() as roll:
            groups = roll.generate(batch(step)[0].tolist(), params)
        samples = [sample for group in groups for sample in group.samples]
        ids, starts = [sample.ids for sample in samples], [len(sample.prompt_ids) for sample in samples]
        with session.training():
            report = session.score_and_backward(ids, lambda scores, _: sum(s.sum() for s in scores), start=starts)
            for sample, scores in zip(samples, report.scores, strict=True):
                assert torch.equal(scores, torch.tensor(sample.logprobs)), "the importance ratio is exactly 1"
            assert all(parameter.grad.any() for parameter in adapter.parameters())
            session.step(optimizer)


def test_exact_math_refuses_dropout_of_the_adapter():
    session = make_session(tiny_gpt(), settings={"batch_invariant": True})
    with_lora(session.model, dropout=0.2)
    with session.training():
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))  # dropout=False
        with pytest.raises(ConfigError, match=r"drops with probability 0\.2"):
            session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), dropout=True)


def test_an_engine_with_adapters_of_its_own_takes_no_attached_one():
    settings = {"lora": LoRAConfig(max_loras=2)}
    model = tiny_gpt()
    adapter = attach_lora(model)
    with pytest.raises(ConfigError, match=r"trains on it.*leave lora None"):
        make_session(model, settings=settings)
    adapter.detach()
    session = make_session(model, settings=settings)
    attach_lora(model)
    with pytest.raises(AdoptionError, match="adapters of its own"):
        answers_in(session)
