"""A session between a trainer and an engine: right tokens after every step, and everything where it was."""

from __future__ import annotations

import torch
from session_case import PARAMS, fresh_answers, make_session, prompts, train_step

from megatron_infer.testing.tiny import tiny_gpt


def test_tokens_after_each_training_step_are_those_of_a_fresh_engine():
    model = tiny_gpt(init_method_std=0.2).train()
    session = make_session(model)
    seen = []
    for step in range(3):
        with session.generating() as roll:
            outputs = roll.engine.generate(prompts(), PARAMS)
        answers = [output.outputs[0].token_ids for output in outputs]
        assert answers == fresh_answers(model)
        seen.append(answers)
        with session.training():
            train_step(model, step)
        report = session.update_weights()
        assert (report.version, report.bytes_copied) == (step + 1, 0) == (session.weight_version, 0)
    assert seen[0] != seen[1] != seen[2]


def test_scores_are_the_logprobs_of_the_engine():
    session = make_session(tiny_gpt(init_method_std=0.2))
    with session.generating() as roll:
        outputs = roll.engine.generate(prompts(), PARAMS)
        scores = session.score([output.prompt_token_ids + output.outputs[0].token_ids for output in outputs])
    for output, score in zip(outputs, scores, strict=True):
        sample = output.outputs[0]
        want = [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        torch.testing.assert_close(score[-len(want) :], torch.tensor(want), atol=1e-5, rtol=0)
