"""Follows the outputs that test_token_outputs.py adds: run by it, with a folder, on its copy of the package."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gloo_ranks as ranks
import stage_case
import torch

import megatron_infer
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.served_engine import ServedRequest, params_of
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.outputs.request_output import CompletionOutput
from megatron_infer.outputs.schema import append, ids_to_bytes
from megatron_infer.rl import sample_codec, sample_file
from megatron_infer.rl.samples import group_of
from megatron_infer.testing.tiny import tiny_gpt

VOCAB = 96
PROMPTS = [list(range(5, 20)), list(range(40, 47)), list(range(60, 90)), [7, 8, 9]]
BOTH = {"return_entropy": True, "return_near": True}
PARAMS = [
    SamplingParams(max_tokens=12, seed=1, ignore_eos=True, top_p=0.7, logprobs=VOCAB, **BOTH),
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, return_sampled_logprobs=True, return_entropy=True),
    SamplingParams(max_tokens=12, seed=3, ignore_eos=True, return_support=True, top_k=9, return_near=True, n=2),
    SamplingParams(max_tokens=12, seed=4, ignore_eos=True),
]


def new_outputs(one: Any) -> list[Any]:
    near = None if one.near is None else [one.near.ids_at(i).tolist() for i in range(len(one.near))]
    return [one.token_ids, one.entropy, near]


def generate(engine: Any) -> list[Any]:
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS)
    return [new_outputs(one) for output in outputs for one in output.outputs]


def check_values(engine: Any) -> None:
    """Against all log probabilities; those who do not ask get none."""
    first, second, third, last = engine.generate(PROMPTS, PARAMS)
    one = first.outputs[0]
    for i, entry in enumerate(one.logprobs):
        values = {token: p.logprob for token, p in entry.items()}
        assert len(values) == VOCAB
        assert abs(one.entropy[i] + sum(math.exp(p) * p for p in values.values())) < 1e-4
        assert set(one.near.ids_at(i).tolist()) == {t for t, p in values.items() if p >= max(values.values()) - 1}
    assert len(one.entropy) == len(one.near) == 12 and one.raw_logprobs is None and one.support is None
    assert second.outputs[0].near is None and len(second.outputs[0].entropy) == 12
    assert [len(one.near) for one in third.outputs] == [12, 12] and third.outputs[0].entropy is None
    assert last.outputs[0].entropy is last.outputs[0].near is None


def on_rank(rank: int, size: int, folder: Path) -> None:
    want = torch.load(folder / "want.pt")
    for layout in ("tensor_parallel", "pipeline_parallel"):
        ranks.new_groups(**{f"{layout.split('_')[0]}_model_parallel_size": size})
        engine = stage_case.make_engine(stage_case.load_model(folder, "model", **{layout: size}))
        stage_case.assert_same(generate(engine), want, layout)
        engine.rank_group.lockstep.close()


def check_files(make_engine: Any, want: list[Any], folder: Path) -> None:
    """A snapshot in the middle of the requests and after, then sample files."""
    source, engine = make_engine(), make_engine()
    for index, (ids, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        source.add_request({"prompt_token_ids": ids}, params, request_id=str(index), stream="final")
    for _ in range(6):
        assert not [output for output in source.step() if output.finished]
    source.save_requests(folder / "requests", kv=True)
    engine.load_requests(folder / "requests")
    done = {}
    while engine.has_unfinished():
        done.update({output.request_id: output for output in engine.step() if output.finished})
    outputs = [done[str(index)] for index in range(len(PROMPTS))]
    assert [new_outputs(one) for output in outputs for one in output.outputs] == want
    groups = [group_of(output) for output in outputs]
    for group in groups:
        for sample in group.samples:
            sample.logprobs = []
    sample_file.save(folder / "samples", groups)
    loaded = sample_file.load(folder / "samples")
    assert [new_outputs(one) for group in loaded for one in group.samples] == want
    samples = [sample_codec.decode_sample(sample_codec.encode_sample(one)) for group in groups for one in group.samples]
    assert [new_outputs(one) for one in samples] == want
    plain = sample_file.decode(sample_file.encode(groups[3:]))
    assert plain[0].samples[0].entropy is plain[0].samples[0].near is None


def check_wire(engine: Any, want: list[Any]) -> None:
    """Piece by piece to a client that streams, and held back to one that does not."""
    for held in (False, True):
        got = []
        for index, (ids, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            number, prompt = 100 * held + index, ids_to_bytes(ids)
            run = protocol.Run(number, 1, prompt, None, "", params.to_dict(), params.seed or 0, True, [])
            request = ServedRequest(run, params_of(run))
            request.begin(engine)
            at_the_client = [CompletionOutput(index=i, text="", token_ids=[]) for i in range(params.n)]
            while engine.has_unfinished():
                for output in engine.step():
                    news = request.message(output)
                    if held:
                        news = request.hold(news)
                    if not held or output.finished:
                        for piece in protocol.decode(protocol.encode(news)).pieces:
                            append(at_the_client[piece.index], piece)
            got += [new_outputs(one) for one in at_the_client]
        assert got == want


def main(folder: Path) -> None:
    assert Path(megatron_infer.__file__).is_relative_to(folder)
    model = tiny_gpt(**{**stage_case.SETTINGS, "vocab_size": VOCAB, "num_layers": 2})

    def make_engine() -> Any:
        return stage_case.make_engine(model)

    check_values(make_engine())
    want = generate(make_engine())
    check_files(make_engine, want, folder)
    check_wire(make_engine(), want)
    save_checkpoint(model, folder / "model")
    torch.save(want, folder / "want.pt")
    ranks.run_on_ranks(on_rank, 2, folder)
