"""Weights into a live GPTModel, in place, one tensor at a time and only this rank's part of it.

Tensors come under their Hugging Face names from any `TensorReader` (safetensors here, GGUF in gguf.py). megatron-core
keeps Q, K and V fused and interleaved per kv group ([q of group 0, k0, v0, q of group 1, ...]), and gate and up stacked
in fc1.
Shape legend: N query heads, K kv heads, H head dim, D hidden, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from megatron_infer.errors import ModelError
from megatron_infer.models.hf_config import ModelPlan
from megatron_infer.text.tokenizer import read_json

Span = tuple[int, int]


class TensorReader(Protocol):
    """A model's tensors under their Hugging Face names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Full shape of every tensor, without reading any."""
        ...

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """One tensor, or a range of its first (rows) or second (columns) dimension."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """This rank's part of tensor parallelism."""

    rank: int = 0
    size: int = 1

    def span(self, total: int) -> Span:
        share = total // self.size
        return self.rank * share, (self.rank + 1) * share


WHOLE = Shard()


@dataclass(slots=True)
class _Recipe:
    """How one megatron-core parameter is made: the tensors it needs, with their full shapes, and the code."""

    sources: dict[str, tuple[int, ...]] = field(default_factory=dict)
    make: Callable[[TensorReader, Shard], Tensor] | None = None
    """None: zeros (a bias the source does not have)."""


def load_weights(model: nn.Module, reader: TensorReader, plan: ModelPlan, shard: Shard = WHOLE) -> None:
    """Copy every parameter of `model` (a GPTModel or one pipeline stage of it) from `reader`.

    Nothing is written unless everything fits: missing, unexpected and mis-shaped tensors are one ModelError that lists
    them all. The model's dtype decides what is stored; rounding from fp32 to bf16 is to nearest even.
    """
    recipes = dict(_recipes(model, plan))
    shapes = reader.shapes()
    needed = {source: shape for recipe in recipes.values() for source, shape in recipe.sources.items()}
    _check(plan, shapes, needed, whole=_is_whole(model))
    _check_split(plan, shard)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            recipe = recipes[name]
            if recipe.make is None:
                parameter.zero_()
                continue
            value = recipe.make(reader, shard)
            _store(name, parameter, value, vocabulary="word_embeddings" in name or name.startswith("output_layer"))


def _store(name: str, parameter: nn.Parameter, value: Tensor, *, vocabulary: bool) -> None:
    if vocabulary and value.shape[0] < parameter.shape[0]:  # padding entries: masked by the sampler, kept at zero
        parameter[value.shape[0] :].zero_()
        parameter[: value.shape[0]].copy_(value)
        return
    if value.shape != parameter.shape:
        raise ModelError(f"{name}: the model has shape {tuple(parameter.shape)}, the weights make {tuple(value.shape)}")
    parameter.copy_(value)


def _is_whole(model: nn.Module) -> bool:
    return bool(getattr(model, "pre_process", True) and getattr(model, "post_process", True))


def _check(
    plan: ModelPlan, shapes: Mapping[str, tuple[int, ...]], needed: Mapping[str, tuple[int, ...]], *, whole: bool
) -> None:
    missing = sorted(set(needed) - set(shapes))
    misshaped = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in sorted(needed.items())
        if name in shapes and tuple(shapes[name]) != shape
    ]
    unexpected = sorted(name for name in set(shapes) - set(needed) if not _ignorable(name, plan)) if whole else []
    problems = []
    if missing:
        problems.append(f"missing ({len(missing)}): {', '.join(missing)}")
    if misshaped:
        problems.append(f"wrong shape ({len(misshaped)}): {'; '.join(misshaped)}")
    if unexpected:
        problems.append(f"unexpected ({len(unexpected)}): {', '.join(unexpected)}")
    if problems:
        raise ModelError(f"{plan.name or plan.architecture}: tensors do not fit the config; " + "; ".join(problems))


def _ignorable(name: str, plan: ModelPlan) -> bool:
    """Buffers that old checkpoints carry, and the copy of the embedding that tied models may hold."""
    if name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")):
        return True
    return plan.tied_embeddings and name == "lm_head.weight"


def _check_split(plan: ModelPlan, shard: Shard) -> None:
    config = plan.transformer
    for key in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if config[key] % shard.size:
            raise ModelError(
                f"{plan.name}: {key} {config[key]} cannot be split over {shard.size} tensor-parallel ranks"
            )


def _recipes(model: nn.Module, plan: ModelPlan) -> Iterator[tuple[str, _Recipe]]:
    make = {"Phi3ForCausalLM": _Phi3Names, "GPT2LMHeadModel": _GPT2Names}.get(plan.architecture, _LlamaNames)
    names = make(plan, model)
    layers = getattr(getattr(model, "decoder", None), "layers", ())
    # layer_number counts from 1 over the whole model: right for a pipeline stage too.
    numbers = [layer.layer_number - 1 for layer in layers]
    unknown = []
    for name, _ in model.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, index, part = name.split(".", 3)
            recipe = names.layer(numbers[int(index)], part)
        else:
            recipe = names.outer(name)
        if recipe is None:
            unknown.append(name)
        else:
            yield name, recipe
    if unknown:
        raise ModelError(
            f"{plan.architecture}: no weights are known for these parameters of the model: {', '.join(unknown)}"
        )


def base_prefix(plan: ModelPlan) -> str:
    """What the names of all tensors but the head begin with."""
    return "transformer" if plan.architecture == "GPT2LMHeadModel" else "model"


# Transformer Engine specs keep the norm inside the linear that follows it; the local spec keeps it apart.
_NORM_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}


class _LlamaNames:
    """Recipes for the naming that Llama set: model.layers.N.self_attn.q_proj and so on."""

    embedding, final_norm, positions, head = "model.embed_tokens", "model.norm", "", "lm_head"
    prefix = "model.layers"
    norms: ClassVar = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}

    def __init__(self, plan: ModelPlan, model: nn.Module) -> None:
        config = plan.transformer
        self.plan = plan
        self.hidden: int = config["hidden_size"]
        self.ffn: int = config["ffn_hidden_size"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_query_groups"]
        self.head_dim: int = config["kv_channels"]
        self.model_vocab: int = getattr(model, "vocab_size", plan.vocab_size)

    def outer(self, name: str) -> _Recipe | None:
        """A parameter outside the layers."""
        if name == "embedding.word_embeddings.weight":
            return self._vocabulary(f"{self.embedding}.weight")
        if name == "output_layer.weight":
            return self._vocabulary(f"{self.embedding if self.plan.tied_embeddings else self.head}.weight")
        if name == "embedding.position_embeddings.weight" and self.positions:
            return _whole(f"{self.positions}.weight", (self.plan.max_sequence_length, self.hidden))
        if name in ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias"):
            return _whole(f"{self.final_norm}.{name.rsplit('.', 1)[1]}", (self.hidden,))
        return None

    def layer(self, index: int, part: str) -> _Recipe | None:
        """A parameter of layer `index` (0-based); `part` is its name within the layer."""
        part = _NORM_ALIASES.get(part, part)
        module, kind = part.rsplit(".", 1)
        prefix = f"{self.prefix}.{index}"
        if module in self.norms:
            return _whole(f"{prefix}.{self.norms[module]}.{kind}", (self.hidden,))
        if module in ("self_attention.q_layernorm", "self_attention.k_layernorm"):
            letter = module.split(".")[1][0]
            return _whole(f"{prefix}.self_attn.{letter}_norm.{kind}", (self.head_dim,))
        linears = {
            "self_attention.linear_qkv": ("qkv", self._qkv),
            "self_attention.linear_proj": ("proj", self._proj),
            "mlp.linear_fc1": ("fc1", self._fc1),
            "mlp.linear_fc2": ("fc2", self._fc2),
        }
        if module not in linears or kind not in ("weight", "bias"):
            return None
        short, recipe = linears[module]
        if kind == "bias" and short not in self.plan.linear_biases:
            return _Recipe()
        return recipe(prefix, kind)

    def _vocabulary(self, source: str) -> _Recipe:
        true = self.plan.vocab_size

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            start, stop = shard.span(self.model_vocab)
            return reader.read(source, rows=(min(start, true), min(stop, true)))

        return _Recipe({source: (true, self.hidden)}, make)

    def _qkv(self, prefix: str, kind: str) -> _Recipe:
        names = [f"{prefix}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]
        tail = (self.hidden,) if kind == "weight" else ()
        rows = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            parts = [reader.read(name, rows=shard.span(count)) for name, count in zip(names, rows, strict=True)]
            return self._interleave(parts, shard)

        return _Recipe({name: (count, *tail) for name, count in zip(names, rows, strict=True)}, make)

    def _interleave(self, parts: list[Tensor], shard: Shard) -> Tensor:
        """[N*H, ...], [K*H, ...], [K*H, ...] -> [K * (N/K + 2) * H, ...], group by group."""
        groups = self.kv_heads // shard.size
        return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)

    def _proj(self, prefix: str, kind: str) -> _Recipe:
        return self._row_parallel(f"{prefix}.self_attn.o_proj.{kind}", self.heads * self.head_dim)

    def _fc1(self, prefix: str, kind: str) -> _Recipe:
        return self._stacked([f"{prefix}.mlp.gate_proj.{kind}", f"{prefix}.mlp.up_proj.{kind}"], kind)

    def _fc2(self, prefix: str, kind: str) -> _Recipe:
        return self._row_parallel(f"{prefix}.mlp.down_proj.{kind}", self.ffn)

    def _stacked(self, names: list[str], kind: str) -> _Recipe:
        tail = (self.hidden,) if kind == "weight" else ()

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            return torch.cat([reader.read(name, rows=shard.span(self.ffn)) for name in names])

        return _Recipe(dict.fromkeys(names, (self.ffn, *tail)), make)

    def _row_parallel(self, name: str, width: int) -> _Recipe:
        """A linear split over its inputs; its bias is whole on every rank."""
        if name.endswith(".bias"):
            return _whole(name, (self.hidden,))
        return _Recipe({name: (self.hidden, width)}, lambda reader, shard: reader.read(name, columns=shard.span(width)))


class _Phi3Names(_LlamaNames):
    """Phi-3 keeps q, k, v in one tensor (whole blocks, not interleaved) and gate, up in one."""

    def _qkv(self, prefix: str, kind: str) -> _Recipe:
        name = f"{prefix}.self_attn.qkv_proj.{kind}"
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            spans = ((0, shard.span(q)), (q, shard.span(kv)), (q + kv, shard.span(kv)))
            return self._interleave([reader.read(name, rows=(at + a, at + b)) for at, (a, b) in spans], shard)

        return _Recipe({name: (q + 2 * kv, self.hidden)}, make)

    def _fc1(self, prefix: str, kind: str) -> _Recipe:
        name = f"{prefix}.mlp.gate_up_proj.{kind}"

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            start, stop = shard.span(self.ffn)
            return torch.cat([reader.read(name, rows=(at + start, at + stop)) for at in (0, self.ffn)])

        return _Recipe({name: (2 * self.ffn, self.hidden)}, make)


class _GPT2Names(_LlamaNames):
    """GPT-2: learned positions, and linears stored as [in, out]."""

    embedding, final_norm, positions, head = "transformer.wte", "transformer.ln_f", "transformer.wpe", "lm_head"
    prefix = "transformer.h"
    norms: ClassVar = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}

    def _qkv(self, prefix: str, kind: str) -> _Recipe:
        name, width = f"{prefix}.attn.c_attn.{kind}", self.hidden

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            start, stop = shard.span(width)
            spans = [(at + start, at + stop) for at in (0, width, 2 * width)]
            if kind == "bias":
                return self._interleave([reader.read(name, rows=span) for span in spans], shard)
            return self._interleave([reader.read(name, columns=span).t() for span in spans], shard)

        return _Recipe({name: (width, 3 * width) if kind == "weight" else (3 * width,)}, make)

    def _proj(self, prefix: str, kind: str) -> _Recipe:
        return self._transposed_row(f"{prefix}.attn.c_proj.{kind}", self.hidden)

    def _fc1(self, prefix: str, kind: str) -> _Recipe:
        name = f"{prefix}.mlp.c_fc.{kind}"
        if kind == "bias":
            return _Recipe({name: (self.ffn,)}, lambda reader, shard: reader.read(name, rows=shard.span(self.ffn)))
        shape = (self.hidden, self.ffn)
        return _Recipe({name: shape}, lambda reader, shard: reader.read(name, columns=shard.span(self.ffn)).t())

    def _fc2(self, prefix: str, kind: str) -> _Recipe:
        return self._transposed_row(f"{prefix}.mlp.c_proj.{kind}", self.ffn)

    def _transposed_row(self, name: str, width: int) -> _Recipe:
        if name.endswith(".bias"):
            return _whole(name, (self.hidden,))
        return _Recipe(
            {name: (width, self.hidden)}, lambda reader, shard: reader.read(name, rows=shard.span(width)).t()
        )


def _whole(name: str, shape: tuple[int, ...]) -> _Recipe:
    return _Recipe({name: shape}, lambda reader, shard: reader.read(name))


class SafetensorsReader:
    """Tensors of a Hugging Face directory: *.safetensors files, memory-mapped; the index says which, when there is one.

    A directory with pytorch_model*.bin only is read with torch.load(weights_only=True): no code from the file runs.
    """

    def __init__(self, directory: str | Path, *, base: str = "") -> None:
        """base: prefix of the tensors within the model; files saved from the bare body lack it, and it is put back."""
        self.directory = Path(directory)
        self._handles: dict[str, Any] = {}
        self._home: dict[str, Any] = {}
        self._bin: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._added = ""
        self._open_all()
        if base and not any(name.startswith(f"{base}.") for name in self._shapes):
            self._added = f"{base}."
            self._shapes = {
                name if name == "lm_head.weight" else self._added + name: s for name, s in self._shapes.items()
            }

    def _open_all(self) -> None:
        files = self._files("*.safetensors", "model.safetensors.index.json")
        if files:
            for path in files:
                self._open(path)
            return
        files = self._files("pytorch_model*.bin", "pytorch_model.bin.index.json")
        if not files:
            raise ModelError(f"{self.directory}: no *.safetensors files (nor pytorch_model*.bin)")
        for path in files:
            self._load_bin(path)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        name = name.removeprefix(self._added)
        if name in self._bin:
            tensor: Any = self._bin[name]
        elif rows is None and columns is None:
            return self._home[name].get_tensor(name)
        else:
            tensor = self._home[name].get_slice(name)
        if columns is not None:
            return tensor[:, columns[0] : columns[1]]
        return tensor[rows[0] : rows[1]] if rows is not None else tensor

    def _files(self, pattern: str, index_name: str) -> list[Path]:
        index_path = self.directory / index_name
        if not index_path.is_file():
            return sorted(self.directory.glob(pattern))
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise ModelError(f"{index_path}: no weight_map")
        paths = [self.directory / file for file in sorted(set(weight_map.values()))]
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise ModelError(f"{self.directory}: {index_name} names files that are not there: {', '.join(absent)}")
        return paths

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            handle = safe_open(path, framework="pt")
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                self._home[name] = handle
                self._shapes[name] = tuple(handle.get_slice(name).get_shape())
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path}: damaged or truncated safetensors file: {error}") from error

    def _load_bin(self, path: Path) -> None:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds here; each means this file cannot be used
            raise ModelError(f"{path}: cannot be read safely (torch.load, weights_only): {error}") from error
        self._bin.update(tensors)
        self._shapes.update({name: tuple(tensor.shape) for name, tensor in tensors.items()})
