"""Ranks of one engine act as one: requests come from the leader, calls are everyone's, failures are everyone's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engine_ranks as ranks
import pytest
import torch
from engines import finish, tokens_of

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed import lockstep
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import (
    AdoptionError,
    ConfigError,
    InvalidPrompt,
    LockstepError,
    NotLeader,
    OtherRankFailed,
    RankFailure,
    RequestError,
    TransitionFailed,
    TransitionTimeout,
    WrongState,
)
from megatron_infer.testing.inspect import inspect, run_one_by_one

Engine = DynamicInferenceEngine
PROMPT = list(range(5, 60))
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)


@contextmanager
def refused(kind: type[BaseException], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value), str(caught.value)


def run_to_end(engine: Engine) -> dict[str, list[int]]:
    return {name: list(output.outputs[0].token_ids) for name, output in finish(engine).items()}


def check_out_of_memory(engine: Engine, rank: int) -> None:
    """A step that runs out of memory on every rank, each with its own figures, is tried again with fewer tokens."""
    prompts = [PROMPT, PROMPT[:9], PROMPT[4:30]]
    want = tokens_of(engine.generate(prompts if rank == 0 else [], GREEDY))
    engine.reset_prefix_cache()
    runner = inspect(engine).runner
    run_layers = runner.run_layers

    def limited(step: Any, received_TD: Any = None) -> Any:
        if step.plan.num_tokens > 20:
            raise torch.OutOfMemoryError(f"CUDA out of memory. GPU {rank} has a total capacity of ...")
        return run_layers(step, received_TD)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run_layers", limited)
        assert tokens_of(engine.generate(prompts if rank == 0 else [], GREEDY)) == want
    assert engine.figures().retracted_steps > 0


def check_generate(engine: Engine, rank: int) -> None:
    """Every rank has the outputs of the leader's prompts; what the leader refuses is refused everywhere."""
    outputs = engine.generate([PROMPT, PROMPT[:9]] if rank == 0 else [], GREEDY)
    assert len(outputs) == 2 and all(len(tokens) == 12 for tokens in tokens_of(outputs))
    with refused(InvalidPrompt if rank == 0 else RequestError, "outside the vocabulary"):
        engine.generate([[1, 2], [999]])
    assert tokens_of(engine.generate([PROMPT], GREEDY)) == tokens_of(outputs[:1])


def check_leader_only(engine: Engine, rank: int) -> None:
    if rank == 0:
        return
    for call in (
        lambda: engine.add_request(PROMPT, GREEDY),
        lambda: engine.abort("0"),
        lambda: engine.can_step(),
        lambda: engine.keep_snapshots("x"),
        lambda: engine.dismiss(),
    ):
        with refused(NotLeader, "rank 1", "rank 0"):
            call()


def check_abort(engine: Engine, rank: int) -> None:
    """An abort frees the request's memory on every rank before the next step."""
    if rank == 0:
        engine.add_request(PROMPT, GREEDY, request_id="a", stream="final")
        engine.add_request(PROMPT[3:], GREEDY, request_id="b", stream="final")
    for _ in range(3):
        engine.step()
    if rank == 0:
        assert len(engine.abort("a").outputs[0].token_ids) > 0
    assert list(run_to_end(engine)) == ["b"]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def check_different_calls(engine: Engine, rank: int) -> None:
    """Nothing happens then, and the engine goes on."""
    with refused(LockstepError, "rank 0: step()", "rank 1: suspend()"):
        engine.step() if rank == 0 else engine.suspend()
    with refused(LockstepError, "pause()", "other arguments on rank 1"):
        engine.pause("keep" if rank == 0 else "retract")
    assert engine.state == "running"
    assert len(engine.generate([PROMPT], GREEDY)) == 1


def check_undone_everywhere(engine: Engine, rank: int) -> None:
    """A suspend or resume that fails on one rank, at any of its pieces, is undone on all; then it succeeds."""
    if rank == 0:
        for i in range(4):
            engine.add_request(PROMPT[i:], GREEDY, request_id=str(i), stream="final")
    for _ in range(3):
        engine.step()

    def failing(piece: str):
        def observer(what: str) -> None:
            if what.startswith(piece):
                raise MemoryError("no room")

        return observer

    for mode, pieces in (("offload", ("the step", "release the cache")), ("recompute", ("release the cache",))):
        for culprit in (0, 1):
            for piece in pieces:
                if rank == culprit:
                    engine.lifecycle.observers.append(failing(piece))
                with refused(
                    TransitionFailed, "no room", "RUNNING again", *([] if rank == culprit else [f"rank {culprit}"])
                ):
                    engine.suspend(mode)
                engine.lifecycle.observers.clear()
                assert engine.state == "running" and not inspect(engine).store.is_released
                engine.step()
        engine.suspend(mode)
        for culprit in (0, 1):
            if rank == culprit:
                engine.lifecycle.observers.append(failing("allocate the cache"))
            with refused(TransitionFailed, "no room", "SUSPENDED again"):
                engine.resume()
            engine.lifecycle.observers.clear()
            assert engine.state == "suspended" and inspect(engine).store.is_released
        with refused(WrongState, "SUSPENDED"):
            engine.step()
        engine.resume()
        engine.step()
    with refused(TransitionTimeout if rank == 0 else TransitionFailed, "took longer", "RUNNING again"):
        if rank == 0:
            engine.lifecycle._clock = iter([0.0, 100.0, 100.0, 100.0]).__next__
        engine.pause(timeout_s=50)
    import time

    engine.lifecycle._clock = time.monotonic
    done = run_to_end(engine)
    expected = tokens_of(engine.generate([PROMPT[i:] for i in range(4)], GREEDY))
    assert [done[str(i)] for i in range(4)] == expected


def check_one_sided_weights(engine: Engine, rank: int) -> None:
    """A change that only one rank can see counts for all, in a step, after idling and at a resume."""
    engine.generate([PROMPT], GREEDY)
    before = engine.stats().weight_version
    weight = next(engine.model.parameters())
    if rank == 0:
        engine.add_request(PROMPT, GREEDY)
    engine.step()
    engine.step()
    with torch.no_grad():
        if rank == 1:
            weight.mul_(1.0)  # counts as a change: its version does
    run_to_end(engine)
    assert engine.stats().weight_version == before + 1
    if rank == 1:
        weight.data.mul_(1.001)  # only the content tells
    engine.generate([PROMPT], GREEDY)
    assert engine.stats().weight_version == before + 2
    engine.suspend()
    if rank == 1:
        weight.data.mul_(1.001)
    engine.resume()
    assert engine.stats().weight_version == before + 3
    engine.set_weight_version(40)
    engine.verify_weights()
    assert engine.stats().weight_version == 40


def check_changed_modules(engine: Engine, rank: int, folder: str) -> None:
    """A module that changed on one rank is adopted again by that rank and counts for all; a refusal is one of all."""
    model: Any = engine.model
    before, version = tokens_of(engine.generate([PROMPT], GREEDY)), engine.weight_version
    if rank == 0:
        engine.add_request(PROMPT, GREEDY)
    engine.step()
    engine.step()
    hook = model.decoder.layers[1].mlp.linear_fc2.register_forward_hook(lambda *_: None) if rank == 1 else None
    for _ in range(2):
        with refused(AdoptionError if rank == 1 else OtherRankFailed, "layers.1.mlp.linear_fc2: has a forward hook"):
            engine.step()
    engine.pause()
    with refused(TransitionFailed, "layers.1.mlp.linear_fc2: has a forward hook"):
        engine.unpause()
    if hook is not None:
        hook.remove()
    engine.unpause()
    assert list(run_to_end(engine).values()) == before and engine.weight_version == version
    own = model.decoder.layers[1]
    model.decoder.layers[1] = ranks.part_of_model("attention", folder, rank, 2, seed=3).decoder.layers[1]
    found = engine.generate([PROMPT], GREEDY)
    assert engine.weight_version == version + 1 and tokens_of(found) != before
    fresh = ranks.make_engine(model)
    assert tokens_of(found) == tokens_of(fresh.generate([PROMPT], GREEDY))
    fresh.rank_group.lockstep.close()
    model.decoder.layers[1] = own
    if rank == 1:  # the same weights in another module, on one rank
        linear = own.self_attention.linear_proj
        other = ranks.part_of_model("attention", folder, rank, 2).decoder.layers[1].self_attention.linear_proj
        other.load_state_dict(linear.state_dict())
        own.self_attention.linear_proj = other
    assert tokens_of(engine.generate([PROMPT], GREEDY)) == before
    engine.verify_weights()


def check_same_failure(engine: Engine, rank: int) -> None:
    """A forward that raises alike on all ranks fails its requests, and the engine goes on."""
    original = inspect(engine).runner.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("this shape is not known")

    inspect(engine).runner.forward = broken
    (output,) = engine.generate([PROMPT], GREEDY, on_error="return")
    assert output.outputs[0].finish_reason == "error" and "this shape" in str(output.error)
    inspect(engine).runner.forward = original
    assert engine.generate([PROMPT], GREEDY)[0].outputs[0].finish_reason == "length"


def check_following(engine: Engine, rank: int) -> None:
    """A script that only the leader runs: the others follow, through its mistakes too."""
    if rank == 1:
        engine.follow()
        assert engine.stats().weight_version == 77 and not engine.has_unfinished()
        return
    with refused(WrongState, "beside the leader"):
        engine.follow()
    engine.add_request(PROMPT, GREEDY, request_id="x")
    while engine.can_step():
        engine.step()
    with engine.suspended("offload"), pytest.raises(WrongState):
        engine.step()
    with pytest.raises(InvalidPrompt):
        engine.generate([[999]])
    with pytest.raises(ConfigError):
        engine.suspend("nowhere")
    engine.set_weight_version(77)
    engine.reset_prefix_cache()
    assert len(engine.generate([PROMPT, PROMPT], GREEDY)) == 2
    engine.dismiss()
    assert not engine.has_unfinished()


def check_saved_requests(engine: Engine, rank: int, folder: str) -> None:
    """The leader writes them; all ranks take them in, and they go on with the same tokens."""
    if rank == 0:
        engine.add_request(PROMPT, GREEDY, request_id="s", stream="final")
    for _ in range(4):
        engine.step()
    path = Path(folder, "requests")
    if rank == 0:
        engine.save_requests(path)
    expected = run_to_end(engine)
    engine.load_requests(path)
    assert run_to_end(engine) == expected


def check_planted_divergence(model: torch.nn.Module, rank: int) -> None:
    """check_invariants names the first request that the ranks plan differently."""
    engine = ranks.make_engine(model)
    if rank == 0:
        for name in ("first", "second", "third"):
            engine.add_request(PROMPT, GREEDY, request_id=name)
    engine.step()
    if rank == 1:
        inspect(engine).scheduler.admitted_requests.decoding[1].tokens[-1] ^= 1
    with refused(LockstepError, "step 1", "'second'", "rank 0: second decodes", "rank 1: second decodes"):
        engine.step()


def check_options(model: torch.nn.Module, rank: int) -> None:
    with refused(ConfigError, "max_tokens is 512 on rank 0 and 256 on rank 1"):
        ranks.make_engine(model, max_tokens=512 if rank == 0 else 256)
    with refused(ConfigError, "tp=1", "tp=2"):
        from megatron.core.process_groups_config import ProcessGroupCollection

        alone = torch.distributed.new_group([rank], use_local_synchronization=True)
        DynamicInferenceEngine(model, InferenceConfig(pg_collection=ProcessGroupCollection(tp=alone)))


def check_vocabulary(model: torch.nn.Module, rank: int) -> None:
    """A trainer's padding, which any gradient may have made likely, is never drawn, scored or taken in."""
    true, weight = 101, model.output_layer.weight
    before = weight.detach().clone()
    first = model.output_layer.output_size_per_partition * rank
    with torch.no_grad():
        weight[max(0, true - first) :] *= 30
    drawn: dict[int | None, set[int]] = {}
    for vocab_size in (None, true):
        engine = ranks.make_engine(model, vocab_size=vocab_size)
        kinds = [GREEDY, SamplingParams(max_tokens=12, seed=3, ignore_eos=True, logprobs=5, prompt_logprobs=5)]
        outputs = engine.generate([PROMPT, PROMPT], kinds)
        samples = [output.outputs[0] for output in outputs]
        drawn[vocab_size] = {token for sample in samples for token in sample.token_ids}
        scored = [*samples[1].logprobs, *outputs[1].prompt_logprobs[1:]]
        drawn[vocab_size] |= {token for entry in scored for token in entry}
        if vocab_size is not None:
            with pytest.raises(InvalidPrompt if rank == 0 else RequestError, match=r"token id 101 .*\(0 to 100\)"):
                engine.generate([[true]])
        engine.rank_group.lockstep.close()
    assert max(drawn[None]) >= true > max(drawn[true]), drawn
    with torch.no_grad():
        weight.copy_(before)
    with refused(AdoptionError, "vocab_size=129", "128 rows"):
        ranks.make_engine(model, vocab_size=129)


def check_delay(model: torch.nn.Module, rank: int) -> None:
    """The leader's clock decides for all ranks when prompts are admitted; they compare each plan."""
    prompts = [PROMPT, PROMPT[:9], PROMPT[4:30]] if rank == 0 else []
    engine = ranks.make_engine(model)
    want = tokens_of(engine.generate(prompts, GREEDY))
    engine.rank_group.lockstep.close()
    options = {"batching": "phased", "ce_delay_ms": 20, "min_batch_size_tg": 2, "enable_prioritize_first_decode": True}
    engine = ranks.make_engine(model, **options, check_invariants=True)
    for _ in range(2):
        assert tokens_of(engine.generate(prompts, GREEDY)) == want
    assert engine.stats().counters["prefill_tokens"] == 2 * (55 + 9 + 26)
    engine.rank_group.lockstep.close()


def check_hooks(model: torch.nn.Module, rank: int) -> None:
    """A hook sees whole rows and the request's numbers on every rank; one that only some ranks add is an error."""
    types = [("target", torch.int64, True)]
    engine = ranks.make_engine(model, request_metadata_types=types)

    def push(logits: torch.Tensor, metadata: Any) -> None:
        assert logits.shape[1] == 128, "whole rows"
        logits[torch.arange(len(logits)), metadata["target"]] += 1e4

    engine.on_logits(push)
    targets = [3, 100, 64]  # of either rank's part of the vocabulary
    params = [SamplingParams(max_tokens=4, ignore_eos=True, seed=1, metadata={"target": one}) for one in targets]
    outputs = engine.generate([PROMPT] * 3 if rank == 0 else [], params if rank == 0 else None)
    assert tokens_of(outputs) == [[target] * 4 for target in targets]
    assert [output.metadata for output in outputs] == [{"target": target} for target in targets]
    engine.rank_group.lockstep.close()


def check_one_sided_failure(model: torch.nn.Module, rank: int) -> None:
    """A forward that raises on one rank only ends the engine on all, each naming the rank, the phase and the cause."""
    engine = ranks.make_engine(model, collective_timeout_s=30, check_invariants=False)
    engine.generate([PROMPT], GREEDY)
    if rank == 1:

        def raising(*args: Any) -> Any:
            raise MemoryError("rank 1 has no room")

        run_one_by_one(engine, {1: SimpleNamespace(run=raising)})
    with (
        mock.patch.object(lockstep, "ALONE_S", 1.0),
        pytest.raises(RankFailure, match=r"rank 1 of the engine failed in prefill of step .*no room") as caught,
    ):
        engine.generate([PROMPT], GREEDY)
    assert caught.value.rank == 1
    with pytest.raises(RankFailure):
        engine.suspend()


def check_all(rank: int, size: int, folder: str) -> None:
    model = ranks.part_of_model("attention", folder, rank, size)
    engine = ranks.make_engine(model)
    check_generate(engine, rank)
    check_leader_only(engine, rank)
    check_abort(engine, rank)
    check_different_calls(engine, rank)
    check_undone_everywhere(engine, rank)
    check_one_sided_weights(engine, rank)
    check_changed_modules(engine, rank, folder)
    check_same_failure(engine, rank)
    check_following(engine, rank)
    check_saved_requests(engine, rank, folder)
    check_out_of_memory(engine, rank)
    engine.rank_group.lockstep.close()
    check_planted_divergence(model, rank)
    check_options(model, rank)
    check_delay(model, rank)
    check_hooks(model, rank)
    check_vocabulary(model, rank)
    check_one_sided_failure(model, rank)  # last: it breaks the gloo groups


@pytest.mark.timeout(240)
def test_ranks_act_as_one(tmp_path: Path):
    ranks.run_ranks(check_all, tmp_path)
