"""Choose the backend of each operation, once at start-up, and show the choices in one table."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatron_infer.errors import ConfigError
from megatron_infer.kernels import backend_candidates, flashinfer_rope, packing
from megatron_infer.kernels.base import Argmax, AttendSpec, AttentionBackend, Ops, lowest_argmax
from megatron_infer.kernels.checksum import content_sums
from megatron_infer.kernels.exact import ExactAttention, ExactOps
from megatron_infer.kernels.lora import LoRABackend, TorchLoRA
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.cpu_native import (
    KERNELS,
    PANELS,
    SUFFIXES,
    NativeOps,
    NativePagedAttention,
    native_checksums,
    panel_layout,
    quantised_layout,
)
from megatron_infer.kernels.native.native_build import BACKEND_VARIABLE
from megatron_infer.kernels.native.native_latent import NativeLatentAttention
from megatron_infer.kernels.native.native_layers import NativeLayers
from megatron_infer.kernels.native.native_lora import NativeLoRA
from megatron_infer.kernels.native.native_sampling import NativeSampling
from megatron_infer.kernels.native.native_scan import NativeScan
from megatron_infer.kernels.native.native_sparse import NativeChosenKeys
from megatron_infer.kernels.ssm import RecurrentSpec, ScanBackend
from megatron_infer.kernels.step_gather import Gather, torch_gather
from megatron_infer.kernels.torch.cpu_torch import TorchOps, TorchPagedAttention
from megatron_infer.kernels.torch.fp32_linear import fp32_linear
from megatron_infer.kernels.torch.sparse_attention import SparseAttention
from megatron_infer.kernels.torch.ssm_ref import ReferenceScan
from megatron_infer.kernels.torch.ssm_torch import TorchScan
from megatron_infer.kernels.torch.torch_ref import ReferenceAttention, ReferenceOps
from megatron_infer.kernels.weight_dtypes import OUTPUT_DTYPE
from megatron_infer.utils.named_class import make_named

if TYPE_CHECKING:
    from megatron_infer.kernels.triton.sampling import TritonSampling

BACKENDS = ("native", "torch", "reference", *backend_candidates.NAMES)
ATTENTION = "attention"
SCAN, DELTA_RULE = "selective scan", "gated delta rule"
SAMPLING = "argmax, sampling"
AUTO, ATTENTION_OPTION, SAMPLING_OPTION = "auto", "attention_backend", "sampling_backend"
ROTATES_IN_TORCH = "torch"
"""The attention backend whose own rotation is several torch calls."""


class TorchKernels(Protocol):
    """Attention and scan that run on any device, without a compiler or a library. Made without arguments."""

    name: str

    def attention(self) -> AttentionBackend: ...

    def scan(self) -> ScanBackend: ...


class _PlainTorch:
    name = "torch"
    attention = TorchPagedAttention
    scan = TorchScan


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """One line of the start-up table."""

    operation: str
    chosen: str
    reasons: dict[str, str]
    """Backend that was not chosen -> the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenKernels:
    """The kernels of one engine."""

    ops: Ops
    attention: AttentionBackend
    """Never called for a model without attention layers."""
    scan: ScanBackend | None
    """None for a model without Mamba layers."""
    packed: packing.PackedLinears
    """`pack` takes the model's weights; `ops.linear` then uses the copies. Stays empty where packing fails."""
    argmax: Argmax
    sampling: NativeSampling | TritonSampling | None
    """Draws, filters and log probabilities of a step; None: the sampler's own torch path."""
    device_sampling: TritonSampling | None = None
    """The same object where it also draws inside a captured graph and masks on the device."""
    checksums: Callable[[Sequence[Tensor]], list[int]]
    """A checksum of each weight's content; reads each once, at memory speed."""
    rows: list[BackendChoice]
    layers: NativeLayers | None = None
    """Runs the operations of many layers in one call; None: each is a call."""
    gather: Gather = torch_gather
    """Gathers a step's token ids, positions and angles from the device's tables."""
    lora: LoRABackend | None = None
    """Products of adapters; None: the engine has none."""
    expanded: NativeLatentAttention | None = None
    """The same object as `attention` where it computes long chunks of prompts with full keys; None: it does not."""

    def table(self) -> str:
        """The choices as text: operation, backend, why not the others."""
        return format_rows(self.rows)


def format_rows(rows: list[BackendChoice]) -> str:
    """Aligned text, one line per operation."""
    lines = [("operation", "chosen", "why not the others")]
    for row in rows:
        why = "; ".join(f"{name}: {reason}" for name, reason in row.reasons.items()) or "first choice"
        lines.append((row.operation, row.chosen, why))
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return "\n".join(f"{op:<{widths[0]}}  {chosen:<{widths[1]}}  {why}" for op, chosen, why in lines)


def _forced_backend() -> tuple[str | None, TorchKernels]:
    """(the backend that the debugging variable forces, None: the best; attention and scan in torch)."""
    name = os.environ.get(BACKEND_VARIABLE) or None
    if name is None or name in BACKENDS:
        return name, _PlainTorch()
    remedy = f"it can be {', '.join(BACKENDS)}, or module:class of attention and scan"
    kernels: TorchKernels = make_named(name, variable=BACKEND_VARIABLE, remedy=remedy)
    return kernels.name, kernels


def _native_library(device: torch.device, dtype: torch.dtype) -> ctypes.CDLL:
    if device.type != "cpu":
        raise native_build.NativeUnavailable(f"runs on a CPU, the model is on {device.type}")
    if dtype not in SUFFIXES:
        raise native_build.NativeUnavailable(f"needs float32 or bfloat16, got {dtype}")
    return native_build.load()


def _library_if(wanted: bool, device: torch.device, dtype: torch.dtype) -> tuple[ctypes.CDLL | None, str]:
    """(the native kernels, or None and the reason)."""
    try:
        return (_native_library(device, dtype) if wanted else None), ""
    except native_build.NativeUnavailable as error:
        return None, str(error)


def _choose_linear(
    device: torch.device, dtype: torch.dtype, forced: str | None, library: ctypes.CDLL | None, asked: str, why_not: str
) -> tuple[BackendChoice, packing.PackedLinears]:
    """asked: linear_backend. why_not: why there is no native library. Raises ConfigError for what cannot run."""
    if asked == "vendor" and device.type == "cuda":
        return BackendChoice("linear", "torch (cuBLAS)", {}), packing.PackedLinears(reason="linear_backend=vendor")
    reasons: dict[str, str] = {PANELS: "linear_backend=vendor"} if asked == "vendor" else {}
    if library is not None and asked != "vendor":
        return BackendChoice("linear", PANELS, {}), packing.PackedLinears(layout=panel_layout(library, dtype))
    if asked == "native":
        raise ConfigError(f"linear_backend='native', but: {why_not}; leave it \"auto\"")
    if forced == "reference" or forced not in (None, *BACKENDS):
        reason: str | None = f"{BACKEND_VARIABLE}={forced}"
    elif device.type != "cpu":
        reason = f"weights are on {device.type}"
    else:
        reason = packing.unavailable(dtype)
    if asked == "vendor" and reason is not None:
        raise ConfigError(f"linear_backend='vendor', but oneDNN cannot run: {reason}; leave it \"auto\"")
    packed = packing.PackedLinears(reason=reason)
    if reason is None:
        return BackendChoice("linear", packed.layout.name, reasons), packed
    reasons[packed.layout.name] = reason
    return BackendChoice("linear", "torch", reasons), packed


def _quantised_linear(
    weight_dtype: str, dtype: torch.dtype, library: ctypes.CDLL | None, asked: str, why_not: str
) -> tuple[BackendChoice, packing.PackedLinears]:
    """`_choose_linear` for a weight_dtype: it runs or is refused, as no other backend gives the same answers."""
    if asked == "vendor":
        raise ConfigError(
            f"weight_dtype={weight_dtype!r} excludes linear_backend='vendor': only the native kernels multiply by such "
            'weights; leave linear_backend "auto"'
        )
    if library is None:
        raise ConfigError(f'weight_dtype={weight_dtype!r} needs the native kernels: {why_not}; leave it "auto"')
    layout = quantised_layout(library, dtype, weight_dtype)
    output = None if weight_dtype == OUTPUT_DTYPE else quantised_layout(library, dtype, OUTPUT_DTYPE)
    row = BackendChoice("linear", layout.name, {PANELS: f"weight_dtype={weight_dtype}"})
    return row, packing.PackedLinears(layout=layout, output_layout=output)


def _check_forced(operation: str, forced: str | None, missing: dict[str, str], *, by: str = BACKEND_VARIABLE) -> None:
    if forced in missing:
        raise ConfigError(f"{by}={forced}, but {operation}: {missing[forced]}")


def _named(option: str, asked: str, forced: str | None) -> tuple[str | None, str]:
    """(the only backend that is allowed, None: the best; the option or the debugging variable that asks for it)."""
    if asked == AUTO:
        return forced, BACKEND_VARIABLE
    if forced not in (None, asked):
        raise ConfigError(f"{BACKEND_VARIABLE}={forced}, but {option}={asked}; unset one of them")
    return asked, option


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionAsked:
    """What the choice of attention depends on."""

    library: ctypes.CDLL | None
    device: torch.device
    specs: Sequence[AttendSpec]
    of: dict[str, Any]
    """dtype, block_size and kv_dtype (see `AttentionBackend.supports`)."""
    reasons: dict[str, str]
    """Why there are no native kernels."""
    forced: str | None
    """The only backend that is allowed; None: the best."""
    by: str
    """The option or the debugging variable that asks for it."""
    in_torch: TorchKernels

    def refuses(self, backend: AttentionBackend) -> str | None:
        found = (backend.supports(spec, **self.of) for spec in self.specs)
        return next((reason for reason in found if reason is not None), None)


def _choose_attention(asked: _AttentionAsked) -> tuple[list[BackendChoice], AttentionBackend]:
    """The first backend that supports every spec; the reference supports all."""
    chooses = next((spec.index for spec in asked.specs if spec.index is not None), None)
    if chooses is not None:
        return _choose_sparse(asked, chooses.top_k)
    reasons, dtype, forced, by = dict(asked.reasons), asked.of["dtype"], asked.forced, asked.by
    if forced == "reference":
        return [BackendChoice(ATTENTION, "reference", reasons)], ReferenceAttention()
    best, missing, refused = backend_candidates.first(
        backend_candidates.ATTENTION, asked.device, dtype, forced=forced, refuses=asked.refuses
    )
    reasons |= missing
    _check_forced(ATTENTION, forced, reasons if by == ATTENTION_OPTION else missing, by=by)
    candidates: list[AttentionBackend] = [] if best is None else [best]
    if asked.library is not None:
        expands_from = max((spec.expands_from or 0 for spec in asked.specs), default=0)
        candidates.append(
            NativeLatentAttention(asked.library, dtype, expands_from=expands_from)
            if expands_from
            else NativePagedAttention(asked.library, dtype)
        )
    candidates.append(asked.in_torch.attention())
    if by == ATTENTION_OPTION:
        candidates = [backend for backend in candidates if backend.name == forced]
    chosen = _first_of(candidates, asked.refuses, refused, best=best)
    if forced in refused:
        raise ConfigError(f"{by}={forced}, but attention {refused[forced]}")
    reasons |= refused
    if chosen is None:
        assert by != ATTENTION_OPTION, f"no attention backend is called {forced}"
        return [BackendChoice(ATTENTION, "reference", reasons)], ReferenceAttention()
    return [BackendChoice(ATTENTION, chosen.name, reasons)], chosen


def _choose_sparse(asked: _AttentionAsked, top_k: int) -> tuple[list[BackendChoice], AttentionBackend]:
    """Triton's sparse attention, or that around the native, torch or reference backend. Raises ConfigError for another
    one by name."""
    of, forced = asked.of, asked.forced
    best, missing, refused = backend_candidates.first(
        backend_candidates.SPARSE, asked.device, of["dtype"], forced=forced, refuses=asked.refuses
    )
    _check_forced(ATTENTION, forced, asked.reasons | missing, by=asked.by)
    backends = [SparseAttention(dense, top_k=top_k) for dense in (asked.in_torch.attention(), ReferenceAttention())]
    if asked.library is not None:
        native = NativePagedAttention(asked.library, of["dtype"])
        chosen_keys = NativeChosenKeys(asked.library, native, of["dtype"])
        backends.insert(0, SparseAttention(native, top_k=top_k, chosen=chosen_keys))
    if forced is not None:
        backends = [backend for backend in backends if backend.name == f"{forced}, sparse"]
    chosen = _first_of([*filter(None, [best]), *backends], asked.refuses, refused, best=best)
    if chosen is None:
        raise ConfigError(f"attention {'; '.join(refused.values())}")
    return [BackendChoice(ATTENTION, chosen.name, asked.reasons | missing | refused)], chosen


def _first_of(
    backends: Sequence[Any], refuses: Callable[[Any], str | None], refused: dict[str, str], *, best: Any | None
) -> Any | None:
    """The first that is not refused, which `best` is known not to be; puts the reasons of the others in `refused`."""
    for backend in backends:
        reason = None if backend is best else refuses(backend)
        if reason is None:
            return backend
        refused[backend.name] = reason
    return None


def _add_rope(
    attention: AttentionBackend,
    fused: bool | None,
    specs: Sequence[AttendSpec],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[BackendChoice, AttentionBackend]:
    """The attention behind FlashInfer's rotation, where that is asked for and can run; else the row says why not."""
    refusals = (flashinfer_rope.refusal(spec, dtype) for spec in specs if spec.rotary_dim)
    reason = flashinfer_rope.unavailable(device, dtype) or next(filter(None, refusals), None)
    if fused and reason is not None:
        raise ConfigError(f"use_flashinfer_fused_rope=True, but FlashInfer {reason}; leave it False or None")
    if reason is None and not fused and attention.name != ROTATES_IN_TORCH:
        reason = f"{attention.name} attention rotates in its own kernels"
    if reason is not None:
        return BackendChoice("rotation", attention.name, {"flashinfer": reason}), attention
    return BackendChoice("rotation", "flashinfer", {}), flashinfer_rope.FlashInferRope(attention)


def _operation_of(specs: Sequence[RecurrentSpec]) -> str:
    """What a model's recurrent layers compute, which is one kind."""
    return DELTA_RULE if specs[0].is_delta else SCAN


def _choose_scan(
    library: ctypes.CDLL | None,
    device: torch.device,
    dtype: torch.dtype,
    specs: Sequence[RecurrentSpec],
    states: tuple[torch.dtype, torch.dtype],
    reasons: dict[str, str],
    forced: str | None,
    in_torch: TorchKernels,
) -> tuple[BackendChoice, ScanBackend]:
    """The first backend that supports every spec with these (conv, SSM) states; the reference supports all."""
    reasons, operation = dict(reasons), _operation_of(specs)
    if forced == "reference":
        return BackendChoice(operation, "reference", reasons), ReferenceScan()

    def refuses(backend: ScanBackend) -> str | None:
        found = (backend.supports(s, dtype=dtype, conv_dtype=states[0], ssm_dtype=states[1]) for s in specs)
        return next((reason for reason in found if reason is not None), None)

    best, missing, refused = backend_candidates.first(
        backend_candidates.SCAN, device, dtype, forced=forced, refuses=refuses
    )
    reasons |= missing
    _check_forced(operation, forced, missing)
    candidates: list[ScanBackend] = [] if best is None else [best]
    if library is not None:
        candidates.append(NativeScan(library, dtype))
    candidates.append(in_torch.scan())
    chosen = _first_of(candidates, refuses, refused, best=best)
    if forced in refused:
        raise ConfigError(f"{BACKEND_VARIABLE}={forced}, but the {operation} {refused[forced]}")
    reasons |= refused
    if chosen is not None:
        return BackendChoice(operation, chosen.name, reasons), chosen
    return BackendChoice(operation, "reference", reasons), ReferenceScan()


@dataclass(frozen=True, slots=True)
class _ChosenSampling:
    """The fields of `ChosenKernels` that sampling fills."""

    row: BackendChoice
    kernels: NativeSampling | TritonSampling | None = None
    on_device: TritonSampling | None = None


def _choose_sampling(
    library: ctypes.CDLL | None, device: torch.device, reasons: dict[str, str], forced: str | None, asked: str
) -> _ChosenSampling:
    """asked: the option, "auto" or a name. A debugging variable that names attention and scan contradicts no name."""
    forced, by = _named(SAMPLING_OPTION, asked, None if forced not in BACKENDS and asked != AUTO else forced)
    logits = torch.float32
    samplers, missing = backend_candidates.available(backend_candidates.SAMPLING, device, logits, forced=forced)
    _check_forced("sampling", forced, missing if asked == AUTO else reasons | missing, by=by)
    why = reasons | missing if asked == AUTO else {"others": f"{by}={asked}"}
    if samplers:
        return _ChosenSampling(BackendChoice(SAMPLING, "triton", why), samplers[0], on_device=samplers[0])
    if library is not None and asked in (AUTO, "native"):
        return _ChosenSampling(BackendChoice(SAMPLING, "native", why), NativeSampling(library))
    assert asked in (AUTO, "torch"), f"no sampling backend is called {asked}"
    return _ChosenSampling(BackendChoice(SAMPLING, "torch", why))


def choose_lora(device: torch.device, dtype: torch.dtype) -> tuple[LoRABackend, BackendChoice]:
    """What adds adapters' products."""
    forced, _ = _forced_backend()
    library, why_not = _library_if(forced in (None, "native"), device, dtype)
    found, missing = backend_candidates.available(backend_candidates.LORA, device, dtype, forced=forced)
    lora: LoRABackend = TorchLoRA() if library is None else NativeLoRA(library, dtype)
    lora = found[0] if found else lora
    reasons = missing if library is not None else {"native": why_not or f"{BACKEND_VARIABLE}={forced}"} | missing
    return lora, BackendChoice("adapters", lora.name, reasons)


def add_lora(chosen: ChosenKernels, lora: LoRABackend, row: BackendChoice) -> ChosenKernels:
    """The same kernels, and what adds adapters' products beside their linears."""
    if chosen.layers is not None and isinstance(lora, NativeLoRA):
        chosen.layers.lora = lora
    return replace(chosen, lora=lora, rows=[*chosen.rows, row])


def exact_library(device: torch.device, dtype: torch.dtype) -> ctypes.CDLL:
    """The native kernels, for batch-invariant arithmetic; raises ConfigError with the reason where there are none."""
    if device.type != "cpu":
        raise ConfigError(
            f"batch_invariant=True: there are exact kernels for a CPU only, the model is on {device.type}"
        )
    forced, _ = _forced_backend()
    if forced not in (None, "native"):
        raise ConfigError(f"batch_invariant=True needs the native kernels, but {BACKEND_VARIABLE}={forced}; unset it")
    try:
        return _native_library(device, dtype)
    except native_build.NativeUnavailable as error:
        raise ConfigError(f"batch_invariant=True needs the native kernels: {error}") from None


def choose_fp32_linear(
    device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor | None, int], Tensor]:
    """`Ops.fp32_linear` by weights of which no copy is kept, as a trainer's are."""
    forced, _ = _forced_backend()
    library, _ = _library_if(forced in (None, "native"), device, dtype)
    return fp32_linear if library is None else ExactOps(library, dtype).fp32_linear


def choose_exact(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    specs: Sequence[AttendSpec],
    block_size: int,
    ssm_specs: Sequence[RecurrentSpec] = (),
    conv_dtype: torch.dtype | None = None,
    ssm_dtype: torch.dtype | None = None,
) -> ChosenKernels:
    """Kernels for batch_invariant=True: their bits are a function of a position's tokens and the weights alone.

    Raises ConfigError with the reason where one of them is missing: no other kernel keeps that promise.
    """
    library = exact_library(torch.device(device), dtype)
    # inputs of another dtype are multiplied by the weights themselves, which are not freed
    packed = packing.PackedLinears(layout=replace(panel_layout(library, dtype), unpack=None))
    ops, attention = ExactOps(library, dtype, packed), ExactAttention(library, dtype)
    sampling = NativeSampling(library)
    reasons = {"others": "their sums depend on the batch"}
    tiles = {"native": "sums the keys of prompt positions in another order than a training forward could"}
    rows = []
    for spec in specs:
        if (refusal := attention.supports(spec, dtype=dtype, block_size=block_size)) is not None:
            raise ConfigError(f"batch_invariant=True: exact attention {refusal}")
    if specs or not ssm_specs:
        rows.append(BackendChoice(ATTENTION, attention.name, tiles))
    scan = None
    if ssm_specs:
        scan, states = NativeScan(library, dtype), (conv_dtype or dtype, ssm_dtype or torch.float32)
        if states[1] is not torch.float32:
            raise ConfigError(
                f"batch_invariant=True: SSM states of {states[1]} are rounded wherever a step ends; keep them in "
                "float32 (mamba_inference_state_config)"
            )
        for ssm in ssm_specs:
            if (refusal := scan.supports(ssm, dtype=dtype, conv_dtype=states[0], ssm_dtype=states[1])) is not None:
                raise ConfigError(f"batch_invariant=True: the exact {_operation_of(ssm_specs)} {refusal}")
        rows.append(BackendChoice(_operation_of(ssm_specs), scan.name, reasons))
    rows += [
        BackendChoice("norms, activations", ops.name, reasons),
        BackendChoice(SAMPLING, "native", reasons),
        BackendChoice("linear", PANELS, reasons),
    ]
    return ChosenKernels(
        ops=ops,
        attention=attention,
        scan=scan,
        packed=packed,
        argmax=sampling.argmax,
        sampling=sampling,
        checksums=functools.partial(native_checksums, library),
        rows=rows,
        layers=NativeLayers(library, dtype, packed, attention),
    )


def choose(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    specs: Sequence[AttendSpec],
    block_size: int,
    ssm_specs: Sequence[RecurrentSpec] = (),
    conv_dtype: torch.dtype | None = None,
    ssm_dtype: torch.dtype | None = None,
    attention: str = AUTO,
    sampling: str = AUTO,
    linear: str = AUTO,
    weight_dtype: str = AUTO,
    fused_rope: bool | None = False,
    kv_dtype: torch.dtype | None = None,
) -> ChosenKernels:
    """The fastest backends that can run every layer in `specs` and `ssm_specs` here; either may be empty.

    conv_dtype and ssm_dtype: of the recurrent states; None: `dtype` and float32. kv_dtype: of the KV cache; None:
    `dtype`. attention, sampling, linear, weight_dtype, fused_rope: the options attention_backend, sampling_backend,
    linear_backend, weight_dtype and use_flashinfer_fused_rope. Never fails for lack of a compiler or a library. Raises
    ConfigError if an option or the debugging variable asks for what cannot run.
    """
    device = torch.device(device)
    forced, in_torch = _forced_backend()
    reasons: dict[str, str] = {}
    library, why_not = _library_if(forced in (None, "native"), device, dtype)
    if library is None:
        reasons["native"] = why_not or f"{BACKEND_VARIABLE}={forced}"
    if forced == "native" and library is None:
        raise ConfigError(f"{BACKEND_VARIABLE}=native, but: {reasons['native']}")
    if weight_dtype == AUTO:
        linear_row, packed = _choose_linear(device, dtype, forced, library, linear, reasons.get("native", ""))
    else:
        linear_row, packed = _quantised_linear(weight_dtype, dtype, library, linear, reasons.get("native", ""))
    argmax: Argmax = lowest_argmax
    others, missing = backend_candidates.available(backend_candidates.OPS, device, dtype, forced=forced)
    ops: Ops
    if forced == "reference":
        reasons["torch"] = f"{BACKEND_VARIABLE}=reference"
        ops = ReferenceOps()
    elif others or library is None:
        ops = others[0] if others else TorchOps(packed)
        packed.keeps_weights = True  # by these, which multiply by the weights themselves
    else:
        ops = NativeOps(library, dtype, packed)
    only, by = _named(ATTENTION_OPTION, attention, forced)
    asked = _AttentionAsked(
        library=library,
        device=device,
        specs=specs,
        of={"dtype": dtype, "block_size": block_size, "kv_dtype": kv_dtype},
        reasons=reasons,
        forced=only,
        by=by,
        in_torch=in_torch,
    )
    attends, backend = _choose_attention(asked)
    rows = attends if specs or not ssm_specs else []
    if specs and fused_rope is not False and specs[0].index is None:
        row, backend = _add_rope(backend, fused_rope, specs, device, dtype)
        rows.append(row)
    scan: ScanBackend | None = None
    if ssm_specs:
        states = (conv_dtype or dtype, ssm_dtype or torch.float32)
        row, scan = _choose_scan(library, device, dtype, ssm_specs, states, reasons, forced, in_torch)
        rows.append(row)
    draws = _choose_sampling(library, device, reasons, forced, sampling)
    if draws.kernels is not None:
        argmax = draws.kernels.argmax
    rows += [BackendChoice("norms, activations", ops.name, reasons | missing), draws.row, linear_row]
    gathers, no_gather = backend_candidates.available(backend_candidates.STEP, device, dtype, forced=forced)
    if gathers or no_gather:
        rows.append(BackendChoice("tokens of a step", "triton" if gathers else "torch", no_gather))
    runs_layers = isinstance(backend, NativePagedAttention) and packed.layout.name in KERNELS and library is not None
    checksums = content_sums if library is None else functools.partial(native_checksums, library)
    return ChosenKernels(
        ops=ops,
        attention=backend,
        scan=scan,
        packed=packed,
        argmax=argmax,
        sampling=draws.kernels,
        device_sampling=draws.on_device,
        checksums=checksums,
        rows=rows,
        layers=NativeLayers(library, dtype, packed, backend) if library is not None and runs_layers else None,
        gather=gathers[0] if gathers else torch_gather,
        expanded=backend if isinstance(backend, NativeLatentAttention) else None,
    )
