"""The Tinker API over tensor- and data-parallel ranks: losses, gradients and samples are those of one process."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
import small_model
import torch
from engine_ranks import weights_of
from gloo_ranks import new_groups, run_on_ranks, stage_ends
from hf_models import config_of
from megatron.core.parallel_state import get_pipeline_model_parallel_rank
from test_command import ROOT, Command
from test_tinker import TOKENS, Api, live_session, served
from training_case import EXPERTS

from megatron_infer.cli.main import main
from megatron_infer.errors import ConfigError
from megatron_infer.rl.updates import apply
from megatron_infer.server.tinker.ranks import JobRanks
from megatron_infer.server.tinker.service import TinkerService
from megatron_infer.server.tinker.training import Datum, LiveModel, LiveTrainer, TrainingClient
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt

BATCH = [*TOKENS, [4, 4, 17, 20, 21, 22, 1]]


KINDS = {"adapters": {}, "all weights": {"full": True}, "exact": {"batch_invariant": True}}
"""What trains, and how -> options of the session."""
MODELS = {
    "heads": {"qk_layernorm": True},
    "tied": {"share_embeddings_and_output_weights": True},
    "experts": {"qk_layernorm": True, **EXPERTS},
}
TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"


def calls(api, kind):
    """What a client sees, by name."""
    full = KINDS[kind].get("full")
    seen, samplers = {}, []
    for place in range(1 if full else 2):
        id = api.train(place, rank=4 + 4 * place)
        for step, (name, tokens) in enumerate({"cross_entropy": BATCH, "ppo": TOKENS[:1]}.items()):
            loss, scores = api.batch(id, 2 * step + 1, name, tokens)
            seen[f"{place} {name}"] = np.concatenate([[loss], *scores])
            metrics = api.result(api.step(id, 2 * step + 2))["metrics"]
            seen[f"{place} {name} norm"] = np.asarray([metrics["grad_norm"], metrics["version"]])
        seen[f"{place} forward"] = np.concatenate(api.batch(id, 5, "dro", BATCH, forward_only=True)[1])
        nan = api.send_batch(id, 6, "cross_entropy", TOKENS[:1], given={"weights": np.full(4, np.nan, "<f4")}).json()
        assert "not finite" in api.result(nan)["error"]
        made = api.sampler(id, 7, path="named")
        assert "path" in made, made
        samplers.append(made["path"])
    state = api.result(api.call("save_weights", model_id=id, seq_id=8, path="state"))["path"]
    prompts = [[5, 9, 2], [1, 2, 3, 4], [30, 31]]
    sent = [(path, api.send_sample(prompt, model_path=path)) for prompt in prompts for path in samplers]
    drawn = [api.drawn(reply)[0][0] for _, reply in sent]
    seen["samples"] = np.concatenate([np.concatenate(one) for one in drawn])
    if kind == "exact":
        (tokens, logprobs), prompt = drawn[-1], prompts[-1]
        weights = {"weights": np.ones(len(prompt) + 5, np.float32)}
        how = {"given": weights, "forward_only": True}
        (scores,) = api.batch(id, 0, "cross_entropy", [[*prompt, *tokens]], **how)[1]
        np.testing.assert_array_equal(scores[len(prompt) - 1 :], logprobs)
    api.batch(id, 9, "importance_sampling", BATCH)
    want = api.result(api.step(id, 10))["metrics"]
    api.result(api.call("load_weights", model_id=id, seq_id=11, path=state, optimizer=True))
    api.batch(id, 12, "importance_sampling", BATCH)
    assert api.result(api.step(id, 13))["metrics"] == want, "the state that was saved goes on"
    return seen


def part_of(folder, kind, model, **sizes):
    """This rank's part of the model in `folder`, and its clients."""
    is_divided = TP in sizes and model == "experts"
    if is_divided or PP in sizes or EP in sizes:  # of which megatron-core trains the parts on CUDA alone
        compute = TrainingClient.forward_backward

        def on_a_cpu(*args, **options):
            with cpu_shim(4):
                return compute(*args, **options)

        TrainingClient.forward_backward = on_a_cpu
    stages = stage_ends(get_pipeline_model_parallel_rank(), sizes[PP]) if PP in sizes else {}
    with cpu_shim(4):
        live = tiny_gpt(**sizes, **stages, **MODELS[model], **({"sequence_parallel": True} if is_divided else {}))
    apply(live, torch.load(folder / "weights.pt"))
    return LiveModel(*live_session(live, collective_timeout_s=60, **KINDS[kind]))


def on_ranks(rank, size, folder, kind, model, sizes):
    new_groups(**sizes)
    local = part_of(folder, kind, model, **sizes)
    with served_by(rank, local, folder) as case:
        if case is not None:
            torch.save(calls(Api(case.http), kind), folder / "seen.pt")


@contextlib.contextmanager
def served_by(rank, local, folder, **settings):
    """The server on rank 0; None on another rank, whose part has ended."""
    ranks, address = JobRanks(local), [""]
    if rank:
        torch.distributed.broadcast_object_list(address, src=0)
        ranks.join(address[0])
        yield None
        return

    def tell(found):
        torch.distributed.broadcast_object_list([found], src=0)

    with served(ranks.trainer(training_share=0.5), folder / "state of ranks", on_coordinator=tell, **settings) as case:
        yield case


def failing_once(owner, name):
    """The first call of a method raises."""
    found = getattr(owner, name)

    def call(*args, **options):
        setattr(owner, name, found)
        raise torch.OutOfMemoryError("no memory")

    setattr(owner, name, call)


def with_failures_of_rank_1(rank, size, folder):
    new_groups()
    local = LiveModel(*live_session(tiny_gpt(seed=3), full=True, collective_timeout_s=60))
    if rank:
        for owner, name in ((LiveModel, "create"), (Datum, "loss"), (torch.optim.AdamW, "step")):
            failing_once(owner, name)
    with served_by(rank, local, folder) as case:
        if case is not None:
            api = Api(case.http)
            assert "rank 1: OutOfMemoryError" in api.create(0)["error"]
            id = api.train(1)
            failed = api.result(api.send_batch(id, 1, "cross_entropy", BATCH).json())
            assert "rank 1: OutOfMemoryError" in failed["error"]
            api.batch(id, 2, "cross_entropy", BATCH)
            path = api.result(api.call("save_weights", model_id=id, seq_id=3, path="state"))["path"]
            failed = api.result(api.step(id, 4))
            assert "rank 1: OutOfMemoryError" in failed["error"], failed
            for refused in (
                api.result(api.send_batch(id, 5, "cross_entropy", BATCH).json()),
                api.result(api.step(id, 6)),
                api.sampler(id, 7),
                api.sampler(id, 8, path="sampler"),
                api.result(api.call("save_weights", model_id=id, seq_id=9, path="torn")),
            ):
                assert "half-way" in refused["error"]
            api.result(api.call("load_weights", model_id=id, seq_id=10, path=path, optimizer=True))
            api.batch(id, 11, "cross_entropy", BATCH)
            assert api.result(api.step(id, 12))["metrics"]["version"] == 1
            api.sampler(id, 13)
    (client,) = local.clients.values()
    torch.save([one.detach() for one in client.parameters], folder / f"{rank}.pt")


@pytest.mark.long
def test_an_operation_that_fails_on_one_rank_is_an_error_and_ranks_stay_equal(tmp_path):
    run_on_ranks(with_failures_of_rank_1, 2, tmp_path)
    for one, other in zip(torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt"), strict=True):
        assert torch.equal(one, other)


def goes_on(api, id, first):
    """After a restart: `first` is the reply of operation 2; the gradients of operations 3 and 4 are lost."""
    assert api.result(api.step(id, 2)) == first, "the reply that may not have arrived"
    assert "[3, 4] were lost" in api.result(api.step(id, 5))["error"]


def durable_twice(serve):
    """What a client sees of two durable servers, one after the other. serve(): a server."""
    with serve() as case:
        if case is not None:
            api = Api(case.http)
            session, id = api.session, api.train()
            api.batch(id, 1, "cross_entropy", BATCH)
            first = api.result(api.step(id, 2))
            api.batch(id, 3, "cross_entropy", BATCH)
            api.batch(id, 4, "cross_entropy", BATCH)
    with serve() as case:
        if case is None:
            return None
        api = Api(case.http)
        api.session = session
        assert api.train() == id
        goes_on(api, id, first)
        loss, scores = api.batch(id, 6, "cross_entropy", BATCH)
        metrics = api.result(api.step(id, 7))["metrics"]
        return np.concatenate([[loss, metrics["grad_norm"], metrics["version"]], *scores])


def durable_on_ranks(rank, size, folder, kind, model, sizes):
    new_groups(**sizes)
    seen = durable_twice(lambda: served_by(rank, part_of(folder, kind, model, **sizes), folder, durable=True))
    if not rank:
        np.save(folder / "seen.npy", seen)


@pytest.mark.parametrize(
    ("kind", "model", "dp", "sizes"),
    [
        pytest.param("adapters", "heads", 1, {TP: 2}, marks=pytest.mark.long),
        pytest.param("adapters", "heads", 2, {TP: 2}, marks=pytest.mark.slow),
        pytest.param("all weights", "heads", 2, {TP: 2}, marks=pytest.mark.slow),
        pytest.param("adapters", "tied", 1, {PP: 2}, marks=pytest.mark.slow),
        pytest.param("all weights", "experts", 1, {EP: 2}, marks=pytest.mark.slow),
    ],
)
def test_clients_of_durable_ranks_go_on_as_in_one_process(tmp_path, kind, model, dp, sizes):
    def alone():
        return LiveTrainer(LiveModel(*live_session(tiny_gpt(seed=3, **MODELS[model]), **KINDS[kind])))

    torch.save(weights_of(tiny_gpt(seed=3, **MODELS[model])), tmp_path / "weights.pt")
    want = durable_twice(lambda: served(alone(), tmp_path / "one", durable=True))
    run_on_ranks(durable_on_ranks, dp * math.prod(sizes.values()), tmp_path, kind, model, sizes)
    np.testing.assert_allclose(np.load(tmp_path / "seen.npy"), want, atol=1e-4, rtol=1e-4)
    (name,) = sizes
    with (
        contextlib.closing(
            TinkerService(alone(), model_name="tiny", state_dir=tmp_path / "state of ranks", durable=True)
        ) as one,
        pytest.raises(ConfigError, match=rf"--{name[0]}p 2, this server has 1; .*--state-dir"),
    ):
        one.load()


@pytest.mark.parametrize(
    ("kind", "model", "dp", "sizes"),
    [
        pytest.param("adapters", "heads", 2, {TP: 2}, marks=pytest.mark.long),
        pytest.param("all weights", "heads", 2, {TP: 2}, marks=pytest.mark.long),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("exact", "heads", 2, {TP: 2}),
                *((kind, "heads", 2, {}) for kind in KINDS),
                *((kind, "heads", 1, {TP: 2}) for kind in KINDS),
                ("adapters", "tied", 2, {PP: 2}),
                ("all weights", "tied", 1, {PP: 2}),
                ("adapters", "experts", 2, {EP: 2}),
                ("all weights", "experts", 1, {EP: 2}),
                ("adapters", "experts", 1, {TP: 2}),
                ("all weights", "experts", 2, {TP: 2}),
            ]
        ),
    ],
)
def test_ranks_train_and_sample_as_one_process(tmp_path, kind, model, dp, sizes):
    live = tiny_gpt(seed=3, **MODELS[model])
    torch.save(weights_of(live), tmp_path / "weights.pt")
    alone = LiveTrainer(LiveModel(*live_session(live, **KINDS[kind])))
    with served(alone, tmp_path / "state") as case:
        want = calls(Api(case.http), kind)
    run_on_ranks(on_ranks, dp * math.prod(sizes.values()), tmp_path, kind, model, sizes)
    got = torch.load(tmp_path / "seen.pt", weights_only=False)
    assert got.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, atol=1e-4, rtol=1e-4, err_msg=name)


def process_of(rank):
    """The process id of this rank of the torchrun job that is a descendant of this process."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in words and f"TINKER_TEST={os.getpid()}".encode() in words:
            return int(path.parent.name)
    raise AssertionError(f"rank {rank} is not there")


@pytest.mark.long
@pytest.mark.timeout(280)
@pytest.mark.skipif(not small_model.installed(), reason="make installs the model that the small one is made of")
def test_a_rank_that_dies_ends_the_job_by_its_number_and_clients_go_on_with_the_next_server(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TEST", str(os.getpid()))
    small_model.write_package(tmp_path)
    engine = ("--dtype", "float32", "--max-sequence-length", "512", "--buffer-size-gb", "0.2", "--lora-rank", "8")
    options = ("smollm2", *engine, "--served-model-name", "tiny", "--state-dir", str(tmp_path / "state"))
    how = {"path": os.pathsep.join((str(tmp_path), str(ROOT))), "command": "tinker"}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    job = Command(*options, "--dp", "2", launcher=launcher, **how)
    try:
        with httpx.Client(base_url=job.wait_ready(), timeout=60) as http:
            api = Api(http)
            session, id = api.session, api.train()
            api.batch(id, 1, "cross_entropy", BATCH)
            first = api.result(api.step(id, 2))
            api.batch(id, 3, "cross_entropy", BATCH)
            want = api.batch(id, 4, "cross_entropy", BATCH)[1]
            os.kill(process_of(1), signal.SIGKILL)
            assert job.process.wait(60) != 0
    finally:
        job.end()
    assert job.matches(r"rank\s*: 1 ") and job.matches("rank 1 of the job failed"), "".join(job.lines)
    alone = Command(*options, **how)
    try:
        with httpx.Client(base_url=alone.wait_ready(), timeout=60) as http:
            api = Api(http)
            api.session = session
            assert api.train() == id
            goes_on(api, id, first)
            got = api.batch(id, 6, "cross_entropy", BATCH, forward_only=True)[1]
            np.testing.assert_allclose(np.concatenate(got), np.concatenate(want), atol=1e-5)
    finally:
        assert alone.end() == 0


def test_layouts_that_cannot_be_are_refused(tmp_path, capsys, monkeypatch):
    for arguments, why in {
        ("--tp", "2"): "torchrun --nproc-per-node 2",
        ("--pp", "2"): "torchrun --nproc-per-node 2",
        ("--full", "--lora-rank", "4"): "leave one of them out",
        ("--training-share", "1"): "below 1",
    }.items():
        assert main(["tinker", "smollm2", *arguments]) == 2
        assert why in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    on_a_cpu = "on a CPU: megatron-core trains so on CUDA devices only"
    for name, layout, why in (
        ("llama", ("--tp", "2"), "3 processes"),
        ("llama", ("--pp", "2"), f"--pp {on_a_cpu}"),
        ("llama", ("--dp-attention", "true"), "all requests"),
        ("qwen3_moe", ("--ep", "2"), f"--ep {on_a_cpu}"),
        ("qwen3_moe", ("--tp", "2"), on_a_cpu),
        ("deepseek_v3", ("--tp", "2"), on_a_cpu),
        ("deepseek_v3", ("--tp", "2", "--device", "cuda", "--batch-invariant"), "sequence parallelism"),
    ):
        config = config_of(name)
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.save_pretrained(tmp_path / name)
        assert main(["tinker", str(tmp_path / name), *layout]) == 2
        assert why in capsys.readouterr().err
