"""A router's choice in C++, and what the native calls know of a layer's experts (native/experts.cpp)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from megatron_infer.kernels.activations import RELU, SQUARED_RELU, SWIGLU, Form
from megatron_infer.kernels.experts import ExpertWeights, RoutingRules
from megatron_infer.kernels.native.native_call import bind
from megatron_infer.kernels.packing import PackedLinears

ACTIVATIONS = {SWIGLU: 0, Form(RELU): 1, Form(SQUARED_RELU): 2}
"""MLPActivation in native/experts.h: those whose bits are torch's, or that `ops` has as a kernel too."""
_P, _I = ctypes.c_void_p, ctypes.c_int64


class RoutingStruct(ctypes.Structure):
    """Routing in native/experts.h."""

    _fields_ = [
        *((name, _I) for name in ("num_experts", "top_k", "is_sigmoid", "pre_softmax", "num_groups", "group_topk")),
        ("scaling", ctypes.c_double),
        ("bias", _P),
    ]


class ExpertsStruct(ctypes.Structure):
    """ExpertsOp in native/layers.cpp, with Experts in native/experts.h."""

    _fields_ = [
        ("routing", RoutingStruct),
        *((name, _P) for name in ("fc1", "fc2", "fc1_bias", "fc2_bias")),
        *((name, _I) for name in ("first", "count", "inner", "fc1_rows", "ffn", "outer", "activation")),
        *((name, _P) for name in ("router", "shared", "gate", "around")),
        *((name, _I) for name in ("num_shared", "number")),
    ]


def fill_routing(struct: RoutingStruct, rules: RoutingRules, num_experts: int, bias_E: Tensor | None) -> None:
    """bias_E: fp32, contiguous; the caller keeps it alive."""
    struct.num_experts, struct.top_k = num_experts, rules.top_k
    struct.is_sigmoid, struct.pre_softmax = rules.score_function == "sigmoid", rules.pre_softmax
    struct.num_groups, struct.group_topk = rules.num_groups, rules.group_topk
    struct.scaling = rules.scaling_factor
    struct.bias = None if bias_E is None else bias_E.data_ptr()


def is_bias(bias_E: Tensor | None) -> bool:
    """Whether a correction bias, or none, can be read in place."""
    return bias_E is None or (bias_E.dtype is torch.float32 and bias_E.is_contiguous())


class NativeRouter:
    """The choice of a router from its logits. A token has the same choice and weights alone and among others."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._route = bind(library, "mi_route", [_P, _P, _P, _P, _I, ctypes.c_int])

    def choose(self, logits_TE: Tensor, bias_E: Tensor | None, rules: RoutingRules) -> tuple[Tensor, Tensor] | None:
        """(weights, chosen), both [T, E], as megatron-core's router gives them; None: not by these rules or inputs.

        The lower id wins among equal scores. Half precision often has those, and megatron-core takes the one that torch
        takes: logits are float32. Weights may differ from torch's by rounding.
        """
        num_tokens, num_experts = logits_TE.shape
        if logits_TE.dtype is not torch.float32 or rules.unroutable(num_experts) is not None or not is_bias(bias_E):
            return None
        logits_TE, routing = logits_TE.contiguous(), RoutingStruct()
        fill_routing(routing, rules, num_experts, bias_E)
        ids_TK = torch.empty(num_tokens, rules.top_k, dtype=torch.int32)
        weight_TK = torch.empty(num_tokens, rules.top_k)
        where = (logits_TE.data_ptr(), ids_TK.data_ptr(), weight_TK.data_ptr())
        self._route(ctypes.addressof(routing), *where, num_tokens, torch.get_num_threads())
        index_TK = ids_TK.long()
        probs_TE = torch.zeros_like(logits_TE).scatter_(1, index_TK, weight_TK)
        return probs_TE, torch.zeros(logits_TE.shape, dtype=torch.bool).scatter_(1, index_TK, True)


class ExpertTables:
    """Addresses of the packed weights, and of the biases, of a rank's experts."""

    def __init__(self, weights: ExpertWeights, packed: PackedLinears, dtype: torch.dtype) -> None:
        self.packing = packed.num_packings
        """The packing that the addresses are of."""
        self._kept: list[Any] = []
        self.fc1, self.fc2 = (self._packed(weights, part, packed) for part in ("fc1", "fc2"))
        self.fc1_bias, self.fc2_bias = (self._biases(weights, part, dtype) for part in ("fc1", "fc2"))
        self.fits = None not in (self.fc1, self.fc2, self.fc1_bias, self.fc2_bias)
        """Whether kernels can read all of them."""

    @classmethod
    def of(cls, weights: ExpertWeights, packed: PackedLinears, dtype: torch.dtype) -> ExpertTables:
        """Those of now: kept while the weights are watched, as there may be thousands of them."""
        key = ("native", id(packed))
        found: ExpertTables | None = weights.remembered.get(key)
        if found is None or found.packing != packed.num_packings:
            found = cls(weights, packed, dtype)
            weights.remember(key, found)
        return found

    def _packed(self, weights: ExpertWeights, part: str, packed: PackedLinears) -> int | None:
        copies = [packed.get(id(tensor)) for tensor in weights.tensors(part, "weight")]
        return self._table([None if copy is None else copy.data_ptr() for copy in copies])

    def _biases(self, weights: ExpertWeights, part: str, dtype: torch.dtype) -> int | None:
        """0: the experts have none."""
        tensors = weights.tensors(part, "bias")
        if all(tensor is None for tensor in tensors):
            return 0
        fit = [tensor is not None and tensor.dtype is dtype and tensor.is_contiguous() for tensor in tensors]
        return self._table([tensor.data_ptr() for tensor in tensors if tensor is not None]) if all(fit) else None

    def _table(self, addresses: list[int | None]) -> int | None:
        if None in addresses:
            return None
        self._kept.append((_P * len(addresses))(*addresses))
        return ctypes.addressof(self._kept[-1])
