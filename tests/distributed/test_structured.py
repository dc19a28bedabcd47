"""Structured output is the same on tensor- and pipeline-parallel ranks as in one process, on all of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import gloo_ranks as ranks
import pytest
import torch
from structured_case import BASE, check, make_engine, model, tokenizer, workload

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.served_engine import ServedRequest, params_of
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import InferenceError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import CheckpointSource, save_checkpoint
from megatron_infer.outputs.schema import Piece, bytes_to_ids, ids_to_bytes

BUSY = {"overlap": True, "enable_chunked_prefill": True, "max_tokens": 40, "max_requests": 8}


DRAFTS = [("ngram", "grammar"), ("grammar", "ngram")]


def play(whole_or_part: torch.nn.Module, **settings: Any) -> list[Any]:
    config = InferenceConfig(**{**BASE, "collective_timeout_s": 60, **settings})
    engine = DynamicInferenceEngine(whole_or_part, config, tokenizer=tokenizer())
    work = workload()
    outputs = engine.generate([prompt for prompt, _ in work], [params for _, params in work])
    engine.rank_group.lockstep.close()
    found = engine.spec_decode_metrics()
    assert found is None or 10 < found.num_accepted <= found.num_drafted, found  # adaptive: by measured costs
    for (_, params), output in zip(work, outputs, strict=True):
        for one in output.outputs if params.structured is not None else ():
            check(params.structured, one.text)
    return [[(one.token_ids, one.text, one.finish_reason) for one in output.outputs] for output in outputs]


def on_rank(rank: int, size: int, folder: Path) -> None:
    want = [[tuple(one) for one in output] for output in json.loads((folder / "want.json").read_text())]
    for name in ("pipeline", "tensor"):
        ranks.new_groups(**{f"{name}_model_parallel_size": size})
        part = build_model(CheckpointSource(folder / "model"), **{f"{name}_parallel": size})
        drafts: list[dict[str, Any]] = [{}, *({"method": method} for method in DRAFTS)]
        if name == "tensor":  # a draft model drafts for the requests without structured output
            drafts += [{"method": (*method, "draft"), "draft_model": part} for method in DRAFTS]
            drafts.append({"method": ("draft", "grammar"), "draft_model": part})
        for how in drafts:
            for settings in (BUSY, {}):
                speculative = {"num_speculative_tokens": 5, "adaptive": not settings, **how} if how else None
                assert play(part, speculative=speculative, **settings) == want, (name, how.get("method"), settings)
    check_refusals(part, rank, folder)


def check_refusals(part: torch.nn.Module, rank: int, folder: Path) -> None:
    """What cannot draft on one of two tensor-parallel ranks is refused on both."""
    os.chdir(folder if rank == 0 else folder / "model")  # where the second rank finds no draft model
    for speculative, tokens, message in (
        ({"method": "grammar"}, None if rank else tokenizer(), "has no tokenizer for it on every rank"),
        ({"method": "draft", "draft_model": "./model"}, tokenizer(), "unknown model './model'"),
    ):
        started = time.monotonic()
        with pytest.raises(InferenceError, match=message):
            config = InferenceConfig(**BASE, speculative=speculative, collective_timeout_s=60)
            DynamicInferenceEngine(part, config, tokenizer=tokens)
        assert time.monotonic() - started < 30, "a rank waited for the other"


@pytest.mark.long
@pytest.mark.timeout(280)
def test_two_ranks_draw_what_one_process_does_with_drafts_and_without(tmp_path):
    save_checkpoint(model(), tmp_path / "model")
    (tmp_path / "want.json").write_text(json.dumps(play(build_model(CheckpointSource(tmp_path / "model")))))
    ranks.run_on_ranks(on_rank, 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_request_that_moves_goes_on_within_its_language(cut):
    """`cut` steps on one engine, then the rest on another, which knows its tokens alone."""
    here, there = make_engine(), make_engine(overlap=True)
    for prompt, params in workload():
        if params.structured is None or params.carries or params.logprobs is not None:
            continue
        whole = here.generate([prompt], [params])[0]
        run = protocol.Run(1, 1, ids_to_bytes(prompt), None, "", params.to_dict(), params.seed, True, [])
        told: list[list[Piece]] = [[] for _ in range(params.n)]
        if not drive(here, ServedRequest(run, params_of(run)), told, steps=cut):
            kept = [
                protocol.Kept(
                    b"".join(piece.tokens for piece in pieces),
                    finish_reason=pieces[-1].finish_reason,
                    stop_reason=pieces[-1].stop_reason,
                )
                for pieces in told
            ]
            moved = protocol.Run(2, 1, run.prompt, None, "", run.params, run.seed, True, kept)
            assert drive(there, ServedRequest(moved, params_of(moved)), told, steps=500)
        for pieces, one in zip(told, whole.outputs, strict=True):
            assert sum((bytes_to_ids(piece.tokens) for piece in pieces), []) == one.token_ids
            assert pieces[-1].finish_reason == one.finish_reason == "stop"


def drive(engine: Any, request: ServedRequest, told: list[list[Piece]], *, steps: int) -> bool:
    """Some steps that draw, noting what the client is told -> whether it has finished; if not it is aborted."""
    request.begin(engine)
    while steps:
        outputs = engine.step()
        steps -= bool(outputs)  # a mask that takes long is waited for in steps without the request
        for output in outputs:
            news = request.message(output)
            for piece in () if news is None else news.pieces:
                told[piece.index].append(piece)
            if output.finished:
                return True
    engine.abort(request.id)
    return False
