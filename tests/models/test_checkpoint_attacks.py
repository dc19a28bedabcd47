"""torch_dist directories that would run code where megatron-core loads them: refused, or loaded without it.

Each attack is first tried on megatron-core's own loader, so that a refusal here is not one of a harmless file.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import json
import os
import pickle
import shutil

import pytest
import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ModelError, WeightUpdateError
from megatron_infer.models.loading.checkpoint import CheckpointSource, _sharded, save_checkpoint
from megatron_infer.models.loading.checkpoint_files import MetadataUnpickler
from megatron_infer.rl.updates import apply
from megatron_infer.testing.tiny import tiny_gpt


class Call:
    """Its pickle calls a function where it is loaded."""

    def __init__(self, function, *args):
        self.made_of = function, args

    def __reduce__(self):
        return self.made_of


@pytest.fixture(scope="module")
def model():
    return tiny_gpt(vocab_size=128, max_sequence_length=64)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_checkpoint(model, folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoint")


@pytest.fixture
def ran(tmp_path):
    """What an attack makes: a directory."""
    return tmp_path / "it_ran"


def metadata_of(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def put_metadata(folder, metadata):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def put_bytes(folder, name, content):
    """Make the entry `name` of a checkpoint one of bytes."""
    file = folder / "__0_0.distcp"
    at = file.stat().st_size
    with file.open("ab") as opened:
        opened.write(content)
    metadata = metadata_of(folder)
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        del metadata.storage_data[index]
    metadata.state_dict_metadata[name] = dcp.BytesStorageMetadata()
    metadata.storage_data[dcp.MetadataIndex(name)] = _StorageInfo(file.name, at, len(content))
    put_metadata(folder, metadata)


def saved_call(function, *args):
    buffer = io.BytesIO()
    torch.save(Call(function, *args), buffer)
    return buffer.getvalue()


def load_as_megatron_does(folder, model, ran):
    with contextlib.suppress(Exception, CheckpointException):  # what follows the call may fail
        dist_checkpointing.load(_sharded(model), str(folder))
    assert ran.exists(), "this is no attack"
    ran.rmdir()


@pytest.mark.security
def test_command_in_the_metadata_is_refused_by_name_and_not_run(folder, model, ran):
    put_metadata(folder, Call(os.mkdir, str(ran)))
    load_as_megatron_does(folder, model, ran)
    source = CheckpointSource(folder)
    for use in (source.load_into, source.part_of, lambda _: next(source.tensors())):
        with pytest.raises(ModelError, match=r"cannot be read safely: posix.mkdir is none of .* save_checkpoint"):
            use(model)
    assert not ran.exists()


@pytest.mark.security
def test_engine_keeps_its_weights_when_an_update_hides_a_command(folder, ran):
    model = tiny_gpt(vocab_size=128, max_sequence_length=64)
    engine = DynamicInferenceEngine(model, InferenceConfig(buffer_size_gb=0.01, max_sequence_length=64, max_requests=2))
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    before = engine.generate([[1, 2, 3]], greedy)[0].outputs[0].token_ids
    put_metadata(folder, Call(os.mkdir, str(ran)))
    with pytest.raises(WeightUpdateError, match=r"posix\.mkdir"):
        apply(engine, str(folder))
    assert not ran.exists() and engine.generate([[1, 2, 3]], greedy)[0].outputs[0].token_ids == before


@pytest.mark.security
def test_objects_beside_the_tensors_are_not_unpickled(folder, model, ran):
    """`_extra_state` of layers: torch loads it with weights_only=False."""
    name = next(key for key in metadata_of(folder).state_dict_metadata if "_extra_state" in key)
    put_bytes(folder, name, saved_call(os.mkdir, str(ran)))
    load_as_megatron_does(folder, model, ran)
    found = CheckpointSource(folder).part_of(model)
    assert not ran.exists()
    assert all(torch.equal(found[name], value) for name, value in model.named_parameters())


@pytest.mark.security
def test_tensor_that_claims_to_be_an_object_is_missing_and_not_unpickled(folder, model, ran):
    put_bytes(folder, "embedding.word_embeddings.weight", saved_call(os.mkdir, str(ran)))
    with pytest.raises(ModelError, match=r"embedding\.word_embeddings\.weight"):
        CheckpointSource(folder).part_of(model)
    assert not ran.exists()


@pytest.mark.security
def test_common_file_is_not_read_where_a_description_is_and_else_read_safely(folder, model, ran):
    torch.save(Call(os.mkdir, str(ran)), folder / "common.pt")
    CheckpointSource(folder).load_into(model)
    (folder / "megatron_infer.json").unlink()
    with pytest.raises(ModelError, match=r"common.pt: cannot be read safely"):
        CheckpointSource(folder)
    assert not ran.exists()


@pytest.mark.security
@pytest.mark.parametrize("file", ["../secret.distcp", "/etc/passwd", "nothing.distcp", "metadata.json", 5])
def test_tensors_come_out_of_files_of_the_directory_alone(folder, model, file):
    (folder.parent / "secret.distcp").write_bytes(b"x")
    metadata = metadata_of(folder)
    for index in metadata.storage_data:
        metadata.storage_data[index] = _StorageInfo(file, 0, 10)
    put_metadata(folder, metadata)
    with pytest.raises(ModelError, match=r"is no \.distcp file of this directory"):
        CheckpointSource(folder).part_of(model)


@pytest.mark.security
def test_other_format_is_not_handed_to_other_loaders(folder, model):
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    with pytest.raises(ModelError, match="its format is 'zarr', only torch_dist is read"):
        CheckpointSource(folder).part_of(model)


@pytest.mark.security
@pytest.mark.parametrize(
    "value",
    [
        Call(eval, "1"), Call(exec, "1"), Call(__import__, "os"), Call(getattr, dcp.Metadata, "__init__"),
        Call(getattr, "", "join"), Call(torch.load, "x"), Call(pickle.loads, b"N."), Call(torch.zeros, 3),
        Call(copyreg._reconstructor, dcp.Metadata, object, None), Call(io.open, "/etc/passwd"),
        Call(setattr, 1, "a", 2), dcp.Metadata, Exception("x"), torch.zeros(2), {dcp.StorageMeta: print},
    ],
)  # fmt: skip
def test_what_is_no_metadata_is_refused_or_a_bare_class(value):
    try:
        found = MetadataUnpickler(io.BytesIO(pickle.dumps(value))).load()
    except pickle.UnpicklingError:
        return
    assert found is dcp.Metadata, "naming a class of the list makes nothing"


@pytest.mark.security
def test_state_is_not_set_on_a_class():
    state = b"N}\x8c\x01a\x8c\x01bs\x86"  # (None, {"a": "b"}): setattr for each
    text = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n" + state + b"b."
    with pytest.raises(pickle.UnpicklingError, match=r"the state of a builtins\.type is not set"):
        MetadataUnpickler(io.BytesIO(text)).load()
    assert not hasattr(dcp.Metadata, "a")


def test_metadata_of_torch_come_out_equal(saved):
    data = (saved / ".metadata").read_bytes()
    assert vars(MetadataUnpickler(io.BytesIO(data)).load()) == vars(pickle.loads(data))
