"""Operations of many layers as one C++ call (native/layers.cpp). Without it every operation is a call from Python."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from operator import getitem
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_infer.kernels import huge_pages
from megatron_infer.kernels.activations import Form
from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.experts import ExpertWeights, RoutingRules
from megatron_infer.kernels.native.cpu_native import FP32_SUFFIXES, KERNELS, SUFFIXES, NativePagedAttention
from megatron_infer.kernels.native.native_call import bind
from megatron_infer.kernels.native.native_experts import (
    ACTIVATIONS,
    ExpertsStruct,
    ExpertTables,
    fill_routing,
    is_bias,
)
from megatron_infer.kernels.native.native_lora import NativeLoRA
from megatron_infer.kernels.packing import PackedLinears

KINDS = ("norms", "linears", "attention", "activations", "adapters", "experts", "other activations")
"""Kinds of operations, in the order of Kind in native/layers.cpp. Adapters are added by the linears; "experts" has all
that a layer of them computes."""
_NORM, _LINEAR, _ATTEND, _SILU_MUL, _, _EXPERTS, _ACTIVATE = range(len(KINDS))
_P, _I = ctypes.c_void_p, ctypes.c_int64


class Parameters(Protocol):
    """A module's parameters by name, as they are now."""

    def __getitem__(self, name: str, /) -> Tensor | None: ...


class Adapted(Protocol):
    """A linear that adapters may change."""

    lora: Any
    """Their `NativePairs` as they are now; None: the engine has no adapters, or none may have a pair for it."""


Source = tuple[Parameters, str]
"""Where a live tensor is read at every step: its module's parameters, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormOp:
    """(x, residual) -> (RMS norm of x + residual, x + residual)."""

    weight: Source
    eps: float
    zero_centered: bool = False
    """The factor is weight + 1."""
    alone: bool = False
    """(x, residual) -> (RMS norm of x, residual)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearOp:
    """x -> x @ weight.T + bias, from the packed copy of the weight; and in steps with adapters, their products."""

    weight: Source
    bias: Source | None
    adapted: Adapted | None = None
    """None: no adapter has a pair for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendOp:
    """The fused projection [T, X] -> paged attention [T, N * H].

    Columns are groups of `cell`; at_q, at_k, at_v: the first ones of the queries, the key and the value.
    """

    layer: int
    spec: AttendSpec
    at_q: int
    at_k: int
    at_v: int
    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedOp:
    """[T, 2 * F] -> f(first half) * second half, [T, F]; f is SiLU, or the tanh approximation of GELU."""

    has_gelu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivateOp:
    """[T, F] -> the same shape, by one of `ACTIVATIONS` that is not gated."""

    form: Form


class Numbered(Protocol):
    """A mixture of experts, which has its number once the whole model is read."""

    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsOp:
    """[T, D] -> the sum of the chosen experts on this rank, and of the shared one, [T, D]."""

    of: Numbered
    router: LinearOp
    """Its logits are fp32."""
    bias: Source | None
    """The router's correction bias."""
    rules: RoutingRules
    weights: ExpertWeights
    shared: tuple[LinearOp | GatedOp | ActivateOp, ...]
    """Operations of the shared expert; none: there is none."""
    gate: tuple[LinearOp, ...] = ()
    """The linear whose sigmoid is each token's weight of the shared expert; none: that is 1."""
    around: tuple[LinearOp, ...] = ()
    """Down and up projection around the experts (moe_latent_size); none: the experts take the hidden state."""


ProgramOp = NormOp | LinearOp | AttendOp | GatedOp | ActivateOp | ExpertsOp


class LayerProgram:
    """Operations in order. Kernels keep what they derive from one by its identity."""

    def __init__(self, ops: Sequence[ProgramOp], *, ends_model: bool = False) -> None:
        """ends_model: its output is the model's final hidden states."""
        self.ops = tuple(ops)
        experts = [op for op in ops if isinstance(op, ExpertsOp)]
        self.nested = tuple(one for op in experts for one in (op.router, *op.shared, *op.gate, *op.around))
        """The operations that operations consist of."""
        self.is_first_norm = isinstance(self.ops[0], NormOp) and not self.ops[0].alone
        attends = [place for place, op in enumerate(self.ops) if isinstance(op, AttendOp)]
        self.narrows_at = attends[-1] + 1 if ends_model and attends else None
        """The operation from which on nothing but the tokens whose output is wanted need be computed; None: none."""


class _LayerOp(ctypes.Structure):
    """LayerOp in native/layers.cpp."""

    _fields_ = [
        ("kind", _I),
        *((name, _P) for name in ("weight", "bias")),
        *((name, _I) for name in ("inner", "outer")),
        ("spec", _P),
        *((name, _I) for name in ("layer", "at_q", "at_k", "at_v", "cell")),
        ("eps", ctypes.c_double),
        *((name, _I) for name in ("zero_centered", "alone", "gates_by_gelu")),
        ("lora", _P),
        ("experts", _P),
    ]


class _LayerCall(ctypes.Structure):
    """LayerCall in native/layers.cpp."""

    _fields_ = [
        ("ops", _P),
        *((name, _I) for name in ("num_ops", "tokens", "threads")),
        *((name, _P) for name in ("context", "step", "x", "residual")),
        ("buffers", _P * 2),
        *((name, _P) for name in ("out", "keys", "values")),
        *((name, _I) for name in ("layer_bytes", "starts_residual")),
        *((name, _P) for name in ("lora", "linear", "wide_linear", "routing")),
        *((name, _I) for name in ("routing_bytes", "routing_token", "routing_layer")),
        ("kept", _P),
        *((name, _I) for name in ("num_kept", "narrows_at")),
        ("ns", _P),
    ]


def _bias_of(op: ExpertsOp) -> Tensor | None:
    return None if op.bias is None else op.bias[0][op.bias[1]]


class _Prepared:
    """A program with the addresses that its weights had when it was prepared."""

    def __init__(self, program: LayerProgram) -> None:
        ops: Sequence[ProgramOp] = (*program.ops, *program.nested)
        self.matrices = [op.weight for op in ops if isinstance(op, LinearOp)]
        """Sources of the packed weights."""
        vectors = [op.weight if isinstance(op, NormOp) else op.bias for op in ops if isinstance(op, NormOp | LinearOp)]
        self.vectors = [source for source in vectors if source is not None]
        """Sources of what is read in place: weights of norms, and biases."""
        self.sinks = [op.spec.sinks for op in ops if isinstance(op, AttendOp) and op.spec.sinks is not None]
        """What gives the softmax sinks."""
        self.experts = [op for op in ops if isinstance(op, ExpertsOp)]
        linears = [(place, op.adapted) for place, op in enumerate(ops) if isinstance(op, LinearOp)]
        self.adapted = [(place, adapted) for place, adapted in linears if adapted is not None]
        """Linears by their place among the operations."""
        self.lora: list[Any] = [None] * len(self.adapted)
        """The pairs that the structs point at."""
        self.structs = (_LayerOp * len(ops))()
        """Those of the program, then the nested ones."""
        self.of_experts = (ExpertsStruct * len(self.experts))()
        self.tables: list[ExpertTables] = []
        self.found: list[object] = []
        """What the structs were made for (see `NativeLayers._ready`); empty: for nothing."""
        self.fits = False
        self.width = self.most = 0
        """Entries of a token behind the last operation, and at most between two."""


class NativeLayers:
    """Runs programs of one dtype with the native linears, norms and attention of one engine."""

    def __init__(
        self, library: ctypes.CDLL, dtype: torch.dtype, packed: PackedLinears, attention: NativePagedAttention
    ) -> None:
        self._dtype, self._packed, self._attention = dtype, packed, attention
        self.lora: NativeLoRA | None = None
        """Plans the steps with adapters; None: the engine has none."""
        self._function = bind(library, f"mi_run_layers_{SUFFIXES[dtype]}", [_P])
        self._prepared: weakref.WeakKeyDictionary[LayerProgram, _Prepared | None] = weakref.WeakKeyDictionary()
        self._call = _LayerCall()
        self._address = ctypes.addressof(self._call)
        self._buffers = torch.empty(0, dtype=dtype)
        self._ns = (ctypes.c_int64 * len(KINDS))()
        self._call.ns = ctypes.addressof(self._ns)
        for name, suffixes in (("linear", SUFFIXES), ("wide_linear", FP32_SUFFIXES)):
            linear = getattr(library, f"{KERNELS[packed.layout.name]}_{suffixes[dtype]}")
            setattr(self._call, name, ctypes.cast(linear, _P).value)

    def run(
        self,
        program: LayerProgram,
        kv_cache: Tensor,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        *,
        has_adapters: bool = False,
        kept_S: Tensor | None = None,
        routing_TLK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """What the operations of the program return one by one, to the bit; None: they must run one by one.

        residual_TD may be overwritten. has_adapters: some token has one, and `lora` has planned the step.
        routing_TLK: see `StepInputs`; then no kept_S.
        kept_S: int64, the tokens of the output, fewer than x has; only of a program that narrows, without adapters.
        """
        attention = self._attention
        if x_TD.dtype is not self._dtype or kv_cache.dtype is not self._dtype or not x_TD.is_contiguous():
            return None
        prepared = self._ready(program, kv_cache.shape[3], x_TD.shape[1])
        if prepared is None or attention.num_padding:
            return None
        starts = residual_TD is None and program.is_first_norm
        if starts:
            residual_TD = torch.empty(x_TD.shape, dtype=torch.float32)
        elif residual_TD is not None and not (residual_TD.dtype is torch.float32 and residual_TD.is_contiguous()):
            return None
        tokens, item = x_TD.shape[0], x_TD.element_size()
        size = -(-tokens * prepared.most // 32) * 32
        if len(self._buffers) < 2 * size:
            self._buffers = torch.empty(0, dtype=self._dtype)
            self._buffers = huge_pages.empty(2 * size, self._dtype)
        out = torch.empty(tokens if kept_S is None else len(kept_S), prepared.width, dtype=self._dtype)
        layer_stride, plane_stride = kv_cache.stride()[:2]
        call, buffer, keys = self._call, self._buffers.data_ptr(), kv_cache.data_ptr()
        call.ops, call.num_ops = ctypes.addressof(prepared.structs), len(program.ops)
        call.tokens, call.threads = tokens, torch.get_num_threads()
        call.context, call.step = attention.context, attention.step_address
        call.x, call.residual = x_TD.data_ptr(), None if residual_TD is None else residual_TD.data_ptr()
        call.buffers[0], call.buffers[1], call.out = buffer, buffer + size * item, out.data_ptr()
        call.keys, call.values, call.layer_bytes = keys, keys + plane_stride * item, layer_stride * item
        call.starts_residual = starts
        call.narrows_at = 0
        if kept_S is not None:
            assert len(kept_S) < tokens and program.narrows_at is not None and kept_S.dtype is torch.int64
            call.kept, call.num_kept, call.narrows_at = kept_S.data_ptr(), len(kept_S), program.narrows_at
        call.lora = self._lora_step(prepared) if has_adapters else None
        call.routing = None
        if routing_TLK is not None:
            assert kept_S is None and routing_TLK.stride(2) == 1
            call.routing, call.routing_bytes = routing_TLK.data_ptr(), routing_TLK.element_size()
            call.routing_token, call.routing_layer = routing_TLK.stride()[:2]
        self._function(self._address)
        return out, residual_TD

    def take_seconds(self) -> dict[str, float]:
        """Time of each kind of operation since the last call of this."""
        seconds = {kind: ns * 1e-9 for kind, ns in zip(KINDS, self._ns, strict=True)}
        self._ns[:] = [0] * len(KINDS)
        return seconds

    def _ready(self, program: LayerProgram, block_size: int, width: int) -> _Prepared | None:
        """The program with the addresses that its weights have now; None: it cannot run here."""
        prepared = self._prepared.get(program)
        if prepared is None:
            prepared = self._prepared[program] = _Prepared(program)
        get = self._packed.get
        # maps: of more than a hundred weights in every step
        copies = list(map(get, map(id, starmap(getitem, prepared.matrices))))
        vectors = list(starmap(getitem, prepared.vectors))
        found = [self._packed.num_packings, *map(id, copies)]
        found += [None if vector is None else vector.data_ptr() for vector in vectors]
        found += [sinks().data_ptr() for sinks in prepared.sinks]
        if prepared.experts:
            tables = [ExpertTables.of(op.weights, self._packed, self._dtype) for op in prepared.experts]
            biases = list(map(_bias_of, prepared.experts))
            found += [*map(id, tables), *(None if bias is None else bias.data_ptr() for bias in biases)]
        if found != prepared.found:
            prepared.found = found  # ids of copies are of this packing, which keeps them
            prepared.fits = None not in copies and all(vector is None or self._reads(vector) for vector in vectors)
            if prepared.experts:
                prepared.tables = tables  # as are ids of these
                prepared.fits = prepared.fits and all(table.fits for table in tables) and all(map(is_bias, biases))
            if prepared.fits:
                self._fill(program, prepared, copies, block_size, width)
        return prepared if prepared.fits else None

    def _lora_step(self, prepared: _Prepared) -> int:
        """Address of the step's plan; the linears point at the pairs that they have now."""
        assert self.lora is not None, "a step with adapters in an engine without any"
        lora = [linear.lora for _, linear in prepared.adapted]
        if lora != prepared.lora:
            for (place, _), pairs in zip(prepared.adapted, lora, strict=True):
                prepared.structs[place].lora = None if pairs is None else pairs.address
            prepared.lora = lora
        return self.lora.step_address

    def _reads(self, vector: Tensor) -> bool:
        return vector.dtype is self._dtype and vector.is_contiguous()

    def _fill(
        self, program: LayerProgram, prepared: _Prepared, packed: list[Tensor | None], block_size: int, width: int
    ) -> None:
        structs, size = prepared.structs, ctypes.sizeof(_LayerOp)
        copies, place = iter(packed), len(program.ops)
        prepared.width, prepared.most = self._fill_some(structs[:place], program.ops, copies, block_size, width)
        experts = iter(zip(prepared.experts, prepared.of_experts, prepared.tables, strict=True))
        for struct in structs[:place]:
            if struct.kind != _EXPERTS:
                continue
            op, own, tables = next(experts)
            struct.experts = ctypes.addressof(own)
            own.router = ctypes.addressof(structs) + place * size
            own.shared, own.num_shared = own.router + size, len(op.shared)
            own.gate = own.shared + len(op.shared) * size if op.gate else None
            own.around = own.shared + (len(op.shared) + len(op.gate)) * size if op.around else None
            for nested in ((op.router,), op.shared, op.gate, op.around):
                self._fill_some(structs[place : place + len(nested)], nested, copies, block_size, struct.inner)
                place += len(nested)
            self._fill_experts(own, op, tables, struct.inner)

    def _fill_experts(self, own: ExpertsStruct, op: ExpertsOp, tables: ExpertTables, width: int) -> None:
        parameters, name = op.router.weight
        weight = parameters[name]
        assert weight is not None
        fill_routing(own.routing, op.rules, len(weight), _bias_of(op))
        own.number, own.first, own.count = op.of.layer, op.weights.first, op.weights.num_experts
        own.fc1, own.fc2 = tables.fc1, tables.fc2
        own.fc1_bias, own.fc2_bias = tables.fc1_bias or None, tables.fc2_bias or None
        own.fc1_rows, own.inner = op.weights.shape("fc1")
        own.outer, own.ffn = op.weights.shape("fc2")
        assert op.weights.form is not None and (own.inner == width or op.around)
        own.activation = ACTIVATIONS[op.weights.form]

    def _fill_some(
        self,
        structs: Sequence[_LayerOp],
        ops: Sequence[ProgramOp],
        copies: Iterator[Tensor | None],
        block_size: int,
        width: int,
    ) -> tuple[int, int]:
        """width: of what the first operation takes -> that behind the last, and the widest between two."""
        most = 0
        for struct, op in zip(structs, ops, strict=True):
            struct.inner = width
            match op:
                case NormOp(weight=(parameters, name)):
                    struct.kind, struct.weight = _NORM, parameters[name].data_ptr()
                    struct.eps, struct.zero_centered, struct.alone = op.eps, op.zero_centered, op.alone
                case LinearOp(weight=(parameters, name), bias=bias):
                    copy, added = next(copies), None if bias is None else bias[0][bias[1]]
                    struct.kind, struct.weight = _LINEAR, copy.data_ptr()
                    struct.bias = None if added is None else added.data_ptr()
                    width = parameters[name].shape[0]
                case AttendOp(spec=spec):
                    struct.kind, struct.spec = _ATTEND, self._attention.kind_of(spec, block_size).address
                    for name in ("layer", "at_q", "at_k", "at_v", "cell"):
                        setattr(struct, name, getattr(op, name))
                    width = spec.num_kv_heads * spec.group_size * spec.head_dim
                case GatedOp(has_gelu=has_gelu):
                    struct.kind, struct.gates_by_gelu, width = _SILU_MUL, has_gelu, width // 2
                case ActivateOp(form=form):
                    struct.kind, struct.layer = _ACTIVATE, ACTIVATIONS[form]
                case ExpertsOp():
                    struct.kind = _EXPERTS
            struct.outer, most = width, max(most, width)
        return width, most
