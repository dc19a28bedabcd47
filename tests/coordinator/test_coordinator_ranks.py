"""Replicas of two tensor-parallel ranks behind a coordinator: the leader communicates, the other follows."""

from __future__ import annotations

import dataclasses
import time

import pytest
from coordinator_case import serve_ranks, serve_roles, wait_for
from engine_ranks import account, assert_same_account, make_engine, part_of_model, whole_model, workload
from gloo_ranks import new_groups, run_on_ranks

from megatron_infer.coordinator import parcel_transfer


def work():
    return [(prompt, dataclasses.replace(params, max_tokens=60)) for prompt, params in workload(6)]


def serve(rank, size, folder, timeout_s, idle_s):
    new_groups(tensor_model_parallel_size=size)
    engine = make_engine(part_of_model("attention", str(folder), rank, size), collective_timeout_s=timeout_s)
    tokens = [line.split() for line in (folder / "tokens").read_text().splitlines()]

    def talk(one, client):
        time.sleep(idle_s)  # longer than a collective may take: no rank is missed while there is no work
        futures = [client.submit(*pair) for pair in work()]
        wait_for(lambda: client.stats()["replicas"][0]["running"])
        time.sleep(0.1)  # the requests run for a fraction of a second on an idle machine
        one.core.unreachable(next(iter(one.core._replicas)), "a test says so")
        for wanted, future in zip(tokens, futures, strict=True):
            output = future.result(60)
            assert output.error is None, output.error
            assert [str(token) for token in output.outputs[0].token_ids] == wanted
        assert client.stats()["resent"] >= 1
        assert next(iter(client.pause().values())).ok
        assert next(iter(client.unpause().values())).ok

    serve_ranks(rank, engine, folder, talk, count=1, control=True)


@pytest.mark.long
@pytest.mark.parametrize(("timeout_s", "idle_s"), [(60.0, 0.5), (5.0, 7.0)])
def test_two_ranks_serve_as_one_replica_through_idling_moves_and_controls(tmp_path, timeout_s, idle_s):
    engine = make_engine(whole_model("attention"))
    expected = [engine.generate([prompt], [params])[0] for prompt, params in work()]
    lines = (" ".join(map(str, output.outputs[0].token_ids)) for output in expected)
    (tmp_path / "tokens").write_text("\n".join(lines))
    run_on_ranks(serve, 2, tmp_path, timeout_s, idle_s)


def of_each(outputs):
    """The account of each output, by its place."""
    return {place: one for place, output in enumerate(outputs) for one in account([output]).values()}


def compute_and_go_on(rank, size, folder):
    """Ranks 0 and 1 compute prompts, ranks 2 and 3 go on with the requests."""
    new_groups(tensor_model_parallel_size=2)
    cache = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru"}
    engine = make_engine(part_of_model("attention", str(folder), rank % 2, 2), **cache)
    prompts, params = map(list, zip(*work(), strict=True))
    want = of_each(engine.generate(prompts, params))
    engine.reset_prefix_cache()
    num_prefilled, num_drawn = engine.stats().counters["prefill_tokens"], [engine.figures().output_tokens]

    def decoding(client):
        (replica,) = (one for one in client.stats()["replicas"] if one["role"] == "decode_only")
        return replica["stats"]

    def compare(client, *, with_memory):
        outputs = client.generate(prompts, params)
        assert_same_account(of_each(outputs), want)
        assert of_each(outputs) == want or not with_memory
        wait_for(lambda: decoding(client)["num_free_blocks"] == decoding(client)["num_blocks"])
        computed = decoding(client)["counters"]["prefill_tokens"] - num_prefilled
        assert (computed == 0) is with_memory, computed
        counts = [len(one.token_ids) for output in outputs for one in output.outputs]
        num_drawn.append(decoding(client)["figures"]["output_tokens"])
        assert num_drawn[-1] - num_drawn[-2] == sum(counts) - len(counts), "all but the first ones, each once"

    def talk(one, client):
        compare(client, with_memory=True)
        parcel_transfer.MAX_WAITING_BYTES = 1000
        compare(client, with_memory=False)
        assert client.stats()["moved"] == 2 * len(prompts) and not client.stats()["resent"]
        one.core.check()

    serve_roles(rank, engine, folder, talk, role_min_prompt_tokens=1)


@pytest.mark.long
def test_requests_move_between_replicas_of_two_ranks_with_what_each_rank_has_computed(tmp_path):
    """To the bit; where the memory is lost, they go on after the tokens that their client has."""
    run_on_ranks(compute_and_go_on, 4, tmp_path)
