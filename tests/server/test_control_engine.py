"""RL loops control a real engine over HTTP: it uses the weights sent, and each token has its version."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch
from control_case import Background, call, get, serving_with_control, state_of, wait_for
from engines import make_engine
from safetensors.torch import save, save_file

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

PROMPT = [5, 9, 30, 7, 66, 12, 3]
LONG = 200


def model_of(seed):
    return tiny_gpt(seed=seed, vocab_size=128, max_sequence_length=256, init_method_std=0.2)


def engine_of(model):
    return make_engine(model, buffer_size_gb=0.02, max_sequence_length=256, max_requests=8)


def tensors_of(model):
    found = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: value.detach().clone().contiguous() for name, value in found.items()}


def answer(engine, count, prompt=PROMPT):
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
    return engine.generate([prompt], params)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Weights on disk: old and new as safetensors, new as a torch_dist checkpoint; the tokens each samples."""
    folder = tmp_path_factory.mktemp("weights")
    expected = {}
    for name, seed in (("old", 0), ("new", 1)):
        model = model_of(seed)
        (folder / name).mkdir()
        save_file(tensors_of(model), folder / name / "model.safetensors")
        if name == "new":
            save_checkpoint(model, folder / "dist")
        expected[name] = answer(engine_of(model), 24)
    assert expected["old"] != expected["new"]
    return folder, expected


@pytest.fixture
def case(versions):
    engine = engine_of(model_of(0))
    folder, _ = versions
    with serving_with_control(
        engine,
        text=False,
        weights_root=str(folder),
        commands_of=lambda one: WeightReceiver(one, weights_root=folder).commands(),
    ) as one:
        yield one


def drawn_so_far(case):
    return sum(
        len(sample.request.tokens) for group in case.engines[0].output_processor.requests for sample in group.sequences
    )


def completion(count=LONG, **changes):
    return {
        "model": "tiny", "prompt": PROMPT, "max_tokens": count, "temperature": 0.0, "top_p": 1.0, "top_k": -1,
        "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": 7, "ignore_eos": True,
        **changes,
    }  # fmt: skip


def native(count, **changes):
    sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **changes}


def test_loop_that_pauses_keeps_requests_and_updates_from_disk_sees_both_versions(case, versions):
    _, expected = versions
    rollout = Background(case, "/v1/completions", completion())
    wait_for(lambda: drawn_so_far(case) > len(PROMPT) + 3)
    call(case, "/pause?mode=keep")
    stood = drawn_so_far(case) - len(PROMPT)
    call(case, "/init_weight_transfer_engine", {"init_info": {"backend": "disk"}})
    call(case, "/start_weight_update")
    call(case, "/update_weights", {"update_info": {"path": "new"}})
    call(case, "/finish_weight_update", {"weight_version": 1})
    assert state_of(case) == "PAUSED(keep)" and drawn_so_far(case) - len(PROMPT) == stood
    call(case, "/resume")
    choice = rollout.result().json()["choices"][0]
    spans = choice["version_spans"]
    assert len(choice["token_ids"]) == LONG and choice["finish_reason"] == "length"
    assert (spans[0]["first_token"], spans[0]["policy_version"]) == (0, 0)
    assert spans[-1]["policy_version"] == 1 and spans[-1]["first_token"] == stood
    assert spans[-1]["kv_version_min"] == 0
    assert choice["token_ids"][: min(stood, 24)] == expected["old"][: min(stood, 24)]
    fresh = call(case, "/v1/completions", completion(24))["choices"][0]
    assert fresh["token_ids"] == expected["new"] and [s["policy_version"] for s in fresh["version_spans"]] == [1]
    assert len(fresh["logprobs"]["token_logprobs"]) == 24


def test_loop_that_aborts_releases_memory_and_loads_while_the_cache_is_away(case, versions):
    _, expected = versions
    before = call(case, "/generate", native(24))
    assert before["output_ids"] == expected["old"] and before["meta_info"]["weight_version"] == "0"
    assert [entry[1] for entry in before["meta_info"]["output_token_logprobs"]] == expected["old"]
    rollouts = [Background(case, "/generate", native(LONG, rid=f"r{i}")) for i in range(3)]
    wait_for(lambda: drawn_so_far(case) > 3 * (len(PROMPT) + 3))
    call(case, "/abort_request", {"abort_all": True})
    for rollout in rollouts:
        reply = rollout.result().json()
        part = reply["output_ids"]
        assert reply["meta_info"]["finish_reason"]["type"] == "abort" and 0 < len(part) < LONG
        assert part[:24] == expected["old"][: len(part)]
        assert len(reply["meta_info"]["output_token_logprobs"]) == len(part)
    call(case, "/flush_cache", method="GET")
    freed = call(case, "/release_memory_occupation", {"tags": ["kv_cache", "weights", "cuda_graph"]})
    assert freed["bytes_freed"]["kv_cache"] > 0 and inspect(case.engines[0]).store.resident_bytes() == 0
    assert "ASLEEP" in call(case, "/generate", native(4), expected=503)["error"]["message"]
    call(case, "/update_weights_from_disk", {"model_path": "new"}, expected=409)
    call(case, "/resume_memory_occupation", {"tags": ["weights"]})
    call(case, "/update_weights_from_disk", {"model_path": "new", "weight_version": "4", "flush_cache": True})
    back = call(case, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert back["state"] == "SERVING" and back["bytes_freed"]["kv_cache"] < 0
    after = call(case, "/generate", native(24))
    assert after["output_ids"] == expected["new"] and after["meta_info"]["weight_version"] == "4"
    assert get(case, "/get_weight_version") == {"weight_version": "4"}


def test_loop_of_tokens_alone_sleeps_with_requests_and_wakes_up_to_the_same_tokens(case, versions):
    _, expected = versions
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": LONG, "temperature": 0.0, "ignore_eos": True}}
    whole = call(case, "/inference/v1/generate", body)["choices"][0]
    assert whole["token_ids"][:24] == expected["old"]
    again = Background(case, "/inference/v1/generate", body)
    wait_for(lambda: drawn_so_far(case) > len(PROMPT) + 3)
    asleep = call(case, "/sleep?level=1&mode=keep")
    assert asleep["bytes_freed"]["kv_cache"] > 0 and get(case, "/is_sleeping")["is_sleeping"]
    call(case, "/wake_up?tags=weights")
    call(case, "/wake_up?tags=kv_cache")
    assert again.result().json()["choices"][0]["token_ids"] == whole["token_ids"]
    call(case, "/sleep?level=2")
    call(case, "/wake_up")
    assert call(case, "/inference/v1/generate", body)["choices"][0]["token_ids"] == whole["token_ids"]


def test_bytes_and_checkpoints_bring_the_same_weights_as_files(case, versions):
    _, expected = versions
    new = tensors_of(model_of(1))
    names = sorted(new)
    load = lambda: call(case, "/v1/completions", completion(24))["choices"][0]["token_ids"]  # noqa: E731
    call(case, "/update_weights_from_disk", {"model_path": "dist"})
    assert load() == expected["new"]
    wanted = call(case, "/weights_checker", {"action": "snapshot"})["checksum"]
    call(case, "/update_weights_from_disk", {"model_path": "old/model.safetensors"})
    assert load() == expected["old"]
    call(case, "/weights_checker", {"action": "compare"}, expected=400)
    call(case, "/start_weight_update")
    for part in (names[:3], names[3:]):
        data = save({name: new[name] for name in part})
        reply = case.http.post("/update_weights", content=data, headers={"Content-Type": "application/octet-stream"})
        assert reply.status_code == 200, reply.text
    call(case, "/finish_weight_update", {"weight_version": 3})
    assert load() == expected["new"]
    assert call(case, "/weights_checker", {"action": "compare"})["checksum"] == wanted


def test_update_that_lacks_a_tensor_names_it_and_leaves_the_old_weights(case, versions):
    _, expected = versions
    new = tensors_of(model_of(1))
    missing = sorted(new)[-1]
    rollout = Background(case, "/v1/completions", completion())
    wait_for(lambda: drawn_so_far(case) > len(PROMPT) + 3)
    call(case, "/start_weight_update")
    data = save({name: tensor for name, tensor in new.items() if name != missing})
    octets = {"Content-Type": "application/octet-stream"}
    assert case.http.post("/update_weights", content=data, headers=octets).status_code == 200
    error = call(case, "/finish_weight_update", {"weight_version": 3}, expected=400)["error"]
    assert missing in error["message"] and error["phase"] == "weight update (finish)" and error["state"] == "SERVING"
    choice = rollout.result().json()["choices"][0]
    assert choice["token_ids"][:24] == expected["old"]
    assert {span["policy_version"] for span in choice["version_spans"]} == {0}
    wrong = save({sorted(new)[0]: torch.zeros(3)})
    call(case, "/start_weight_update")
    reply = case.http.post("/update_weights", content=wrong, headers=octets)
    assert reply.status_code == 400 and sorted(new)[0] in reply.json()["error"]["message"]
    assert state_of(case) == "SERVING"
    assert call(case, "/v1/completions", completion(24))["choices"][0]["token_ids"] == expected["old"]


def test_incomplete_weights_sample_no_token_until_an_update_has_restored_all(case, versions):
    _, expected = versions
    call(case, "/weights_checker", {"action": "snapshot"})
    call(case, "/weights_checker", {"action": "reset"})
    waiting = Background(case, "/v1/completions", completion(24))
    wait_for(lambda: len(case.engines[0].output_processor) == 1)
    call(case, "/weights_checker", {"action": "compare"}, expected=400)
    call(case, "/update_weights_from_disk", {"model_path": "old"})
    call(case, "/weights_checker", {"action": "compare"})
    assert waiting.result().json()["choices"][0]["token_ids"] == expected["old"]


def test_routed_experts_come_for_every_position():
    experts = tiny_gpt(
        vocab_size=128, max_sequence_length=256, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=48,
        moe_router_load_balancing_type="none",
    )  # fmt: skip
    with serving_with_control(engine_of(experts), text=False) as case:
        reply = call(case, "/generate", native(5, return_routed_experts=True))
        routed = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), np.int32)
        routed = routed.reshape(len(PROMPT) + 5 - 1, 2, 2)
        assert routed.min() >= 0 and routed.max() < 4
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5, "temperature": 0, "logprobs": 0}}
        (choice,) = call(case, "/skyrl/v1/generate", body)["choices"]
        packed = choice["routed_experts"]
        assert (packed["shape"], packed["dtype"]) == ([len(PROMPT) + 5 - 1, 2, 2], "uint8")
        assert base64.b64decode(packed["data"]) == routed.astype(np.uint8).tobytes(), "as SkyRL unpacks them"
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 5
        call(case, "/skyrl/v1/generate", body | {"stream": True}, expected=400)


def test_engine_with_half_written_weights_stays_paused_whichever_route_began_the_update(case, versions):
    _, expected = versions
    rollout = Background(case, "/v1/completions", completion())
    wait_for(lambda: drawn_so_far(case) > len(PROMPT) + 3)
    with InferenceClient(case.coordinator.address) as client:
        client.control("begin_weights")  # without a pause
        stood = drawn_so_far(case)
        late = Background(case, "/v1/completions", completion(24))
        wait_for(lambda: len(case.engines[0].output_processor) == 2)
        assert drawn_so_far(case) - stood == len(PROMPT) and case.replicas[0].failure is None
        client.control("cancel_weights", version=0)
    assert rollout.result().json()["choices"][0]["token_ids"][:24] == expected["old"]
    assert late.result().json()["choices"][0]["token_ids"] == expected["old"]


def test_ids_in_the_nucleus_come_for_every_token_as_slime_reads_them(case):
    sampling = {
        "max_new_tokens": 6, "temperature": 1.0, "top_p": 0.6, "top_k": -1, "ignore_eos": True, "sampling_seed": 3,
        "custom_params": {"return_top_p_token_ids": True},
    }  # fmt: skip
    meta = call(case, "/generate", {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})
    meta = meta["meta_info"]
    ids, offsets = (
        np.frombuffer(base64.b64decode(meta[f"top_p_token_{name}"]), np.int32) for name in ("ids", "offsets")
    )
    drawn = [token for _, token, _ in meta["output_token_logprobs"]]
    kept = [ids[begin:end].tolist() for begin, end in zip(offsets, offsets[1:], strict=False)]
    assert len(kept) == 6 and all(token in among for token, among in zip(drawn, kept, strict=True))
    assert 1 < max(map(len, kept)) < 128
    sampling["top_p"] = 1.0  # keeps the whole vocabulary
    meta = call(case, "/generate", {"input_ids": PROMPT, "sampling_params": sampling})["meta_info"]
    offsets = np.frombuffer(base64.b64decode(meta["top_p_token_offsets"]), np.int32)
    assert offsets.tolist() == [128 * place for place in range(7)]


def test_server_info_has_what_a_vllm_client_reads_of_it(case):
    config = get(case, "/server_info?config_format=json")["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32" and config["lora_config"] is None
    assert config["model_config"]["max_model_len"] == 256 and config["parallel_config"]["data_parallel_size"] == 1


def test_loads_are_asked_for_by_the_sections_that_sglang_names(case):
    assert get(case, "/v1/loads?include=core,disagg,queues")["aggregate"]["num_total_reqs"] == 0
    assert "include is 'nothing'" in get(case, "/v1/loads?include=core,nothing", expected=400)["error"]["message"]


def test_a_profile_is_written_where_the_engines_environment_says(case, tmp_path, monkeypatch):
    monkeypatch.delenv("MEGATRON_INFER_PROFILE_DIR", raising=False)
    refused = call(case, "/start_profile", {"num_steps": 2}, expected=400)
    assert "MEGATRON_INFER_PROFILE_DIR=FOLDER" in refused["error"]["message"]
    monkeypatch.setenv("MEGATRON_INFER_PROFILE_DIR", str(tmp_path))
    (started,) = call(case, "/start_profile", {"num_steps": 3})["replicas"].values()
    assert started["path"].startswith(str(tmp_path)) and not list(tmp_path.iterdir())
    assert "being taken" in call(case, "/start_profile", expected=400)["error"]["message"]
    call(case, "/v1/completions", completion(8))
    wait_for(lambda: list(tmp_path.glob("profile-*")))
    call(case, "/start_profile")
    call(case, "/v1/completions", completion(2))
    call(case, "/stop_profile")
    traces = [json.loads(path.read_text())["traceEvents"] for path in tmp_path.iterdir()]
    assert 3 in [sum(event["name"] == "schedule" for event in events) for events in traces]
    assert len(traces) == 2 and all(any(event["name"] == "layers" for event in events) for events in traces)
    assert call(case, "/stop_profile")["status"] == "stopped"
    call(case, "/start_profile", {"num_steps": 0}, expected=400)
    call(case, "/start_profile", {"output_dir": "/etc"}, expected=400)
