"""torch_dist directories, and those of torch.distributed.checkpoint, that would run code where megatron-core or torch
loads them: refused, or loaded without it.

Each attack is first tried on their own loader, so that a refusal here is not one of a harmless file.
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
from torch.distributed import checkpoint
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ModelError, WeightUpdateError
from megatron_infer.models.loading.checkpoint import CheckpointSource, _sharded, save_checkpoint
from megatron_infer.models.loading.checkpoint_files import DistcpReader, MetadataUnpickler
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
def sharded(model, tmp_path):
    """As a model in FSDP2 saves its state dict."""
    folder = tmp_path / "sharded"
    checkpoint.save({name: value.detach() for name, value in model.named_parameters()}, checkpoint_id=folder)
    return folder


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


def saved_call(function, *args, beside=b""):
    buffer = io.BytesIO()
    torch.save((Call(function, *args), beside), buffer)
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


# ---------------------------------------------------------------------- directories of torch.distributed.checkpoint

NAME = "embedding.word_embeddings.weight"


def chunk(offsets, sizes):
    return dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def put_chunks(metadata, chunks, **changes):
    """Make `chunks` those of NAME, each of them in the place of the whole tensor with `changes`."""
    place = metadata.storage_data.pop(dcp.MetadataIndex(NAME, torch.Size([0, 0])))
    metadata.state_dict_metadata[NAME].chunks = chunks
    for one in chunks:
        metadata.storage_data[dcp.MetadataIndex(NAME, one.offsets)] = _StorageInfo(**vars(place) | changes)


@pytest.mark.security
def test_directory_of_torch_is_read_without_running_code(sharded, model, ran):
    source = DistcpReader(sharded)
    assert all(torch.equal(source.read(name), value) for name, value in model.named_parameters())
    good = metadata_of(sharded)
    put_metadata(sharded, Call(os.mkdir, str(ran)))
    with contextlib.suppress(Exception, CheckpointException):
        checkpoint.load({NAME: torch.empty(128, 64)}, checkpoint_id=sharded)
    assert ran.exists(), "this is no attack"
    ran.rmdir()
    for use in (DistcpReader, lambda folder: apply(model, folder)):
        with pytest.raises(ModelError, match=r"cannot be read safely: posix.mkdir is none of"):
            use(sharded)
    put_metadata(sharded, good)
    put_bytes(sharded, NAME, saved_call(os.mkdir, str(ran)))  # an object, which torch unpickles
    with contextlib.suppress(Exception, CheckpointException):
        checkpoint.load({NAME: object()}, checkpoint_id=sharded)
    assert ran.exists(), "this is no attack"
    ran.rmdir()
    with pytest.raises(WeightUpdateError, match=r"embedding\.word_embeddings\.weight"):
        apply(model, sharded)
    assert NAME not in DistcpReader(sharded).shapes() and not ran.exists()


@pytest.mark.security
def test_object_in_the_place_of_a_tensor_is_not_unpickled(sharded, ran):
    metadata, content = metadata_of(sharded), saved_call(os.mkdir, str(ran), beside=bytes(128 * 64 * 4))
    torch.load(io.BytesIO(content), weights_only=False)
    ran.rmdir()  # so this is an attack
    (sharded / "__1_0.distcp").write_bytes(content)
    put_chunks(metadata, [chunk((0, 0), (128, 64))], relative_path="__1_0.distcp", offset=0, length=len(content))
    put_metadata(sharded, metadata)
    with pytest.raises(ModelError, match=r"word_embeddings.weight cannot be read: Weights only load failed"):
        DistcpReader(sharded).read(NAME)
    assert not ran.exists()


@pytest.mark.security
@pytest.mark.parametrize("file", ["../secret.distcp", "/etc/passwd", "nothing.distcp", "link/secret.distcp", 5])
def test_tensors_of_a_directory_of_torch_come_out_of_its_own_files(sharded, file):
    (sharded.parent / "secret.distcp").write_bytes(b"x")
    (sharded / "link").symlink_to(sharded.parent)
    metadata = metadata_of(sharded)
    put_chunks(metadata, [chunk((0, 0), (128, 64))], relative_path=file)
    put_metadata(sharded, metadata)
    with pytest.raises(ModelError, match=r"is no \.distcp file of this directory"):
        DistcpReader(sharded)


SHAPES = {
    "huge": ((1 << 40, 64), [((0, 0), (1 << 40, 64))], {}, "bytes, too few for its shape"),
    "hole": ((256, 64), [((0, 0), (128, 64))], {}, r"another number of elements than its shape \(256, 64\)"),
    "overlap": ((128, 64), [((0, 0), (64, 64)), ((32, 0), (64, 64))], {}, r"at \(0, 0\) and \(32, 0\) overlap"),
    "outside": ((128, 64), [((64, 0), (128, 64))], {}, "is not within its shape"),
    "other dimensions": ((128, 64), [((0, 0, 0), (128, 64, 1))], {}, "is not within its shape"),
    "transformed": ((128, 64), [((0, 0), (128, 64))], {"transform_descriptors": ["zstd"]}, "transformed by"),
    "beyond the file": ((128, 64), [((0, 0), (128, 64))], {"offset": 1 << 40}, "is cut short"),
    "no number": ((128, 64), [((0, 0), (128, 64))], {"offset": "0"}, "its entry is damaged"),
}
"""A tensor's size, its chunks, changes of their places, and the error."""


@pytest.mark.security
@pytest.mark.parametrize("mistake", SHAPES)
def test_chunks_that_are_not_the_whole_tensor_are_refused_before_memory_is_taken(mistake, sharded, folder, model):
    """Elements that no chunk has would be what the memory held before."""
    size, chunks, changes, message = SHAPES[mistake]
    metadata = metadata_of(sharded)
    metadata.state_dict_metadata[NAME].size = torch.Size(size)
    put_chunks(metadata, [chunk(*one) for one in chunks], **changes)
    put_metadata(sharded, metadata)
    with pytest.raises(ModelError, match=f"word_embeddings.weight: .*{message}"):
        DistcpReader(sharded)
    shutil.copy(sharded / ".metadata", folder)  # of a torch_dist directory the same file names the same tensors
    for file in sharded.glob("*.distcp"):
        shutil.copy(file, folder)
    with pytest.raises(ModelError, match=message):
        CheckpointSource(folder).part_of(model)


@pytest.mark.security
def test_file_that_is_cut_short_is_refused_with_its_name(sharded):
    file = sharded / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ModelError, match=r"__0_0\.distcp is cut short"):
        DistcpReader(sharded)
