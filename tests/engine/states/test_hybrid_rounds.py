"""Generation, optimizer steps, generation: models with recurrent state answer with the weights they have by then."""

from __future__ import annotations

from functools import partial

import engines
import pytest
import torch
from engines import tokens_of
from model_kinds import RECURRENT, make_model
from state_sabotage import finish, worst_error

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.scheduler.request import VersionSpan
from megatron_infer.testing.inspect import inspect

PROMPTS = [[(7 * i + 3 * j) % 120 + 4 for j in range(n)] for i, n in enumerate((50, 41, 66, 50))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)


SIZES = {"max_sequence_length": 128, "max_requests": 8, "max_tokens": 48, "enable_chunked_prefill": True}
make_engine = partial(engines.make_engine, prefix="lru", **SIZES)


@pytest.fixture(params=RECURRENT)
def kind(request) -> str:
    return request.param


class Trainer:
    """Optimizer steps on the model that the engine holds."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def step(self) -> float:
        ids = torch.tensor([prompt[:40] for prompt in PROMPTS])
        self._model.train()
        positions = torch.arange(40)[None].expand_as(ids)
        loss = self._model(ids, positions, None, labels=ids.roll(-1, 1)).mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_answers_between_optimizer_steps_are_a_fresh_engines_with_those_weights(kind, overlap):
    model = make_model(kind)
    engine, trainer = make_engine(model, overlap=overlap), Trainer(model)
    losses, answers = [], []
    for version in range(4):
        outputs = engine.generate(PROMPTS, GREEDY)
        assert worst_error(model, outputs) < 1e-4
        assert [output.outputs[0].spans for output in outputs] == [[VersionSpan(0, version, version, version)]] * 4
        hits = engine.stats().counters["states_loaded"]
        again = engine.generate(PROMPTS, GREEDY)
        assert engine.stats().counters["states_loaded"] == hits + len(PROMPTS), "the cache holds this round's states"
        twin = make_model(kind, seed=1)
        twin.load_state_dict(model.state_dict())
        assert tokens_of(outputs) == tokens_of(again) == tokens_of(make_engine(twin).generate(PROMPTS, GREEDY))
        answers.append(tokens_of(outputs))
        with engine.suspended("recompute" if version % 2 else "offload"):
            losses.append(trainer.step())
        engine.verify_weights()
    assert losses[-1] < losses[0] and all(a != b for a, b in zip(answers, answers[1:], strict=False))


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_requests_that_training_fell_into_say_which_weights_made_what(kind, mode):
    """Kept: the state of the old weights goes on under the new. Recomputed: as if the new had read it all."""
    model = make_model(kind)
    engine, trainer = make_engine(model), Trainer(model)
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(prompt, GREEDY, request_id=f"running-{i}", stream="final")
    for _ in range(8):
        engine.step()
    drawn = [list(request.tokens) for request in inspect(engine).scheduler.admitted_requests.decoding]
    assert all(len(tokens) > len(prompt) for tokens, prompt in zip(drawn, PROMPTS, strict=False))
    with engine.suspended(mode):
        for _ in range(2):
            trainer.step()
    engine.add_request(PROMPTS[0], GREEDY, request_id="new", stream="final")
    outputs = {output.request_id: output for output in finish(engine)}
    assert worst_error(model, [outputs["new"]]) < 1e-4, "it found something of the old weights"
    assert outputs["new"].outputs[0].spans == [VersionSpan(0, 1, 1, 1)]
    first = {"persist": 0, "offload": 0, "recompute": 1}[mode]
    for i, tokens in enumerate(drawn):
        num_drawn = len(tokens) - len(PROMPTS[i])
        one = outputs[f"running-{i}"].outputs[0]
        assert one.spans == [VersionSpan(0, 0, 0, 0), VersionSpan(num_drawn, 1, first, 1)]
        assert one.token_ids[:num_drawn] == tokens[len(PROMPTS[i]) :]
        if mode == "recompute":
            rest = SamplingParams(temperature=0.0, max_tokens=16 - num_drawn, ignore_eos=True)
            assert tokens_of(engine.generate(tokens, rest)) == [one.token_ids[num_drawn:]]
