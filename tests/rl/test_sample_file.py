"""Sample files and messages give back the samples that were written; damaged ones are refused with the reason."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from megatron_infer.errors import InferenceError
from megatron_infer.outputs.schema import Piece
from megatron_infer.outputs.token_support import TokenSupport, support_row
from megatron_infer.rl import sample_codec, sample_file
from megatron_infer.rl.sample_file import SampleError
from megatron_infer.rl.samples import RolloutError, RolloutGroup, RolloutSample
from megatron_infer.scheduler.request import VersionSpan

FILES = Path(__file__).parent / "files"
VOCAB = 200
FULL = {"logprobs": True, "raw": True, "support": True, "routing": True, "reward": True}


def fp32(values: list[float]) -> list[float]:
    return np.array(values, dtype=np.float32).tolist()


def make_support(rng: random.Random, length: int) -> TokenSupport:
    rows = []
    for _ in range(length):
        size = rng.choice([0, 1, 3, 150])
        mask = np.zeros(-(-VOCAB // 32) * 32, dtype=bool)
        mask[rng.sample(range(VOCAB), size)] = True
        rows.append(np.empty(0, np.int32) if not size else support_row(np.packbits(mask, bitorder="little"), VOCAB))
    return TokenSupport.of_rows(VOCAB, rows)


def make_sample(rng: random.Random, prompt: list[int], length: int, **has: bool) -> RolloutSample:
    firsts = sorted(rng.sample(range(length), min(length, rng.randint(0, 3))))
    return RolloutSample(
        prompt_ids=prompt,
        token_ids=[rng.randrange(VOCAB) for _ in range(length)],
        text=rng.choice(["", "an answer", "日本語 \U0001f680", "half \udce6"]),
        logprobs=fp32([-rng.expovariate(1) for _ in range(length)]) if has.get("logprobs") else [],
        raw_logprobs=fp32([-rng.expovariate(1) for _ in range(length)]) if has.get("raw") else None,
        spans=[VersionSpan(first, i + 4, 3, i + 4) for i, first in enumerate(firsts)],
        finish_reason=rng.choice(sample_file.FINISH_REASONS),
        stop_reason=rng.choice([None, 7, "</s>"]),
        loss_mask=[rng.randint(0, 1) for _ in range(length)],
        support=make_support(rng, length) if has.get("support") else None,
        routing=np.random.default_rng(length).integers(0, 250, (len(prompt) + length - 1, 3, 2)).astype(np.uint8)
        if has.get("routing")
        else None,
        reward=rng.random() if has.get("reward") else None,
        info={"turn": rng.randint(0, 3), "tags": ["a", None, 1.5]},
    )


def make_groups(seed: int) -> list[RolloutGroup]:
    rng = random.Random(seed)
    groups = []
    for index in range(rng.randint(0, 4)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        samples = [
            make_sample(rng, prompt, rng.choice([1, 5, 17]), **{name: rng.random() < 0.5 for name in FULL})
            for _ in range(rng.randint(0, 4))
        ]
        groups.append(
            RolloutGroup(
                group_id=f"rollout/{index}",
                prompt_ids=prompt,
                samples=samples,
                info={"answer": "42"},
                index=index,
                begun_version=3,
                num_cached_tokens=1,
            )
        )
    return groups


def assert_equal(one: RolloutSample, other: RolloutSample) -> None:
    for name in RolloutSample.__dataclass_fields__:
        if name == "routing":
            assert (one.routing is None) == (other.routing is None)
            if one.routing is not None:
                assert one.routing.dtype == other.routing.dtype and np.array_equal(one.routing, other.routing)
        else:
            assert getattr(one, name) == getattr(other, name), name


@pytest.mark.parametrize("seed", range(12))
def test_loaded_groups_equal_the_saved_groups(seed, tmp_path):
    groups = make_groups(seed)
    assert sample_file.save(tmp_path / "groups", groups) == (tmp_path / "groups").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["groups"]
    back = sample_file.load(tmp_path / "groups")
    assert len(back) == len(groups)
    for group, other in zip(groups, back, strict=True):
        for name in ("group_id", "prompt_ids", "info", "index", "begun_version", "num_cached_tokens", "error"):
            assert getattr(group, name) == getattr(other, name)
        for one, two in zip(group.samples, other.samples, strict=True):
            assert_equal(one, two)
            assert all(type(value) is type(other) for value, other in zip(one.token_ids, two.token_ids, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_a_decoded_sample_equals_the_encoded_sample(seed):
    rng = random.Random(seed)
    sample = make_sample(rng, [1, 2, 3], rng.choice([1, 8, 9]), **{name: rng.random() < 0.6 for name in FULL})
    sample.text = "text"
    assert_equal(sample_codec.decode_sample(sample_codec.encode_sample(sample)), sample)


def test_a_file_with_failed_groups_is_not_loaded_without_a_word(tmp_path):
    group = RolloutGroup(group_id="a", prompt_ids=[1], samples=[], error=InferenceError("the forward raised"))
    whole = RolloutGroup(group_id="b", prompt_ids=[1], samples=[])
    sample_file.save(tmp_path / "groups", [group, whole])
    with pytest.raises(RolloutError, match=r"1 of 2 groups failed: prompt 0 \(group a\): the forward raised") as caught:
        sample_file.load(tmp_path / "groups")
    assert [one.group_id for one in caught.value.groups] == ["a", "b"]
    back, _ = sample_file.load(tmp_path / "groups", on_error="return")
    assert str(back.error) == "the forward raised"


def one_group() -> RolloutGroup:
    sample = make_sample(random.Random(1), [1, 2], 9, **FULL)
    return RolloutGroup(group_id="g", prompt_ids=[1, 2], samples=[sample])


def altered(**arrays) -> bytes:
    """A sample file with some arrays replaced, and a digest that fits them."""
    content = sample_file.encode([one_group()])
    known = safetensors.numpy.load(content) | arrays
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return safetensors.numpy.save(known, _signed(header["__metadata__"], known))


def _signed(metadata, arrays):
    metadata = {name: value for name, value in metadata.items() if name != "digest"}
    return metadata | {"digest": sample_file._digest(arrays, metadata)}


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"token_ids": np.zeros(9, np.int64)}, "token_ids is int64, not int32"),
        ({"logprobs": np.zeros(9, np.float16)}, "logprobs is float16"),
        ({"spans": int32(1, 2, 3, 4)}, "spans has shape"),
        ({"spans": np.zeros((1, 3), np.int32)}, "spans has 3 columns, not 4 or 5"),
        ({"spans": np.zeros((1, 6), np.int32)}, "spans has 6 columns, not 4 or 5"),
        ({"lengths": int32(10)}, "token_ids has 9 entries, the rest of the file says 10"),
        ({"lengths": int32(-9)}, "a length is -9"),
        ({"lengths": int32(4, 5)}, "lengths has 2 entries, the rest of the file says 1"),
        ({"loss_mask": np.zeros(1, np.uint8)}, "loss_mask has 1 entries"),
        ({"prompt_lengths": int32(1)}, "prompt_ids has 2 entries"),
        ({"sample_group": int32(5)}, "sample_group"),
        ({"span_counts": int32(2**30)}, "spans has"),
        ({"support_counts": int32(*[0] * 9)}, "support_words has"),
        ({"support_words": np.full(10**4, -5, np.int32)}, "support_words has 10,000"),
        ({"routing": np.zeros((3, 3, 2), np.uint8)}, "routing has 3 entries"),
        ({"parts": np.zeros(1, np.uint8)}, "the rest of the file says 0"),
        ({"text_lengths": int32(10**6)}, "texts has"),
        ({"about": np.frombuffer(b"{", np.uint8)}, "'about' is not JSON"),
        ({"about": np.frombuffer(b'[{"id":1}]', np.uint8)}, "'about' does not describe"),
        ({"about": np.frombuffer(b"[]", np.uint8)}, "does not list the 1 groups"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused_with_the_reason(arrays, message):
    assert len(sample_file.decode(altered())) == 1
    with pytest.raises(SampleError, match=message):
        sample_file.decode(altered(**arrays))


def test_ids_outside_the_vocabulary_of_a_support_are_refused():
    support = TokenSupport.of_rows(VOCAB, [int32(3, 4)] * 9)
    group = one_group()
    group.samples[0].support = support
    known = safetensors.numpy.load(sample_file.encode([group]))
    wrong = known["support_words"].copy()
    wrong[5] = VOCAB
    with pytest.raises(SampleError, match="an id is outside the vocabulary of 200"):
        sample_file.decode(altered(support_words=wrong, support_counts=known["support_counts"]))


def test_every_truncation_and_every_flipped_bit_is_detected():
    content, rng = sample_file.encode([one_group()]), random.Random(2)
    for length in [0, 4, 8, 100, len(content) // 2, len(content) - 1]:
        with pytest.raises(SampleError):
            sample_file.decode(content[:length])
    for _ in range(400):
        place = rng.randrange(len(content))
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.randrange(8)
        with pytest.raises(SampleError):
            sample_file.decode(bytes(damaged))


def test_files_of_other_formats_are_refused(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(safetensors.numpy.save({"a": int32(1)}))
    with pytest.raises(SampleError, match=r"weights: no sample file: its safetensors format is None"):
        sample_file.load(path)
    with pytest.raises(SampleError, match="cannot be read: No such file"):
        sample_file.load(tmp_path / "absent")
    path.write_bytes(sample_file.encode([one_group()]))
    with pytest.raises(SampleError, match="limit is 10"):
        sample_file.load(path, max_bytes=10)
    content = sample_file.encode([one_group()]).replace(b'"schema":"1"', b'"schema":"9"')
    with pytest.raises(SampleError, match="schema '9', this code reads 1"):
        sample_file.decode(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [0.5]}, "logprobs has 1 entries for 9 tokens"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries for 9 tokens"),
        ({"loss_mask": [2] * 9}, "values other than 0 and 1"),
        ({"finish_reason": "tired"}, "finish_reason is 'tired'"),
        ({"spans": [VersionSpan(99, 1, 1, 1)]}, "spans begin at"),
        ({"spans": [VersionSpan(0, 1, 1, 1), VersionSpan(0, 2, 2, 2)]}, "spans begin at"),
        ({"routing": np.zeros((2, 2), np.uint8)}, "routing is uint8"),
        ({"token_ids": [2**40] * 9}, "does not fit"),
        ({"info": {"a": object()}}, "info of a group or sample is not JSON|cannot be encoded"),
    ],
)
def test_inconsistent_samples_are_refused_before_anything_is_written(change, message):
    group = one_group()
    group.samples[0].text = ""
    for name, value in change.items():
        setattr(group.samples[0], name, value)
    with pytest.raises(SampleError, match=message):
        sample_file.encode([group])
    with pytest.raises(SampleError, match=message):
        sample_codec.encode_sample(group.samples[0])


def test_a_sample_with_another_prompt_than_its_group_is_refused():
    group = one_group()
    group.prompt_ids = [9]
    with pytest.raises(SampleError, match="not that of the group"):
        sample_file.encode([group])


def test_spans_of_versions_without_adapters_are_read():
    sample = one_group().samples[0]
    sample.spans = [VersionSpan(0, 4, 3, 4), VersionSpan(5, 5, 3, 5)]
    content = altered(spans=np.array([span[:4] for span in sample.spans], np.int32), span_counts=int32(2))
    assert sample_file.decode(content)[0].samples[0].spans == sample.spans


@pytest.mark.parametrize(("bit", "width"), [(1 << 7, "uint8"), (1 << 8, "uint16"), (1 << 17, "uint32")])
def test_more_outputs_than_a_byte_has_bits_are_written_and_read(monkeypatch, bit, width):
    prompt = [1, 2, 3]
    first, second = (make_sample(random.Random(seed), prompt, 5) for seed in range(2))
    groups = [RolloutGroup(group_id="a", prompt_ids=prompt, samples=[first, second])]
    narrow = sample_file.encode(groups)
    monkeypatch.setitem(sample_file.PARTS, "choices", bit)
    assert safetensors.numpy.load(sample_file.encode(groups))["parts"].dtype == "uint8", "no sample has the part"
    assert_equal(sample_file.decode(narrow)[0].samples[1], second)
    first.index_choices = np.arange(14, dtype=np.int32).reshape(7, 1, 2)
    content = sample_file.encode(groups)
    assert safetensors.numpy.load(content)["parts"].dtype == width
    one, other = sample_file.decode(content)[0].samples
    assert np.array_equal(one.index_choices, first.index_choices)
    assert_equal(other, second)


def test_files_of_an_earlier_release_are_read():
    first, second = sample_file.load(FILES / "samples.v1")
    assert [one.token_ids for one in first.samples] == [[89, 51, 119, 121, 23, 127], [11, 28, 20, 73, 42, 27]]
    assert [one.reward for one in first.samples] == [0.5, None]
    assert second.samples[0].logprobs[:2] == [-2.3066978454589844, -2.1691012382507324]
    assert second.samples[0].raw_logprobs[:2] == [-2.6603076457977295, -2.5201244354248047]
    assert all(token in second.samples[0].support.ids_at(i) for i, token in enumerate(second.samples[0].token_ids))
    assert second.samples[0].routing.shape == (24, 2, 2)
    assert_same_columns(sample_file.encode([first, second]), (FILES / "samples.v1").read_bytes())


def assert_same_columns(one: bytes, other: bytes) -> None:
    one, other = safetensors.numpy.load(one), safetensors.numpy.load(other)
    assert set(one) == set(other)
    for name, column in one.items():
        assert column.dtype == other[name].dtype and np.array_equal(column, other[name]), name


def test_messages_of_an_earlier_release_are_refused_by_their_schema():
    with pytest.raises(SampleError, match="schema 1, this code reads 2; read it with its own version"):
        sample_codec.decode_sample((FILES / "sample.v1").read_bytes())


def packed(dtype: str, shape: list[int], content: bytes, counts: bytes = b"", vocab_size: int = 0) -> list:
    return [dtype, shape, content, counts, vocab_size]


def test_damaged_messages_are_refused():
    sample = one_group().samples[0]
    sample.text = ""
    content = sample_codec.encode_sample(sample)
    known = msgspec.msgpack.decode(content)
    names = Piece.__struct_fields__
    changes = [
        {"schema": 3},
        {"loss_mask": b""},
        {"other": 1},
        {"piece": []},
        {"tokens": b"abc"},
        {"tokens": b"abcd"},
        {"finish_reason": 3},
        {"spans": [[0, 1, 1]]},
        {"raw_logprobs": packed("float32", [], b"abcd")},
        {"raw_logprobs": packed("float64", [], bytes(72))},
        {"processed_logprobs": packed("float32", [], b"abcd")},
        {"support": packed("int32", [], b"", b"", VOCAB)},
        {"support": packed("int32", [], int32(VOCAB).tobytes(), int32(1, *[0] * 8).tobytes(), VOCAB)},
        {"support": packed("int32", [2], int32(*[1] * 18).tobytes(), int32(*[1] * 9).tobytes(), VOCAB)},
        {"support": packed("int32", [], int32(*[1] * 9).tobytes(), int32(*[1] * 9).tobytes(), 1 << 62)},
        {"routing": packed("float32", [1, 1], b"abcd")},
        {"routing": packed("uint8", [3, 2], b"abcd")},
        {"routing": packed("uint8", [-1, -4], b"abcd")},
        {"unknown": packed("uint8", [], b"abcd")},
    ]
    for change in changes:
        ((name, value),) = change.items()
        piece = list(known["piece"])
        if name in names:
            piece[names.index(name)] = value
        elif name not in known and name != "other":
            piece[names.index("token_outputs")] = piece[names.index("token_outputs")] | change
        damaged = known | (change if name in known or name == "other" else {"piece": piece})
        with pytest.raises(SampleError):
            sample_codec.decode_sample(msgspec.msgpack.encode(damaged))
    assert_equal(sample_codec.decode_sample(msgspec.msgpack.encode(known)), sample)
    for length in range(0, len(content), 37):
        with pytest.raises(SampleError):
            sample_codec.decode_sample(content[:length])
    with pytest.raises(SampleError, match="limit is 10"):
        sample_codec.decode_sample(content, max_bytes=10)


def test_a_sample_file_is_a_fraction_of_the_same_in_json():
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(64)]
    samples = [make_sample(rng, prompt, 200, **FULL) for _ in range(8)]
    group = RolloutGroup(group_id="g", prompt_ids=prompt, samples=samples)
    plain = [
        {
            "token_ids": s.token_ids,
            "logprobs": s.logprobs,
            "raw_logprobs": s.raw_logprobs,
            "loss_mask": s.loss_mask,
            "spans": s.spans,
            "support": [s.support.ids_at(i).tolist() for i in range(len(s.support))],
            "routing": s.routing.tolist(),
            "reward": s.reward,
        }
        for s in samples
    ]
    size = len(sample_file.encode([group]))
    assert size < len(json.dumps(plain)) / 3


def test_a_sample_that_ended_before_it_was_computed_is_written_with_others():
    """It has neither a vocabulary size nor a number of MoE layers."""
    rng = random.Random(4)
    prompt = [1, 2, 3]
    nothing = RolloutSample(
        prompt_ids=prompt,
        token_ids=[],
        finish_reason="abort",
        support=TokenSupport.of_rows(0, []),
        routing=np.empty((0, 0, 0), dtype=np.uint8),
    )
    full = make_sample(rng, prompt, 5, **FULL)
    [group] = sample_file.decode(
        sample_file.encode([RolloutGroup(group_id="a", prompt_ids=prompt, samples=[nothing, full])])
    )
    assert len(group.samples[0].support) == len(group.samples[0].routing) == 0
    assert group.samples[1].support == full.support and np.array_equal(group.samples[1].routing, full.routing)


def test_routing_of_no_layers_is_read_as_it_was_written():
    sample = make_sample(random.Random(4), [1, 2, 3], 5, routing=True)
    sample.routing = np.zeros((len(sample.routing), 0, 2), dtype=np.uint8)
    group = RolloutGroup(group_id="a", prompt_ids=[1, 2, 3], samples=[sample])
    [back] = sample_file.decode(sample_file.encode([group]))
    assert back.samples[0].routing.shape == sample.routing.shape


@pytest.mark.parametrize("metadata", [[1], "x", {"groups": "\u00b2"}, {"groups": "9" * 5000}, None, "nested"])
def test_a_header_with_malformed_metadata_is_refused(metadata):
    known = {
        "format": sample_file.FORMAT,
        "schema": "1",
        "groups": "1",
        "samples": "1",
        "vocab_size": "0",
        "digest": "",
    }
    header = json.dumps({"__metadata__": known | metadata if isinstance(metadata, dict) else metadata}).encode()
    header = b"[" * 100_000 if metadata == "nested" else header
    with pytest.raises(SampleError):
        sample_file.decode(len(header).to_bytes(8, "little") + header)
