"""A session's gradients and steps are those of Megatron's own training step."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kinds import SOFTCAPPED
from session_case import PARAMS, make_session, prompts
from trainers import MegatronTrainer, TorchTrainer
from training_case import (
    EXPERTS,
    assert_equal,
    error_of,
    gradients,
    loss_over,
    megatron_backward,
    megatron_step,
    sequences_of,
)

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, ModelError, WrongState
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.router_replay import replay_routing
from megatron_infer.rl.session import RolloutSession
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import stock_spec, tiny_gpt, tiny_hybrid

pytestmark = pytest.mark.filterwarnings("ignore:.*leaf Tensor:UserWarning", "ignore:.*deprecated:FutureWarning")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
DROPOUT = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
MODELS: dict[str, Any] = {
    "dense": lambda **how: tiny_gpt(**how),
    "dense, full recompute": lambda **how: tiny_gpt(**FULL, **how),
    "softcapped": lambda **how: tiny_gpt(**SOFTCAPPED, **how),
    "experts": lambda **how: tiny_gpt(**EXPERTS, **how),
    "experts, full recompute": lambda **how: tiny_gpt(**EXPERTS, **FULL, **how),
    "experts, selective recompute": lambda **how: tiny_gpt(**EXPERTS, **SELECTIVE, recompute_modules=["moe"], **how),
    "balanced by sequence": lambda **how: tiny_gpt(
        **EXPERTS | {"moe_router_load_balancing_type": "seq_aux_loss"}, **how
    ),
    "hybrid": lambda **how: tiny_hybrid("M*-ME", **EXPERTS, **how),
}
SEQUENCES = sequences_of([14, 14, 9, 9, 9, 8])
GROUPS = [[0, 1], [2, 3, 4], [5]]
LIMIT = 28


@pytest.fixture(autouse=True)
def _no_record_of_another_models_layers():
    """megatron-core keeps its record of auxiliary losses for one number of layers."""
    if mcore.version() >= (0, 18):
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        get_moe_metrics_tracker()._metrics.clear()
    else:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        get_moe_layer_wise_logging_tracker().clear()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_megatrons_own_step(name):
    model, twin = MODELS[name](**DROPOUT), MODELS[name]().train()
    want_loss = megatron_backward(twin, SEQUENCES, GROUPS)
    session = make_session(model)
    with cpu_shim(4), session.training():
        report = session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=LIMIT)
    assert report.num_micro_batches == 3 and report.loss == pytest.approx(want_loss, rel=5e-7)
    assert_equal(gradients(model), gradients(twin))
    assert not model.training and model.decoder.layers[0].training is False
    assert model.config.hidden_dropout == model.embedding.embedding_dropout.p == 0.3


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "no auxiliary losses": (
        EXPERTS,
        EXPERTS | {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None},
        {"auxiliary_losses": False},
    ),
    "the model's own dropout": (DROPOUT, DROPOUT, {"dropout": True}),
    "the optimizer's loss scale": (EXPERTS, EXPERTS, {}),
}
"""Settings of the model and of the one that Megatron trains, and what the session is asked for."""


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_follow_the_options(name):
    settings, twins, asked = OPTIONS[name]
    model, twin = tiny_gpt(**settings), tiny_gpt(**twins)
    if "scale" in name:
        for one in (model, twin):
            one.config.grad_scale_func = lambda loss: loss * 64.0
    session = make_session(model)
    torch.manual_seed(3)
    with session.training():
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=LIMIT, **asked)
    torch.manual_seed(3)
    megatron_backward(twin.train(), SEQUENCES, GROUPS)
    assert_equal(gradients(model), gradients(twin))
    if asked.get("dropout"):
        with pytest.raises(ConfigError, match="dropout=True without grad=True"):
            session.score(SEQUENCES, dropout=True)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_in_bf16_are_as_near_to_those_in_fp32_as_megatrons_own(tied):
    exact, *rounded = (
        tiny_gpt(params_dtype=dtype, init_method_std=0.2, share_embeddings_and_output_weights=tied).train()
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
    )
    for model in rounded:
        model.load_state_dict(exact.state_dict())
    exact.load_state_dict(rounded[0].state_dict())
    session, twin = make_session(rounded[0]), rounded[1]
    for model in (exact, twin):
        megatron_backward(model, SEQUENCES, GROUPS)
    with session.training():
        report = session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=LIMIT)
    want = gradients(exact)
    assert 1e-3 < error_of(gradients(rounded[0]), want) < 1.2 * error_of(gradients(twin), want)
    for got, score in zip(report.scores, session.score(SEQUENCES, micro_batch_tokens=LIMIT), strict=True):
        assert torch.equal(got, score)


def test_scores_and_gradients_follow_temperature_start_and_padding():
    sequences = sequences_of([14, 11, 3, 12, 5, 13])
    model, twin = (tiny_gpt(**EXPERTS) for _ in range(2))
    session = make_session(model)
    with session.training():
        want = session.score(sequences, temperature=0.7)
        report = session.score_and_backward(sequences, loss_over(sequences), temperature=0.7, micro_batch_tokens=LIMIT)
    groups = [[0, 5], [3, 1], [4, 2]]
    assert report.num_micro_batches == len(groups)
    megatron_backward(twin.train(), sequences, groups, temperature=0.7)
    assert_equal(gradients(model), gradients(twin), tolerance=1e-6)
    for got, expected in zip(report.scores, want, strict=True):
        assert got.dtype == torch.float32 and not got.requires_grad
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    with session.training():
        ends = session.score_and_backward(sequences, lambda scores, _: torch.cat(scores).sum(), start=2).scores
    for got, expected in zip(ends, session.score(sequences), strict=True):
        torch.testing.assert_close(got, expected[1:], atol=2e-6, rtol=0)


def test_auxiliary_losses_are_those_that_megatron_logs():
    from megatron.core.transformer.moe import moe_utils

    model, twin = (tiny_gpt(**EXPERTS) for _ in range(2))
    session = make_session(model)
    megatron_backward(twin.train(), SEQUENCES, GROUPS)
    logged: dict[str, torch.Tensor] = {}
    with cpu_shim(4):
        moe_utils.track_moe_metrics(1 / len(GROUPS), 0, total_loss_dict=logged, num_layers=2)
    with session.training():
        report = session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=LIMIT)
    assert set(report.auxiliary_losses) == set(logged) == {"load_balancing_loss", "z_loss"}
    for name, values in report.auxiliary_losses.items():
        assert values.shape == (2,)
        torch.testing.assert_close(values.mean(), logged[name])
    with session.training():
        without = session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), auxiliary_losses=False)
    assert without.auxiliary_losses == {} and model.config.moe_aux_loss_coeff == 0.3


def test_a_forward_of_the_callers_own_has_the_scale_of_auxiliary_losses_that_it_had():
    model, twin = (tiny_gpt(**EXPERTS).train() for _ in range(2))
    mcore.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    ids = torch.tensor(SEQUENCES[:2])
    session = make_session(model)
    with session.training():
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=LIMIT)
        session.zero_grad(torch.optim.SGD(model.parameters(), lr=0.1))
        for one in (model, twin):
            one(ids, torch.arange(14)[None].expand(2, -1), None, labels=ids).mean().backward()
    assert_equal(gradients(model), gradients(twin))
    mcore.MoEAuxLossAutoScaler.main_loss_backward_scale = None


@pytest.mark.parametrize("name", ["experts", "experts, full recompute"])
def test_gradients_of_scores_with_a_backward_of_the_callers_own_are_the_same(name):
    model, twin = (MODELS[name]().train() for _ in range(2))
    session = make_session(model)
    with cpu_shim(4), session.training():
        scores = session.score(SEQUENCES, grad=True, micro_batch_tokens=LIMIT)
        loss_over(SEQUENCES)(scores, list(range(len(SEQUENCES)))).backward()
    megatron_backward(twin, SEQUENCES, GROUPS)
    assert_equal(gradients(model), gradients(twin), tolerance=1e-6)


def test_scores_with_gradients_take_a_second_backward_and_no_second_derivative():
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model)
    with session.training():
        total = loss_over(SEQUENCES)(session.score(SEQUENCES, grad=True), list(range(len(SEQUENCES))))
        weight = model.output_layer.weight
        first, again = (torch.autograd.grad(total, weight, retain_graph=True)[0] for _ in range(2))
        assert first.any() and torch.equal(first, again)
        with pytest.raises(ConfigError, match="no second derivative"):
            torch.autograd.grad(total, weight, create_graph=True)


@pytest.mark.parametrize(("recompute", "times"), [({}, 1), (FULL, 2)], ids=["none", "full"])
def test_activations_are_recomputed_as_configured(recompute, times):
    model = tiny_gpt(**recompute)
    seen: list[int] = []
    session = make_session(model)
    hook = model.decoder.layers[0].register_forward_hook(lambda *_: seen.append(1))
    with cpu_shim(4), session.training():
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=LIMIT)
        assert len(seen) == times * len(GROUPS)
    hook.remove()


def test_routers_count_tokens_for_their_bias_and_step_updates_it():
    how = EXPERTS | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    with cpu_shim(4):
        model, twin = (tiny_gpt(**how) for _ in range(2))
        session, router = make_session(model), model.decoder.layers[0].mlp.router
        from megatron.core.distributed import finalize_model_grads

        trainer = MegatronTrainer(twin, distributed=False)
        trainer.model.train()
        megatron_backward(trainer.model, SEQUENCES, GROUPS, finalize=finalize_model_grads)
        with session.training():
            session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=LIMIT)
            assert router.local_tokens_per_expert.sum() == 2 * sum(map(len, SEQUENCES))
            session.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert router.expert_bias.abs().max() > 0 and router.local_tokens_per_expert.sum() == 0
    torch.testing.assert_close(router.expert_bias, twin.decoder.layers[0].mlp.router.expert_bias)


def test_gradients_follow_replayed_experts():
    model, twin = tiny_gpt(**EXPERTS), tiny_gpt(**EXPERTS)
    experts = torch.randint(0, 2, (13, 2, 1), generator=torch.Generator().manual_seed(5))
    record = torch.cat([experts, experts + 2], -1).to(torch.uint8).numpy()
    found = {}
    for name, one in (("replayed", model), ("free", twin)):
        session = make_session(one)
        replay = replay_routing(one, [record], SEQUENCES[:1]) if name == "replayed" else nullcontext()
        with session.training(), replay:
            found[name] = session.score_and_backward(SEQUENCES[:1], loss_over(SEQUENCES))
    assert found["replayed"].scores[0].tolist() != found["free"].scores[0].tolist()
    twin.zero_grad()
    with replay_routing(twin, [record], SEQUENCES[:1]):
        megatron_backward(twin.train(), SEQUENCES, [[0]])
    assert_equal(gradients(model), gradients(twin))


# ------------------------------------------------------------------ exact mode


def test_exact_scores_with_gradients_are_the_engines_log_probabilities():
    model = tiny_gpt(init_method_std=0.2, **DROPOUT)
    session = make_session(model, settings={"batch_invariant": True})
    with session.generating() as roll:
        samples = [(group.prompt_ids, group.samples[0]) for group in roll.generate(prompts(), PARAMS)]
    ids = [prompt + sample.token_ids for prompt, sample in samples]
    with session.training():
        report = session.score_and_backward(ids, lambda scores, _: torch.cat(scores).sum(), micro_batch_tokens=40)
    for (_, sample), scores in zip(samples, report.scores, strict=True):
        assert scores[-len(sample.token_ids) :].tolist() == sample.raw_logprobs
    twin = tiny_gpt(init_method_std=0.2).train()
    torch.cat(make_session(twin).score(ids, grad=True)).sum().backward()
    assert_equal(gradients(model), gradients(twin), tolerance=1e-3)
    with session.training(), pytest.raises(ConfigError, match=r"dropout=True with batch_invariant=True.* 0\.3"):
        session.score_and_backward(ids, lambda scores, _: scores[0].sum(), dropout=True)


def test_exact_gradients_refuse_what_is_not_exact_by_name():
    session = make_session(tiny_gpt(**EXPERTS), settings={"batch_invariant": True})
    with session.training():
        with pytest.raises(ConfigError, match=r"moe_aux_loss_coeff=0\.3.*auxiliary_losses=False"):
            session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
        with pytest.raises(ConfigError, match=r"moe_aux_loss_coeff=0\.3"):
            session.score(SEQUENCES, grad=True)
        session.model.config.moe_router_enable_expert_bias = True
        with pytest.raises(ModelError, match="tokens are not counted for the bias"):
            session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), auxiliary_losses=False)
        session.model.config.moe_router_enable_expert_bias = False
        session.zero_grad(torch.optim.SGD(session.model.parameters(), lr=0.1))
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), auxiliary_losses=False)


# ------------------------------------------------------------------ steps

TRAINERS = {
    "plain": lambda: TorchTrainer(tiny_gpt(), smooth=True),
    "torch DDP": lambda: TorchTrainer(tiny_gpt(), ddp=True, smooth=True),
    "Megatron DDP": lambda: MegatronTrainer(tiny_gpt(), distributed=False, smooth=True),
    "distributed optimizer": lambda: MegatronTrainer(tiny_gpt(), distributed=True, smooth=True),
    "reduced and gathered in overlap": lambda: MegatronTrainer(tiny_gpt(), distributed=True, overlap=True, smooth=True),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_five_rounds_of_the_loop_train_as_a_plain_megatron_loop(name):
    ours, plain = TRAINERS[name](), TRAINERS[name]()
    session = make_session([ours.model])
    for step in range(5):
        sequences = sequences_of([14, 14, 9, 9, 9, 8], seed=step)
        want, norm = megatron_step(plain, sequences, GROUPS)
        with session.generating() as roll:
            roll.generate(prompts(), PARAMS)
        with cpu_shim(4), session.training():
            report = session.score_and_backward(sequences, loss_over(sequences), micro_batch_tokens=LIMIT)
            done = session.step(ours.optimizer)
        assert report.loss == pytest.approx(want, rel=1e-6)
        assert done.update_successful and done.weight_version == session.weight_version == step + 1
        assert done.grad_norm == pytest.approx(norm, rel=1e-5)
        assert not any(grad.any() for grad in gradients(session.model).values())
    with session.generating():
        session.engine.verify_weights()
    got, wanted = (dict(trainer.model.named_parameters()) for trainer in (ours, plain))
    assert_equal(got, wanted)


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_the_loop_that_readme_prints_trains_as_a_plain_megatron_loop(name, monkeypatch):
    """Its own text, twice, next to Megatron's step on the samples that it drew."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (block,) = [one for one in blocks if "session.score_and_backward(" in one]
    place = block.index("with session.generating()")
    found = {"score_and_backward": [], "step": []}

    def recording(name, call):
        def recorded(*given, **how):
            found[name].append(call(*given, **how))
            return found[name][-1]

        return recorded

    for call in found:
        monkeypatch.setattr(RolloutSession, call, recording(call, getattr(RolloutSession, call)))
    ours, plain = TRAINERS[name](), TRAINERS[name]()
    for trainer in (ours, plain):
        for group in trainer.optimizer.param_groups:
            group["lr"] = 1e-3  # the loss of hundreds of tokens has no bound: large steps magnify rounding
    names = {"model": ours.model, "tokenizer": None, "optimizer": ours.optimizer, "prompts": prompts()}
    names |= {"InferenceConfig": InferenceConfig, "SamplingParams": SamplingParams}
    exec(block[:place], names)
    for step in range(2):
        with cpu_shim(4):
            exec(block[place:], names)
        samples, advantages = names["samples"], names["advantages"]
        firsts = [len(sample.prompt_ids) - 1 for sample in samples]

        def loss(scores, indices, firsts=firsts, advantages=advantages):
            parts = [advantages[i] * one[firsts[i] :].sum() for i, one in zip(indices, scores, strict=True)]
            return -sum(parts) / len(firsts)

        want, norm = megatron_step(plain, [sample.ids for sample in samples], [range(len(samples))], loss=loss)
        assert found["score_and_backward"][step].loss == pytest.approx(want, rel=1e-5)
        assert found["step"][step].grad_norm == pytest.approx(norm, rel=1e-4)
    assert names["session"].weight_version == 2
    got, wanted = (dict(trainer.model.named_parameters()) for trainer in (ours, plain))
    assert_equal(got, wanted, tolerance=1e-5)


def test_data_parallel_ranks_reduce_once_however_many_micro_batches():
    ddp = torch.nn.parallel.DistributedDataParallel(tiny_gpt())
    reduced: list[int] = []

    def count(_, bucket):  # torch reads annotations, and takes none that are text
        reduced.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, count)
    session = make_session(ddp)
    with session.training():
        for limit in (LIMIT, LIMIT, 8192):  # torch's DDP settles its buckets in the first
            reduced.clear()
            session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=limit)
            assert sorted(reduced) == list(range(len(reduced))) and reduced


def test_a_step_that_the_optimizer_skips_leaves_the_version():
    trainer = TRAINERS["Megatron DDP"]()
    session = make_session(trainer.model)
    trainer.optimizer.step = lambda: (False, None, None)
    with cpu_shim(4), session.training():
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
        report = session.step(trainer.optimizer)
    assert not report.update_successful and report.grad_norm is None and report.weight_version == 0
    assert not any(grad.any() for grad in gradients(session.model).values())


# ------------------------------------------------------------------ errors


def test_gradients_of_a_step_that_failed_are_not_reduced_and_taken_again(monkeypatch):
    trainer = TRAINERS["Megatron DDP"]()
    session, taken = make_session(trainer.model), trainer.optimizer.step

    def breaks() -> None:
        raise torch.OutOfMemoryError("no memory for the optimizer")

    with cpu_shim(4), session.training():
        monkeypatch.setattr(trainer.optimizer, "step", breaks)
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
        with pytest.raises(torch.OutOfMemoryError):
            session.step(trainer.optimizer)
        monkeypatch.setattr(trainer.optimizer, "step", taken)
        for call in (
            lambda: session.step(trainer.optimizer),
            lambda: session.score_and_backward(SEQUENCES, loss_over(SEQUENCES)),
        ):
            with pytest.raises(WrongState, match=r"step\(\) failed.*zero_grad"):
                call()
        session.zero_grad(trainer.optimizer)
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
        assert session.step(trainer.optimizer).weight_version == 1


def test_a_step_without_gradients_is_refused_and_the_next_one_is_not():
    model = tiny_gpt().train()
    session, optimizer = make_session(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with session.training():
        with pytest.raises(WrongState, match="step\\(\\) without gradients"):
            session.step(optimizer)
        assert session.weight_version == 0
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
        assert session.step(optimizer).weight_version == 1


def test_zero_grad_drops_gradients_of_parameters_that_the_optimizer_lacks():
    model = tiny_gpt().train()
    session, optimizer = make_session(model), torch.optim.SGD(model.decoder.parameters(), lr=0.1)
    with session.training():
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
        assert model.output_layer.weight.grad.any()
        session.zero_grad(optimizer)
    assert not any(grad.any() for grad in gradients(model).values())


def test_training_calls_belong_into_training():
    session = make_session(tiny_gpt())
    optimizer = torch.optim.SGD(session.model.parameters(), lr=0.1)
    for block in (session.generating, session.scoring):
        with block(), pytest.raises(WrongState, match="within training"):
            session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
    with pytest.raises(WrongState, match=r"step\(\) in no block"):
        session.step(optimizer)
    assert session.weight_version == 0


def test_an_error_in_the_loss_leaves_the_session_usable():
    model = tiny_gpt(**DROPOUT).train()
    session, optimizer = make_session(model), torch.optim.SGD(model.parameters(), lr=0.1)

    def breaks(scores: list[torch.Tensor], indices: list[int]) -> torch.Tensor:
        if 5 in indices:
            raise KeyError("reward")
        return torch.cat(scores).sum()

    with session.training():
        with pytest.raises(KeyError, match="reward") as caught:
            session.score_and_backward(SEQUENCES, breaks, micro_batch_tokens=LIMIT)
        assert "failed in micro-batch 3 of 3" in caught.value.__notes__[0]
        assert model.training and model.config.hidden_dropout == 0.3
        with pytest.raises(WrongState, match=r"incomplete gradients.*micro-batch 3 of 3.*zero_grad"):
            session.step(optimizer)
        with pytest.raises(WrongState, match="incomplete gradients"):
            session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
        session.zero_grad(optimizer)
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES), micro_batch_tokens=LIMIT)
        twin = tiny_gpt().train()
        megatron_backward(twin, SEQUENCES, GROUPS)
        assert_equal(gradients(model), gradients(twin))
        assert session.step(optimizer).weight_version == 1
    with session.generating() as roll:
        assert len(roll.generate(prompts(), PARAMS)) == 3


@pytest.mark.parametrize(
    ("sequences", "loss", "message"),
    [
        (SEQUENCES, lambda scores, _: scores[0], r"shape \[13\] for sequences \[0, 1\]"),
        (SEQUENCES, lambda scores, _: 1.0, "returned 1.0"),
        (SEQUENCES, lambda scores, _: scores[0].detach().sum(), r"does not depend on the scores.*0 \* scores"),
        (SEQUENCES, torch.zeros(()), r"loss is a Tensor; .* function of \(scores, indices\)"),
        ([], loss_over([]), "without sequences"),
    ],
)
def test_what_is_no_loss_is_refused(sequences, loss, message):
    session = make_session(tiny_gpt())
    with session.training(), pytest.raises(ConfigError, match=message):
        session.score_and_backward(sequences, loss, micro_batch_tokens=LIMIT)


def test_calls_that_cannot_give_the_trainers_gradients_are_refused():
    session = make_session(tiny_gpt())
    session.model.config.calculate_per_token_loss = True
    with session.training(), pytest.raises(ConfigError, match="calculate_per_token_loss=True: gradients are"):
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
    overlapped = TRAINERS["reduced and gathered in overlap"]()
    session = make_session(overlapped.model)
    with cpu_shim(4), session.training():
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
        with pytest.raises(WrongState, match=r"twice before step.*all sequences in one call"):
            session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
        session.step(overlapped.optimizer)
        session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))


def test_a_late_backward_that_would_recompute_another_forward_is_refused():
    session = make_session(tiny_gpt(**FULL, **DROPOUT).train())
    with session.training(), pytest.raises(ConfigError, match=r"dropout of 0.3 is on again.*score_and_backward"):
        session.score(SEQUENCES, grad=True)
    session = make_session(tiny_gpt(**FULL))
    with pytest.raises(ConfigError, match=r"eval mode by then; call model\.train"):
        session.score(SEQUENCES, grad=True)
    with session.generating(), pytest.raises(ConfigError, match=r"within generating\(\)"):
        session.score(SEQUENCES, grad=True)


def test_a_model_in_eval_mode_within_a_new_wrapper_is_put_into_train_mode():
    trainer = MegatronTrainer(tiny_gpt(**EXPERTS), distributed=False)
    assert trainer.model.training and not trainer.model.module.training
    session = make_session(trainer.model)
    with cpu_shim(4), session.training():
        report = session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
    assert "z_loss" in report.auxiliary_losses
    assert trainer.model.training and not trainer.model.module.training


def test_a_module_that_is_in_eval_mode_by_the_trainers_wish_stays_so():
    model = tiny_gpt(**EXPERTS).train()
    model.decoder.layers[0].mlp.router.eval()
    session = make_session(model)
    with session.training():
        report = session.score_and_backward(SEQUENCES, loss_over(SEQUENCES))
    assert report.auxiliary_losses["z_loss"][0] == 0 < report.auxiliary_losses["z_loss"][1]
    assert not model.decoder.layers[0].mlp.router.training


def test_stock_modules_on_a_cpu_name_the_remedy():
    session = make_session(tiny_gpt(spec=stock_spec))
    with pytest.raises(ModelError, match=r"with_inference\(spec\).*batch_invariant=True"):
        session.score(SEQUENCES)
    exact = make_session(tiny_gpt(spec=stock_spec), settings={"batch_invariant": True})
    twin = make_session(tiny_gpt(), settings={"batch_invariant": True})
    for got, want in zip(exact.score(SEQUENCES), twin.score(SEQUENCES), strict=True):
        assert torch.equal(got, want)
