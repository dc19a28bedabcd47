"""Exact mode over pipeline stages: scores, tokens and the engine's log probabilities have the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stage_case
import torch
from gloo_ranks import new_groups, run_on_ranks
from session_case import PARAMS, make_session, prompts
from test_virtual_stages import GPT, VPP2, chunks_of_rank, groups_of, weights_for_stages, whole
from training_case import gradients, loss_over, sequences_of

from megatron_infer.errors import ModelError
from megatron_infer.models.exact_forward import exact_logprobs
from megatron_infer.testing.cpu_shim import cpu_shim

SHORT = GPT | {"num_layers": 4}
TIED = {"share_embeddings_and_output_weights": True}
HYBRID = stage_case.SETTINGS | {"pattern": "M*-M", "position_embedding_type": "rope"}
MODELS: dict[str, dict[str, Any]] = {
    "tied": SHORT | TIED,
    "bf16": SHORT | {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
    "recomputed": SHORT | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "hybrid": HYBRID,
    "two chunks": SHORT | VPP2,
    "two chunks, tied, bf16": SHORT | VPP2 | TIED | {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
}
LENGTHS = [19, 13, 7, 4]


def answers(model: Any) -> tuple[Any, ...]:
    """Tokens, their log probabilities, and scores of given sequences by both calls."""
    session = make_session(model, settings={"batch_invariant": True, "collective_timeout_s": 60}, meter=None)
    with session.generating() as roll:
        samples = [group.samples[0] for group in roll.generate(prompts(), PARAMS)]
    sequences = sequences_of(LENGTHS)
    with cpu_shim(4), session.training():
        for score, sample in zip(session.score([one.ids for one in samples]), samples, strict=True):
            assert score[len(sample.prompt_ids) - 1 :].tolist() == sample.raw_logprobs, "a ratio that is not 1"
        scores = session.score(sequences, start=2)
        report = session.score_and_backward(sequences, loss_over(sequences), micro_batch_tokens=26)
    session.engine.rank_group.lockstep.close()
    drawn = [(sample.token_ids, sample.raw_logprobs) for sample in samples]
    return drawn, [one.tolist() for one in (*scores, *report.scores)]


def on_models(rank: int, size: int, folder: Path, names: list[str]) -> None:
    for name in names:
        settings = MODELS[name]
        new_groups()
        model = whole(settings)
        want, wanted = answers(model.train()), gradients(model)
        groups_of(settings, 1)
        chunks = chunks_of_rank(settings, 1, weights_for_stages(model))
        dtypes = [chunk.config.pipeline_dtype for chunk in chunks]
        for chunk in chunks:
            chunk.train()
        assert answers(chunks if len(chunks) > 1 else chunks[0]) == want, name
        assert [chunk.config.pipeline_dtype for chunk in chunks] == dtypes
        for chunk in chunks:
            for path, grad in gradients(chunk).items():
                check_gradient(name, settings, chunk, path, grad, wanted)
    with pytest.raises(ModelError, match=r"one stage of a pipeline; RolloutSession.score"):
        exact_logprobs(chunks, [[1, 2, 3]])


def check_gradient(
    name: str, settings: Any, chunk: Any, path: str, grad: torch.Tensor, wanted: dict[str, torch.Tensor]
) -> None:
    """The whole model's, of which tied stages have a part each until `step`."""
    at, embedding = path.split("."), "embedding.word_embeddings.weight"
    if path.startswith("decoder.layers."):
        at[2] = str(chunk.decoder.layers[int(at[2])].layer_number - 1)
    if "share_embeddings_and_output_weights" in settings and path in (embedding, "output_layer.weight"):
        grad = grad.clone()
        torch.distributed.all_reduce(grad)
        at = embedding.split(".")
    want = wanted[".".join(at)]
    tolerance = 2e-2 if grad.dtype is torch.bfloat16 else 2e-5
    assert (grad - want).norm() <= tolerance * want.norm() + 1e-9, (name, path)


LONG = ("two chunks, tied, bf16", "hybrid")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(list(LONG), marks=pytest.mark.long),
        pytest.param([name for name in MODELS if name not in LONG], marks=pytest.mark.slow),
    ],
    ids=["long", "rest"],
)
def test_stages_have_the_bits_of_one_process(tmp_path: Path, names: list[str]) -> None:
    run_on_ranks(on_models, 2, tmp_path, names)
