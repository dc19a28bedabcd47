"""Worlds, costs and requests drawn at random."""

from __future__ import annotations

import random

from fake_device import EOS, VOCAB, continued, make_group
from world import Swap, World

from megatron_infer.config.inference import PreemptionMode
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.draft_depth import NO_PROPOSAL, DraftDepth, Proposal
from megatron_infer.scheduler.request import CacheUse, Request
from megatron_infer.scheduler.step_costs import StepCosts


def random_world(rng: random.Random, *, drafting: float = 0.0, **fixed) -> World:
    """drafting: probability that tokens are drafted."""
    num_blocks = rng.randint(1, 6) if rng.random() < 0.2 else rng.randint(6, 40)
    caching = fixed.get("caching", rng.random() < 0.65)
    fields = {
        "num_blocks": num_blocks,
        "block_size": rng.choice([1, 2, 4, 8]),
        "num_rows": rng.randint(1, 8),
        "max_tokens": rng.randint(1, 24),
        "chunked": rng.random() < 0.6,
        "paused_limit": rng.choice([0, rng.randint(0, num_blocks), num_blocks]),
        "caching": caching,
        "keep_cached": caching and rng.random() < 0.6,
        "overlap": rng.random() < 0.6,
        "swap": Swap(
            slots=rng.choice([0, rng.randint(1, num_blocks), 2 * num_blocks]),
            mode=rng.choice(list(PreemptionMode)),
            costs=random_costs(rng),
        ),
        "num_cached_states": rng.choice([None] * 5 + [0, 1, 2, 4, 16]),
    }
    world = World(**(fields | fixed))
    if rng.random() < drafting:
        world.proposer = AdversarialProposer(rng, lambda: world.version)
        if rng.random() < 0.5:
            dear = rng.choice([1.05e-4, 1.2e-4, 5e-3])
            world.depth = lambda: priced(StepCosts(plain=[(1, 1e-4)], verifying=[(2, dear), (64, 1.5 * dear)]))
        world.build()
    return world


def priced(costs: StepCosts) -> DraftDepth:
    """With these costs from the first step on."""
    depth = DraftDepth()
    depth.costs = costs
    return depth


class AdversarialProposer:
    """Drafts what the oracle draws up to a random place, then anything: wrong ids, too many, stop ids, ids that do not
    exist; or nothing."""

    def __init__(self, rng: random.Random, version) -> None:
        """version(): of the weights."""
        self._rng, self._version = rng, version

    def propose(self, request: Request, most: int) -> Proposal:
        rng = self._rng
        if rng.random() < 0.2:
            return NO_PROPOSAL
        right = continued(request.tokens, rng.choice([0, 1, most, most + 3]), self._version())[len(request.tokens) :]
        wrong = rng.choice([[], [EOS] * 4, [VOCAB, 5], [-1], [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]])
        return Proposal(right + wrong)


def random_costs(rng: random.Random) -> policy.CostModel:
    return policy.CostModel(prefill_s_per_token=rng.choice([0.0, 1e-4, 1e-3]), copy_s_per_block=rng.uniform(0, 2e-4))


def random_leader(world: World, rng: random.Random, stem, name, prompts, *, echo=0.3) -> Request | None:
    """A request or a group that the engine would accept; its prompt is added to `prompts`, those made before.

    echo: probability that its prompt is what another is about to draw, so that blocks appear while it prefills.
    """
    capacity = world.context.max_stored_tokens
    prompt = stem[: rng.randint(0, len(stem))] + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 9))]
    if prompts and rng.random() < echo:
        prompt = continued(rng.choice(prompts), rng.randint(1, 20), world.version)
    prompts.append(prompt)
    if not world.chunked:
        prompt = prompt[: world.max_tokens]
    prompt = prompt[: capacity - 1]
    if not prompt:
        return None
    max_new = rng.randint(1, min(30, capacity + 1 - len(prompt)))
    n = rng.randint(2, 5) if rng.random() < 0.3 else 1
    params = SamplingParams(priority=(0, 0, 0, -1, 7)[sum(prompt) % 5])
    cache = CacheUse(allowed=rng.random() < 0.85, salt=rng.choice(["", "", "", "a"]))
    leader = make_group(name, prompt, max_new, n, cache=cache, params=params)
    for request in (leader, *leader.siblings):
        request.caller = sum(prompt) // 5 % num_callers(world)
    return leader


def num_callers(world: World) -> int:
    return 1 + world.num_blocks % 3
