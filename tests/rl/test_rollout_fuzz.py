"""Under random calls, pauses, aborts, suspends and updates every prompt is answered once, as if alone."""

from __future__ import annotations

import asyncio
import random

import pytest
from rollout_case import assert_empty, make_engine, prompts_of

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.rollout import Rollout
from megatron_infer.testing.inspect import inspect

COUNT = 40


@pytest.fixture(scope="module")
def work():
    """Prompts, their parameters, and the tokens they draw alone."""
    rng = random.Random(1)
    prompts = prompts_of(COUNT, seed=2)
    params = [
        SamplingParams(n=rng.choice([1, 2, 4]), max_tokens=rng.randint(1, 25), seed=i, ignore_eos=True)
        for i in range(COUNT)
    ]
    outputs = make_engine().generate(prompts, params)
    return prompts, params, [[sample.token_ids for sample in output.outputs] for output in outputs]


class World:
    """Makes random calls on one engine and checks what they deliver."""

    def __init__(self, work, rng: random.Random, **settings) -> None:
        self.engine = make_engine(**settings)
        self.roll = Rollout(self.engine)
        self.prompts, self.params, self.expected = work
        self.rng = rng
        self.order = list(range(COUNT))
        rng.shuffle(self.order)
        self.answered: dict[int, str] = {}
        self.names: set[str] = set()

    def take(self, groups) -> None:
        for group in groups:
            number = group.info["number"]
            assert number not in self.answered and group.group_id not in self.names
            self.answered[number] = group.samples[0].finish_reason
            self.names.add(group.group_id)
            for sample, expected in zip(group.samples, self.expected[number], strict=True):
                length = len(sample.token_ids)
                assert sample.token_ids == expected[:length] and len(sample.logprobs) == length
                assert sample.finish_reason == "abort" or length == len(expected)

    def some(self):
        numbers = [self.order.pop() for _ in range(min(len(self.order), self.rng.randint(0, 6)))]
        prompts = [{"prompt_token_ids": self.prompts[n], "number": n} for n in numbers]
        return prompts, [self.params[n] for n in numbers]

    def budget(self) -> Budget:
        name = self.rng.choice(["groups", "tokens", "seconds"])
        return Budget(
            **{name: {"groups": self.rng.randint(0, 4), "tokens": self.rng.randint(0, 60), "seconds": 0}[name]}
        )

    def generate(self) -> None:
        if self.rng.random() < 0.7:
            self.roll.pause_at(self.budget())
        self.take(self.roll.generate(*self.some()))

    def stream(self) -> None:
        async def one(prompts, params):
            async for group in self.roll.stream(prompts, params):
                self.take([group])

        async def main():
            await asyncio.gather(*(one(*self.some()) for _ in range(self.rng.randint(1, 3))))

        asyncio.run(main())

    def disturb(self) -> None:
        def on_progress(progress) -> None:
            if self.rng.random() < 0.2 and self.roll.in_flight:
                self.roll.abort(self.rng.choice(self.roll.in_flight).id)

        self.take(self.roll.generate(*self.some(), on_progress=on_progress))

    def abort(self) -> None:
        if self.roll.unfinished:
            self.take([self.roll.abort(self.rng.choice(self.roll.unfinished).id)])

    def suspend(self) -> None:
        with self.engine.suspended(self.rng.choice(["persist", "offload", "recompute"])):
            self.update()

    def update(self) -> None:
        self.engine.set_weight_version(self.engine.weight_version + 1, self.rng.choice(["keep", "recompute"]))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_is_answered_once_with_the_tokens_it_draws_alone(work, seed, overlap):
    rng = random.Random(seed)
    world = World(work, rng, overlap=overlap, enable_prefix_caching=bool(seed % 2), max_requests=rng.choice([6, 16]))
    while world.order:
        getattr(world, rng.choice(["generate", "generate", "stream", "disturb", "abort", "suspend", "update"]))()
        inspect(world.engine).context.check()
    world.take(world.roll.generate([], SamplingParams()))
    assert sorted(world.answered) == list(range(COUNT))
    assert_empty(world.engine)
