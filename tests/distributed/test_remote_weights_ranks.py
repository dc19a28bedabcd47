"""A replica of two tensor-parallel ranks takes new weights by the coordinator's wire, on both ranks or on neither."""

from __future__ import annotations

import threading

import pytest
import torch
from coordinator_case import coordinator, wait_for
from engine_ranks import make_engine, part_of_model, whole_model
from gloo_ranks import new_groups, run_on_ranks
from safetensors.torch import load_file, save_file

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.replica import Replica
from megatron_infer.rl.weight_receiver import WeightReceiver

PROMPT = [5, 9, 30, 7, 66, 12, 3]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def changed(model):
    """The whole model's tensors, each with another value."""
    found = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: (value * 0.5 + 0.01 * (value.ndim == 1)).contiguous() for name, value in found.items()}


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def answer(client):
    return client.generate(PROMPT, PARAMS)[0].outputs[0].token_ids


def steer(client, folder, expected):
    new = load_file(folder / "new.safetensors")
    assert answer(client) == expected["old"]
    with pytest.raises(protocol.ControlFailed, match="nowhere"):
        client.control("load_weights", path=str(folder / "nowhere"))
    client.control("cancel_weights", version=0)
    with pytest.raises(protocol.ControlFailed, match="unexpected keyword argument 'no_such'"):
        client.control("begin_weights", no_such=1)
    client.pause()
    client.control("load_weights", path=str(folder / "new.safetensors"))
    client.control("finish_weights", version=1)
    client.control("cancel_weights", version=0)  # also what is finished can be taken back
    client.unpause()
    assert answer(client) == expected["old"]
    client.pause()
    client.control("begin_weights")
    for name, tensor in new.items():
        data, half = bytes_of(tensor), tensor.nbytes // 2
        for offset, piece in ((0, data[:half]), (half, data[half:])):
            about = {"name": name, "dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "offset": offset}
            client.control("write_weights", **about, data=piece)
    client.control("finish_weights", version=2)
    client.control("settle_weights")
    client.unpause()
    sums = client.control("check_weights", action="checksum")
    assert {answer.value["checksum"] for answer in sums.values()} == {expected["checksum"]}
    output = client.generate(PROMPT, PARAMS)[0].outputs[0]
    assert output.token_ids == expected["new"]
    assert [span.policy_version for span in output.spans] == [2], output.spans
    path = str(folder / "new.safetensors")
    (loaded,) = client.control("load_weights", path=path).values()
    files = loaded.value["files"]
    client.control("cancel_weights", version=2)
    for wrong in ([[path, "of another file"]], [[path, files], [str(folder / "nowhere"), files]]):
        with pytest.raises(protocol.ControlFailed, match=r"was changed since|nowhere"):
            client.control("restore_weights", sources=wrong, version=9)
        assert client.generate(PROMPT, PARAMS)[0].outputs[0].spans[0].policy_version == 2
    client.control("check_weights", action="reset")  # as if it had been started again with other weights
    client.control("restore_weights", sources=[[path, files]], version=7)
    output = client.generate(PROMPT, PARAMS)[0].outputs[0]
    assert output.token_ids == expected["new"] and output.spans[0].policy_version == 7
    sums = client.control("check_weights", action="checksum")
    assert {answer.value["checksum"] for answer in sums.values()} == {expected["checksum"]}


def serve(rank, size, folder, steer, options):
    """A replica of all ranks, while a client does `steer(client, folder, expected)`."""
    new_groups(tensor_model_parallel_size=size)
    engine = make_engine(part_of_model("attention", str(folder), rank, size), **options)
    weights = WeightReceiver(engine, weights_root=folder)
    if rank:
        engine.follow(weights.followed())
        return
    expected, failures = torch.load(folder / "expected.pt"), []

    def talk(address, replica):
        try:
            with InferenceClient(address) as client:
                wait_for(lambda: client.stats()["replicas"])
                steer(client, folder, expected)
        except BaseException as error:
            failures.append(error)
        finally:
            replica.stop()

    served = {"control": True, "commands": weights.commands()}
    with coordinator(timeout_s=20.0) as one, Replica(engine, one.address, name="r", **served) as replica:
        thread = threading.Thread(target=talk, args=(one.address, replica))
        thread.start()
        replica.run()
        thread.join()
    engine.dismiss()
    if failures:
        raise failures[0]


@pytest.mark.long
def test_two_ranks_take_weights_out_of_files_and_in_pieces_and_give_them_back(tmp_path):
    model = whole_model("attention")
    engine = make_engine(model)
    expected = {"old": engine.generate([PROMPT], [PARAMS])[0].outputs[0].token_ids}
    new = changed(model)
    save_file(new, tmp_path / "new.safetensors")
    weights = WeightReceiver(engine, weights_root=tmp_path).commands()
    weights["load_weights"](path=str((tmp_path / "new.safetensors").resolve()))
    weights["finish_weights"](version=1)
    weights["settle_weights"]()
    expected["new"] = engine.generate([PROMPT], [PARAMS])[0].outputs[0].token_ids
    assert expected["new"] != expected["old"]
    expected["checksum"] = weights["check_weights"](action="checksum")["checksum"]
    torch.save(expected, tmp_path / "expected.pt")
    run_on_ranks(serve, 2, tmp_path, steer, {})
