"""Adapters in PEFT's format: adapter_config.json beside adapter_model.safetensors, or tensors in memory.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight   [rank, in]     Hugging Face's names
    decoder.layers.3.self_attention.linear_qkv.lora_A.weight         [rank, in]     megatron-core's (`attach_lora`)

Every tensor is used or refused, and no tensor is read before sizes are known to fit the model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_infer.errors import ModelError
from megatron_infer.kernels import huge_pages
from megatron_infer.kernels.lora import PairBlock, dense, is_finite
from megatron_infer.models.loading.families import family_of, name_in_files
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.models.lora.adapter import Adapter, LoRAPair
from megatron_infer.models.lora.names import AdaptedLinear, AdaptedLinears
from megatron_infer.models.lora.peft_config import PeftConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES, MAX_HEADER_BYTES = 1 << 20, 8 << 20
MAX_RANK = 4096
"""The largest rank that is read without max_rank."""
_DTYPE_NAMES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""safetensors' names of dtypes."""
DTYPES = tuple(_DTYPE_NAMES.values())
PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_REFUSED = (
    ("lora_magnitude_vector", "a magnitude of DoRA, which is not supported"),
    ("lora_embedding_", "of an embedding, whose adapters are not supported"),
    ("modules_to_save", "a whole module's (modules_to_save), which is not supported"),
    (".lora_B.bias", "a bias of an adapter, which is not supported"),
    (".base_layer.", "a weight of the base model; give the adapter's tensors alone"),
    (".bias", "a bias, which is not supported"),
)
"""Part of a tensor's name -> why it is refused."""
_SHOWN = 5


def read_adapter(
    name: str,
    source: str | Path | Mapping[str, Tensor],
    model: Any,
    *,
    config: Mapping[str, Any] | None = None,
    description: ModelDescription | None = None,
    max_rank: int | None = None,
) -> Adapter:
    """An adapter for a live model, or for the model that a pipeline stage or tensor-parallel rank is a part of.

    source: a PEFT directory, or tensors under PEFT's or megatron-core's names. config: fields of an
    adapter_config.json; for tensors, which have no file of it, lora_alpha at least. description: the base model's
    (`open_source(...).config()`); None: read off the model, which is not enough for every family. max_rank: a pair of
    PEFT's may have; the pair of a fused linear that is made of several has the sum of their ranks, unless they share A.
    Raises ModelError, which names the adapter and no path, with all that is wrong.
    """
    try:
        given = {} if isinstance(source, Mapping) else _read_config(Path(source))
        settings = PeftConfig(given | dict(config or {}))
        _check_rank(settings, max_rank)
        if isinstance(source, Mapping):
            linears = AdaptedLinears.of(model, tuple(map(_module_name, source)), description)
            pairs = _Pairs(settings, linears, max_rank)
            return Adapter(name, pairs.joined(pairs.checked(_copied(source))))
        return Adapter(name, _read_pairs(Path(source) / WEIGHTS, model, description, settings, max_rank))
    except ModelError as error:
        text = f"adapter {name!r}: {error}"
        raise ModelError(text.encode("utf-8", "backslashreplace").decode()) from error  # names may be no UTF-8


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, whatever the caller writes into them later."""
    for name, one in tensors.items():
        if isinstance(one, Tensor) and (one.is_meta or one.layout is not torch.strided or hasattr(one, "full_tensor")):
            raise ModelError(f"{name[:200]} is no plain tensor with content; of a DTensor give full_tensor()")
    return {name: one.detach().clone() if isinstance(one, Tensor) else one for name, one in tensors.items()}


@dataclass(slots=True)
class _Found:
    """The tensors of one linear of the source."""

    shown: str
    """The linear's name there."""
    sides: dict[str, Tensor]
    """By A and B."""


class _Pairs:
    """Puts tensors together. All that is wrong is collected before anything is raised."""

    def __init__(self, config: PeftConfig, linears: AdaptedLinears, max_rank: int | None) -> None:
        self._config, self._linears, self._max_rank = config, linears, max_rank
        self._problems: list[str] = []

    def joined(self, scaled: Mapping[str, LoRAPair]) -> dict[str, LoRAPair]:
        """Pairs by megatron-core's path, of those by the source's linears."""
        pairs: dict[str, LoRAPair] = {}
        for path, linear in self._linears.by_path.items():
            parts = {source: scaled[source] for source in linear.sources if source in scaled}
            if path in scaled:
                pairs[path] = scaled[path]
            elif parts:
                pairs[path] = _joined(linear, parts)
        return pairs

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, LoRAPair]:
        """Pairs by the source's linears; of tensors without content (meta), these tensors, if they are that. Raises
        ModelError."""
        found = self._collected(tensors)
        self._check_complete(found)
        pairs = {source: self._checked(source, one) for source, one in found.items()}
        if self._problems:
            more = len(self._problems) - _SHOWN
            shown = (one if len(one) <= 400 else f"{one[:397]}..." for one in self._problems[:_SHOWN])
            raise ModelError("; ".join(shown) + (f"; and {more} more" if more > 0 else ""))
        return {source: pair for source, pair in pairs.items() if pair is not None}

    def _collected(self, tensors: Mapping[str, Tensor]) -> dict[str, _Found]:
        """By the linear's name in the description, or megatron-core's."""
        found: dict[str, _Found] = {}
        adapters = set()
        for name, tensor in tensors.items():
            match = _TENSOR.fullmatch(name.removeprefix(PREFIX))
            if match is None:
                why = next((why for part, why in _REFUSED if part in f".{name}"), "no tensor of a LoRA adapter")
                self._problems.append(f"{name} is {why}")
                continue
            adapters.add(match["adapter"])
            if (source := self._source(match["module"])) is None:
                self._problems.append(self._linears.refusal(match["module"]))
            elif match["side"] in found.setdefault(source, _Found(match["module"], {})).sides:
                self._problems.append(f"{name} is there twice, under two names")
            else:
                found[source].sides[match["side"]] = tensor
        if len(adapters) > 1:
            self._problems.append(f"tensors of several adapters: {', '.join(sorted(map(str, adapters)))}")
        if not tensors:
            self._problems.append("there are no tensors")
        paths = {self._linears.by_source[one].path for one in found if one in self._linears.by_source}
        self._problems += [f"{one} is given under both kinds of names" for one in sorted(paths & found.keys())]
        return found

    def _source(self, module: str) -> str | None:
        """The linear that a name means; None: there is none."""
        if module in self._linears.by_path or module in self._linears.by_source:
            return module
        description = self._linears.description
        of_bare_body = f"{family_of(description).base}.{module}"
        known = (name_in_files(module, description), of_bare_body)
        return next((one for one in known if one in self._linears.by_source), None)

    def _check_complete(self, found: Mapping[str, _Found]) -> None:
        """Against target_modules: PEFT would not load what they do not name, and invent what is missing."""
        config, linears = self._config, self._linears
        if not config.names_targets or not found or any(source in linears.by_path for source in found):
            return
        base = f"{family_of(linears.description).base}."
        first, shown = next((source, one.shown) for source, one in found.items())
        prefix = shown.removesuffix(first.removeprefix(base))
        as_shown = {source: prefix + source.removeprefix(base) for source in linears.by_source}
        for entry in config.unknown_targets(list(as_shown.values())):
            self._problems.append(f"target_modules: {linears.refusal(entry)}")
        for one in found.values():
            if not config.targets(one.shown):
                self._problems.append(f"{one.shown} has tensors, and target_modules does not name it")
        for source, name in as_shown.items():
            if source not in found and config.targets(name):
                self._problems.append(f"{name} is one of target_modules, and has no tensors")

    def _checked(self, source: str, found: _Found) -> LoRAPair | None:
        """The pair, with the source's own rows; None: something is wrong with it."""
        shown, count = found.shown, len(self._problems)
        for side in "AB":
            if side not in found.sides:
                self._problems.append(f"{shown} has no lora_{side}")
        if len(self._problems) > count:
            return None
        a, b = found.sides["A"], found.sides["B"]
        linear = self._linears.by_path.get(source)
        out, width = linear.shape if linear is not None else self._linears.by_source[source].sources[source]
        rank = a.shape[0] if a.dim() == 2 else 0
        if rank < 1:
            self._problems.append(f"{shown}: lora_A is {list(a.shape)}, a rank is at least 1")
        elif tuple(a.shape) != (rank, width) or tuple(b.shape) != (out, rank):
            self._problems.append(
                f"{shown}: lora_A {list(a.shape)} and lora_B {list(b.shape)}, and the base model needs "
                f"[rank, {width}] and [{out}, rank]"
            )
        elif (said := self._config.rank_of(shown)) not in (None, rank):
            self._problems.append(f"{shown} has rank {rank}, and the config says {said}")
        elif rank > (MAX_RANK if self._max_rank is None else self._max_rank):
            self._problems.append(f"{shown} has rank {rank}, {_limit(self._max_rank)}")
        elif a.dtype not in DTYPES or b.dtype not in DTYPES:
            self._problems.append(f"{shown}: {a.dtype} and {b.dtype}; known are float32, bfloat16 and float16")
        elif not all(one.is_meta or is_finite(one) for one in (a, b)):
            self._problems.append(f"{shown} has NaN or infinity")
        else:
            a, b = (one if one.is_meta else one.detach() for one in (a, b))
            return LoRAPair.of(a, b, self._config.scale_of(shown, rank))
        return None


def _joined(linear: AdaptedLinear, parts: Mapping[str, LoRAPair]) -> LoRAPair:
    """One pair of a linear: A stacks those of its sources, and B is block-diagonal. Sources whose A and scale are equal
    share their rows of A."""
    sharing: list[list[str]] = []
    for source, pair in parts.items():
        firsts = (parts[sources[0]] for sources in sharing)
        same = (i for i, first in enumerate(firsts) if first.scale == pair.scale and torch.equal(first.a, pair.a))
        if (index := next(same, None)) is None:
            sharing.append([source])
        else:
            sharing[index].append(source)
    dtypes = {tensor.dtype for pair in parts.values() for tensor in (pair.a, pair.b)}
    scales = {pair.scale for pair in parts.values()}
    dtype, scale = (dtypes.pop(), scales.pop()) if len(dtypes) == 1 == len(scales) else (torch.float32, 1.0)
    blocks: list[PairBlock] = []
    for sources in sharing:
        a = parts[sources[0]].a.to(dtype)
        if (missing := linear.shape[1] - a.shape[1]) > 0:  # kv groups of zeros
            a = torch.nn.functional.pad(a, (0, missing))
        given = [parts[source] for source in sources]
        own = [pair.b if pair.scale == scale else pair.b.to(dtype) * pair.scale for pair in given]
        b, rows = (one[0] if len(one) == 1 else torch.cat(one) for one in (own, [linear.rows[one] for one in sources]))
        blocks.append((a, linear.scaled(b.to(dtype)), rows))
    if len(blocks) > 1:
        return LoRAPair(tuple(blocks), linear.shape, scale)
    if torch.equal(rows, torch.arange(linear.shape[0], dtype=rows.dtype)):
        return LoRAPair.of(*blocks[0][:2], scale)
    return LoRAPair.of(*dense(blocks, linear.shape[0]), scale)


# ---------------------------------------------------------------------- writing


def write_adapter(
    directory: str | Path, adapter: Adapter, linears: AdaptedLinears, *, alpha: float, rslora: bool, base: str | None
) -> None:
    """Write an adapter, all of whose pairs have one rank and the scale of `alpha`, as a PEFT directory.

    Files that are there are replaced, each once it is complete, the config last. base: the base model's name or path.
    Raises ModelError where the directory cannot be written.
    """
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    sources: list[str] = []
    for path, pair in adapter.pairs.items():
        linear = linears.by_path[path]
        for source, rows in linear.parted(pair.b).items():
            shown = linears.in_memory(source)
            width = linear.sources[source][1]
            tensors[f"{PREFIX}{shown}.lora_A.weight"] = pair.a[:, :width].contiguous().clone()
            tensors[f"{PREFIX}{shown}.lora_B.weight"] = rows
            sources.append(source)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or linears.description.name or None,
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "use_rslora": rslora,
        "target_modules": linears.shortest_targets(sources),
        "fan_in_fan_out": linears.is_transposed,
        "bias": "none",
        "inference_mode": True,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in ((WEIGHTS, save(tensors, metadata={"format": "pt"})), (CONFIG, text.encode())):
            partial = directory / f".{name}.{os.getpid()}"
            partial.write_bytes(content)
            partial.replace(directory / name)
    except OSError as error:
        raise ModelError(f"{directory}: the adapter cannot be written: {error.strerror}") from error


# ---------------------------------------------------------------------- files


def _check_rank(config: PeftConfig, max_rank: int | None) -> None:
    if config.max_rank is not None and config.max_rank > (MAX_RANK if max_rank is None else max_rank):
        raise ModelError(f"rank {config.max_rank}, {_limit(max_rank)}")


def _limit(max_rank: int | None) -> str:
    return f"the limit is {MAX_RANK:,}" if max_rank is None else f"the limit is {max_rank} (max_rank)"


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ModelError(f"there is no such directory; a PEFT adapter is one, with {CONFIG} in it")
    with _opened(directory / CONFIG) as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise ModelError(f"{CONFIG} has more than {MAX_CONFIG_BYTES:,} bytes")
    return _json_object(text, CONFIG)


def _read_pairs(
    path: Path, model: Any, description: ModelDescription | None, config: PeftConfig, max_rank: int | None
) -> dict[str, LoRAPair]:
    """Names and shapes are checked before a tensor is read. Read, not mapped: a mapped file that is cut short meanwhile
    kills the process."""
    with _opened(path) as file:
        start = file.read(8)
        if len(start) < 8 or (length := int.from_bytes(start, "little")) > MAX_HEADER_BYTES:
            raise ModelError(f"{path.name} is no safetensors file, or its header is over {MAX_HEADER_BYTES:,} bytes")
        header = file.read(length)
        empty, starts = _empty_tensors(_json_object(header, path.name), path.name)
        linears = AdaptedLinears.of(model, tuple(map(_module_name, empty)), description)
        pairs = _Pairs(config, linears, max_rank)
        checked = pairs.checked(empty)
        content = huge_pages.empty(sum(tensor.nbytes for tensor in empty.values()), torch.uint8)
        if file.readinto(memoryview(content.numpy())) < len(content) or file.read(1):
            raise ModelError(f"{path.name} is damaged or cut short: its header says {len(content):,} bytes of tensors")
        file.seek(0)
        if file.read(8 + length) != start + header:  # the file was rewritten meanwhile
            raise ModelError(f"{path.name} has changed while it was read; load it again")
    read = {id(one): _view(content, starts[name], one) for name, one in empty.items()}
    dtypes = {tensor.dtype for tensor in empty.values()}
    if len(dtypes) > 1 or not is_finite(content.view(*dtypes)):
        for name, one in empty.items():
            if not is_finite(read[id(one)]):
                raise ModelError(f"{_module_name(name)} has NaN or infinity")
    return pairs.joined({one: LoRAPair.of(read[id(p.a)], read[id(p.b)], p.scale) for one, p in checked.items()})


def _view(content: Tensor, start: int, empty: Tensor) -> Tensor:
    """The tensor whose bytes begin at `start`."""
    part = content[start : start + empty.nbytes]
    return (part.clone() if start % empty.itemsize else part).view(empty.dtype).view(empty.shape)


def _empty_tensors(header: Mapping[str, Any], name: str) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The tensors that a safetensors header speaks of, without content, and where the bytes of each begin."""
    found: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for tensor, entry in header.items():
        if tensor == "__metadata__":
            continue
        try:
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if dtype not in _DTYPE_NAMES:
                raise ModelError(f"{tensor} has the dtype {str(dtype)[:40]}; known are {', '.join(_DTYPE_NAMES)}")
            if not all(type(size) is int and 0 <= size < 1 << 31 for size in shape) or len(shape) > 8:
                raise TypeError("not a shape")
            found[tensor] = torch.empty(shape, dtype=_DTYPE_NAMES[dtype], device="meta")
            if type(start) is not int or type(end) is not int or end - start != found[tensor].nbytes:
                raise TypeError("not its offsets")
        except ModelError:
            raise
        except (TypeError, KeyError, ValueError, RuntimeError):
            raise ModelError(
                f"{name} is damaged: its header says no shape, dtype and offsets of {tensor[:200]}"
            ) from None
        spans.append((start, end, tensor))
    spans.sort()
    if [start for start, _, _ in spans] != [0, *(end for _, end, _ in spans)][: len(spans)]:
        raise ModelError(f"{name} is damaged or cut short: its tensors do not follow each other")
    return found, {tensor: start for start, _, tensor in spans}


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """A regular file; what cannot be read is a ModelError that names the file without its folder."""
    if not path.is_file():
        other = next((one.name for one in sorted(path.parent.glob("adapter_model*")) if path.name == WEIGHTS), None)
        raise ModelError(f"there is no file {path.name}" + (f"; {other} is not read" if other else ""))
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from None


def _json_object(text: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{name}: expected a JSON object, got {type(value).__name__}")
    return value


def _module_name(name: str) -> str:
    """The linear's name in a tensor's name; the name itself where there is none."""
    match = _TENSOR.fullmatch(name.removeprefix(PREFIX))
    return match["module"] if match else name
