"""Expert-parallel ranks with requests of their own, each a replica with its tensor-parallel ranks or pipeline
stages."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from coordinator_case import serve_ranks, wait_for
from engine_ranks import GPT, make_engine, take_part, weights_of, workload
from gloo_ranks import new_groups, run_on_ranks, stage_ends

from megatron_infer.coordinator.protocol import ControlFailed
from megatron_infer.models.mcore_compat import parallel_state
from megatron_infer.models.specs import gpt_spec
from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"


def work():
    return [(prompt, dataclasses.replace(params, max_tokens=60)) for prompt, params in workload(6)]


def experts(stage=0, **sizes):
    return tiny_gpt(spec=lambda config: gpt_spec(config, pp_rank=stage), **GPT, **EXPERTS, randomize=False, **sizes)


def serve_own(rank, size, folder, sizes):
    """Each of two parts is a replica with requests of its own, and serves the experts of the other one's steps."""
    new_groups(**sizes)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    ends = stage_ends(stage, sizes[PP]) if PP in sizes else {}
    model = experts(stage, **sizes, **ends)
    weights, tokens = torch.load(folder / "whole.pt")
    take_part(model, weights)
    engine = make_engine(model, dp_attention=True, max_requests=4, collective_timeout_s=60)
    groups, receiver = engine.rank_group.groups, WeightReceiver(engine)
    assert groups.own_requests and groups.dp_size == 2

    def talk(one, client):
        assert_answers([client.submit(*work()[0])], tokens)  # one replica has no request
        for begin, end in (("pause", "unpause"), ("suspend", "resume")):
            futures = [client.submit(*pair) for pair in work()]
            wait_for(lambda: all(one["running"] for one in client.stats()["replicas"]))
            for command in (begin, end):
                answers = getattr(client, command)()
                assert len(answers) == 2 and all(one.ok for one in answers.values()), answers
                if command == begin:
                    assert_missed(one, client)  # ranks that compute nothing are asked too
                    time.sleep(0.3)
            assert_answers(futures, tokens)
        assert all(one.ok for one in client.set_weight_version(7).values())
        output = client.submit(*work()[1]).result(60)
        assert [span.policy_version for span in output.outputs[0].spans] == [7]
        futures = [client.submit(*pair) for pair in work()]
        assert_missed(one, client)
        assert_answers(futures, tokens)
        checksums = client.control("check_weights", action="checksum").values()
        assert len({one.value["checksum"] for one in checksums}) == 1
        assert all(one.ok for one in client.control("begin_weights").values())
        assert_missed(one, client)  # between the parts of an update no rank steps
        assert all(one.ok for one in client.control("cancel_weights").values())
        assert_answers([client.submit(*work()[0])], tokens)
        assert all(one.ok for one in client.pause(timeout_s=30).values())

    how = {"control": True, "commands": receiver.commands(), "name": f"replica{groups.dp_rank}"}
    serve_ranks(rank, engine, folder, talk, count=2, followed=(receiver.followed(),), options={"timeout_s": 5.0}, **how)
    assert not groups.is_leader or not len(engine.output_processor)


def assert_missed(one, client):
    """A command that one replica does not get fails, and the job goes on."""
    send = one.core.broadcasts._send

    def lose(peer, message):
        if getattr(message, "command", "") != "reset_prefix_cache" or one.core._replicas[peer].name != "replica1":
            send(peer, message)

    one.core.broadcasts._send = lose
    with pytest.raises(ControlFailed, match="replica1"):
        client.control("reset_prefix_cache", timeout_s=1)
    one.core.broadcasts._send = send


def assert_answers(futures, tokens):
    for wanted, future in zip(tokens, futures, strict=False):
        output = future.result(60)
        assert output.error is None, output.error
        assert output.outputs[0].token_ids == wanted


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({EP: 2}, marks=pytest.mark.long),
        pytest.param({EP: 2, TP: 2}, marks=pytest.mark.slow),
        pytest.param({EP: 2, PP: 2}, marks=pytest.mark.slow),
    ],
    ids=["EP2", "TP2 x EP2", "PP2 x EP2"],
)
def test_expert_parallel_ranks_serve_their_own_requests_as_a_replica_each(tmp_path, sizes):
    model = experts()
    engine = make_engine(model)
    tokens = [engine.generate([prompt], [params])[0].outputs[0].token_ids for prompt, params in work()]
    torch.save((weights_of(model), tokens), tmp_path / "whole.pt")
    run_on_ranks(serve_own, 2 * sizes.get(TP, 1) * sizes.get(PP, 1), tmp_path, sizes)
