"""Expert-parallel ranks with requests of their own, each a replica behind a coordinator."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch
from coordinator_case import coordinator, wait_for
from engine_ranks import GPT, make_engine, take_part, weights_of, workload
from gloo_ranks import new_groups, run_on_ranks

from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.protocol import ControlFailed
from megatron_infer.coordinator.replica import Replica
from megatron_infer.coordinator.served_engine import meet_ranks
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt


def work():
    return [(prompt, dataclasses.replace(params, max_tokens=60)) for prompt, params in workload(6)]


def experts(**sizes):
    return tiny_gpt(**GPT, **EXPERTS, randomize=False, **sizes)


def serve_own(rank, size, folder):
    """Each rank is a replica with requests of its own, and serves the experts of the other one's steps."""
    new_groups(expert_model_parallel_size=size)
    model = experts(expert_model_parallel_size=size)
    weights, tokens = torch.load(folder / "whole.pt")
    take_part(model, weights)
    engine = make_engine(model, dp_attention=True, max_requests=4, collective_timeout_s=60)
    assert engine.relay.own_requests
    failures = []

    def run(address):
        with Replica(engine, address, control=True, name=f"replica{rank}") as replica:
            if rank == 1:
                lose("reset_prefix_cache", replica)
            thread = threading.Thread(target=talk if rank == 0 else stop_with_the_other, args=(address, replica))
            thread.start()
            replica.run()
            thread.join()
        meet_ranks(engine, "the end")
        engine.dismiss()
        assert not len(engine.output_processor)

    def stop_with_the_other(address, replica):
        wait_for((folder / "ended").exists)
        time.sleep(0.2)
        replica.stop()

    def talk(address, replica):
        try:
            with InferenceClient(address) as client:
                wait_for(lambda: len(client.stats()["replicas"]) == size)
                assert_answers([client.submit(*work()[0])], tokens)  # one replica has no request
                for begin, end in (("pause", "unpause"), ("suspend", "resume")):
                    futures = [client.submit(*pair) for pair in work()]
                    wait_for(lambda: all(one["running"] for one in client.stats()["replicas"]))
                    for command in (begin, end):
                        answers = getattr(client, command)()
                        assert len(answers) == size and all(one.ok for one in answers.values()), answers
                    assert_answers(futures, tokens)
                assert all(one.ok for one in client.set_weight_version(7).values())
                output = client.submit(*work()[1]).result(60)
                assert [span.policy_version for span in output.outputs[0].spans] == [7]
                futures = [client.submit(*pair) for pair in work()]
                with pytest.raises(ControlFailed, match="replica1"):
                    client.control("reset_prefix_cache", timeout_s=1)  # one replica does not get it
                assert_answers(futures, tokens)
                assert all(one.ok for one in client.pause(timeout_s=30).values())
        except BaseException as error:
            failures.append(error)
        finally:
            (folder / "ended").touch()
            replica.stop()

    if rank == 0:
        with coordinator(timeout_s=5.0) as one:
            (folder / "address.part").write_text(one.address)
            (folder / "address.part").rename(folder / "address")
            run(one.address)
    else:
        wait_for((folder / "address").exists)
        run((folder / "address").read_text())
    if failures:
        raise failures[0]


def lose(command, replica):
    """Commands of this name do not come to the replica."""
    receive = replica.on_message
    replica.on_message = lambda message: None if getattr(message, "command", "") == command else receive(message)


def assert_answers(futures, tokens):
    for wanted, future in zip(tokens, futures, strict=False):
        output = future.result(60)
        assert output.error is None, output.error
        assert output.outputs[0].token_ids == wanted


@pytest.mark.long
def test_expert_parallel_ranks_serve_their_own_requests_as_a_replica_each(tmp_path):
    model = experts()
    engine = make_engine(model)
    tokens = [engine.generate([prompt], [params])[0].outputs[0].token_ids for prompt, params in work()]
    torch.save((weights_of(model), tokens), tmp_path / "whole.pt")
    run_on_ranks(serve_own, 2, tmp_path)
