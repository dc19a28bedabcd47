"""A training forward under replay goes to the recorded experts, with gradients, and differs in nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from carried_case import make_engine, make_model
from engines import tokens_of

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ModelError
from megatron_infer.models.router_replay import replay_routing

PROMPTS = [[5, 6, 7, 8, 9], list(range(20, 60)), [3, 99]]
PARAMS = SamplingParams(max_tokens=12, seed=1, ignore_eos=True, return_routing=True, return_sampled_logprobs=True)
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5, "num_moe_experts": 8}
MODELS = {
    "experts": ("experts", {}),
    "hybrid": ("hybrid", {}),
    "pre-softmax, many": ("experts", {"moe_router_pre_softmax": True, "num_moe_experts": 16, "moe_router_topk": 6}),
    "sigmoid": ("experts", SIGMOID | {"moe_router_topk": 3}),
    "groups": ("experts", SIGMOID | {"moe_router_num_groups": 4, "moe_router_group_topk": 2}),
    "one expert": ("experts", {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
}


class Rollout:
    """A model, what it generated, and its training forward over that: rows padded at the end, or one behind another."""

    def __init__(self, kind: str, **changes) -> None:
        self.model = make_model(kind, **changes)
        self.model.requires_grad_(True)
        outputs = make_engine(self.model).generate(PROMPTS, [PARAMS] * 3)
        self.samples = [output.outputs[0] for output in outputs]
        self.routing = [sample.routing for sample in self.samples]
        self.sequences = [prompt + one.token_ids for prompt, one in zip(PROMPTS, self.samples, strict=True)]

    def logits(self, *, width: int | None = None) -> torch.Tensor:
        width = max(map(len, self.sequences)) if width is None else width
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in self.sequences])
        return self.model(ids, torch.arange(width)[None].expand(len(ids), -1), None)

    def mismatch(self) -> float:
        """Largest |log probability of training - of generation| of a drawn token."""
        logits, worst = self.logits().detach(), 0.0
        for row, (prompt, one) in enumerate(zip(PROMPTS, self.samples, strict=True)):
            at = logits[row, len(prompt) - 1 : len(self.sequences[row]) - 1].log_softmax(-1)
            own = at.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            worst = max(worst, (own - torch.tensor(one.raw_logprobs)).abs().max().item())
        return worst

    def chosen(self, run) -> list[torch.Tensor]:
        """Which experts the routers chose while `run` ran, [S, B, E] of each layer."""
        seen, hooks = [], []
        for module in self.model.modules():
            if type(module).__name__.endswith("Router"):
                hooks.append(
                    module.register_forward_hook(
                        lambda _, args, out: seen.append(out[1].unflatten(0, args[0].shape[:-1]))
                    )
                )
        run()
        for hook in hooks:
            hook.remove()
        return seen


@pytest.fixture(scope="module", params=["experts", "hybrid"])
def rollout(request) -> Rollout:
    return Rollout(request.param)


def shake(model: torch.nn.Module) -> None:
    """Routers that choose otherwise, with about the same probabilities."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


@pytest.mark.parametrize("name", MODELS)
def test_replay_of_the_same_choice_changes_no_bit_of_logits_or_gradients(name):
    kind, changes = MODELS[name]
    rollout = Rollout(kind, **changes)
    results = []
    for replays in (False, True):
        rollout.model.zero_grad()
        if replays:
            with replay_routing(rollout.model, rollout.routing, rollout.sequences):
                logits = rollout.logits()
        else:
            logits = rollout.logits()
        logits.float().logsumexp(-1).sum().backward()
        gradients = {key: p.grad.clone() for key, p in rollout.model.named_parameters() if p.grad is not None}
        results.append((logits.detach(), gradients))
    (plain, plain_gradients), (replayed, gradients) = results
    assert torch.equal(plain, replayed)
    assert any(key.endswith("router.weight") for key in gradients) and gradients.keys() == plain_gradients.keys()
    assert all(torch.equal(gradient, plain_gradients[key]) for key, gradient in gradients.items())


@pytest.mark.parametrize("layout", ["rows", "one behind the other"])
def test_a_router_that_has_moved_is_made_to_choose_as_in_generation(rollout, layout):
    weights = {key: value.clone() for key, value in rollout.model.state_dict().items() if value is not None}
    shake(rollout.model)
    try:
        if layout == "rows":
            run = rollout.logits
        else:
            ids = torch.tensor([[token for sequence in rollout.sequences for token in sequence]])

            def run():
                return rollout.model(ids, torch.arange(ids.shape[1])[None], None)

        free = rollout.chosen(run)
        with replay_routing(rollout.model, rollout.routing, rollout.sequences):
            forced = rollout.chosen(run)
        assert any(not torch.equal(a, b) for a, b in zip(free, forced, strict=True)), "the router was not moved"
        start = 0
        for row, (routing, sequence) in enumerate(zip(rollout.routing, rollout.sequences, strict=True)):
            for layer, chosen in enumerate(forced):
                first, column = (0, row) if layout == "rows" else (start, 0)
                got = [one.nonzero().flatten().tolist() for one in chosen[first : first + len(routing), column]]
                assert got == routing[:, layer].tolist()
            start += len(sequence)
    finally:
        rollout.model.load_state_dict(weights, strict=False)


def test_replay_shrinks_the_mismatch_of_a_router_that_has_moved(rollout):
    weights = {key: value.clone() for key, value in rollout.model.state_dict().items() if value is not None}
    assert rollout.mismatch() < 1e-4
    shake(rollout.model)
    try:
        free = rollout.mismatch()
        with replay_routing(rollout.model, rollout.routing, rollout.sequences):
            forced = rollout.mismatch()
        assert forced < free / 2, f"{forced} with replay, {free} without"
    finally:
        rollout.model.load_state_dict(weights, strict=False)


def test_gradients_reach_the_router_through_the_replayed_probabilities(rollout):
    other = [np.sort((array.astype(int) + 1) % 4, axis=-1).astype(np.uint8) for array in rollout.routing]
    rollout.model.zero_grad()
    with replay_routing(rollout.model, other, rollout.sequences):
        rollout.logits().float().logsumexp(-1).sum().backward()
    routers = [p for key, p in rollout.model.named_parameters() if key.endswith("router.weight")]
    assert routers and all(p.grad is not None and p.grad.abs().sum() > 0 for p in routers)


def test_everything_is_as_before_after_an_error_and_generation_takes_no_notice(rollout):
    other = [np.sort((array.astype(int) + 1) % 4, axis=-1).astype(np.uint8) for array in rollout.routing]
    plain, engine = rollout.logits(), make_engine(rollout.model)
    with pytest.raises(ZeroDivisionError), replay_routing(rollout.model, other, rollout.sequences):
        again = engine.generate(PROMPTS, [PARAMS] * 3)
        raise ZeroDivisionError
    assert tokens_of(again) == [one.token_ids for one in rollout.samples]
    assert torch.equal(plain, rollout.logits())
    routers = [module for module in rollout.model.modules() if type(module).__name__.endswith("Router")]
    assert all(router.router_replay is None and not router._forward_pre_hooks for router in routers)


def test_a_wider_batch_is_replayed_and_one_that_is_not_of_the_sequences_is_refused(rollout):
    with replay_routing(rollout.model, rollout.routing, rollout.sequences):
        rollout.logits(width=70)
        for ids in (torch.zeros(2, 70, dtype=torch.int64), torch.zeros(3, 20, dtype=torch.int64)):
            with pytest.raises(ModelError, match=r"row 0 of the forward's tokens begins with none of the 3"):
                rollout.model(ids, torch.arange(ids.shape[1])[None].expand(len(ids), -1), None)


def test_rows_are_known_by_their_tokens_in_any_order_and_number(rollout):
    other = [np.sort((array.astype(int) + 1) % 4, axis=-1).astype(np.uint8) for array in rollout.routing]
    with replay_routing(rollout.model, other, rollout.sequences):
        whole = rollout.logits()
    order = [2, 0]
    ids = torch.zeros(2, 70, dtype=torch.int64)
    for row, place in enumerate(order):
        sequence = rollout.sequences[place][:-1]  # as a trainer's input that is shifted against its labels
        ids[row, : len(sequence)] = torch.tensor(sequence)
    with replay_routing(rollout.model, other, rollout.sequences):
        some = rollout.model(ids, torch.arange(70)[None].expand(2, -1), None)
    for row, place in enumerate(order):
        length = len(rollout.sequences[place]) - 1
        torch.testing.assert_close(some[row, :length], whole[place, :length])


def test_rows_that_change_under_recomputation_are_refused(rollout):
    rows = [torch.tensor([rollout.sequences[place]]) for place in (0, 1)]
    positions = [torch.arange(ids.shape[1])[None] for ids in rows]
    rollout.model.train()
    try:
        with replay_routing(rollout.model, rollout.routing, rollout.sequences):
            for ids, at in zip(rows, positions, strict=True):  # nothing is recomputed: every forward by itself
                rollout.model(ids, at, None)
            rollout.model.config.recompute_granularity = "selective"
            with pytest.raises(ModelError, match="other rows than before"):
                rollout.model(rows[0], positions[0], None)
    finally:
        rollout.model.config.recompute_granularity = None
        rollout.model.eval()


@pytest.mark.parametrize("moved", [False, True], ids=["the router's own", "another choice"])
def test_megatrons_replay_object_is_given_the_record_and_makes_the_choice(moved):
    """The same bits as where a trainer fills the objects by hand; afterwards they hold what they held."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()
    rollout = Rollout("experts", moe_enable_routing_replay=True)
    objects = list(RouterReplay.global_router_replay_instances)
    routers = [module for module in rollout.model.modules() if type(module).__name__.endswith("Router")]
    assert [router.router_replay for router in routers] == objects and len(objects) == 2
    if moved:
        shake(rollout.model)
    place, results = 1, []
    ids, routing = rollout.sequences[place], rollout.routing[place]
    whole = torch.from_numpy(np.concatenate([routing, routing[-1:]]).astype(np.int64))  # the last position chooses too
    for by_hand in (True, False):
        rollout.model.zero_grad()
        tokens, positions = torch.tensor([ids]), torch.arange(len(ids))[None]
        if by_hand:
            logits = rollout.model(tokens, positions, None)
            free = [one.argsort(-1) for one in (whole[:, 0], whole[:, 1])]
            RouterReplay.set_replay_data([whole[:, layer].gather(1, free[layer]) for layer in range(2)])
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            logits = rollout.model(tokens, positions, None)
            RouterReplay.clear_global_router_replay_action()
            RouterReplay.clear_global_indices()
        else:
            before = [dict(vars(one)) for one in objects]
            with replay_routing(rollout.model, [routing], [ids]):
                logits = rollout.model(tokens, positions, None)
                assert all(
                    sorted(row) == sorted(then)
                    for one, layer in zip(objects, range(2), strict=True)
                    for row, then in zip(one.target_topk_idx[:-1].tolist(), routing[:, layer].tolist(), strict=True)
                )
            assert [vars(one) for one in objects] == before
        logits[:, :-1].float().logsumexp(-1).sum().backward()
        results.append((logits[:, :-1].detach(), {k: p.grad.clone() for k, p in rollout.model.named_parameters()}))
    (by_hand, their_gradients), (ours, gradients) = results
    torch.testing.assert_close(ours, by_hand, rtol=1e-5, atol=1e-6)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, their_gradients[key], rtol=1e-4, atol=1e-6, msg=key)


WRONG = {
    "shape": (lambda r: [r[0][:, :1], *r[1:]], r"routing\[0\] has 1 layers of 2 experts, the model 2 of 2"),
    "positions": (lambda r: [r[0], r[1][:-1], r[2]], r"routing\[1\] is of 50 positions, its sequence has 52 tokens"),
    "dtype": (lambda r: [r[0].astype(float), *r[1:]], r"routing\[0\] is float64 of shape"),
    "flat": (lambda r: [r[0], r[1], r[2].reshape(-1)], r"routing\[2\] is uint8 of shape \(\d+,\)"),
    "expert": (lambda r: [r[0] + 2, *r[1:]], r"routing\[0\] names experts \d to 5, the model has 0 to 3"),
    "twice": (lambda r: [r[0] * 0, *r[1:]], r"routing\[0\] sends a token to the same expert twice"),
    "too few": (lambda r: r[:2], "2 routing arrays of 3 sequences"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_arrays_that_do_not_fit_are_refused_by_name(rollout, mistake):
    change, message = WRONG[mistake]
    with (
        pytest.raises(ModelError, match=message),
        replay_routing(rollout.model, change(rollout.routing), rollout.sequences),
    ):
        raise AssertionError("taken")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("dense", {}, "no mixture-of-experts layers"),
        ("experts", {"moe_router_load_balancing_type": "sinkhorn"}, "layers.0.mlp.router: sinkhorn routing"),
    ],
)
def test_models_that_would_not_ask_are_refused_by_name(kind, changes, message):
    with pytest.raises(ModelError, match=message), replay_routing(make_model(kind, **changes), [], []):
        raise AssertionError("taken")
