"""Make a live megatron-core model paged, in place: same parameters, same state dict, same training path.

Adoption has two halves. The first reads every module and refuses by name what it does not know; nothing has changed
then. The second gives each stock attention, mixer and layer our subclass and its operations.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import AttendSpec, Ops, RotaryTable, RoutingShape, StepInputs
from megatron_infer.kernels.freed_weights import unpack_weights
from megatron_infer.kernels.lora import AdapterPairs
from megatron_infer.kernels.ssm import RecurrentSpec, SsmWeights
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adoption_checks import (
    check_called_by_none,
    check_config,
    check_model,
    final_norm_of,
    is_off,
    scale_of,
    softcap_of,
    unwrap,
)
from megatron_infer.models.attached_lora import ATTACHED
from megatron_infer.models.extensions import multipliers_of
from megatron_infer.models.fp8 import Fp8Linears, bind_fp8
from megatron_infer.models.fused_layers import FusedLayer, FusedLinear, FusedNorm, LayerOps
from megatron_infer.models.fused_mixer import RecurrentMixer
from megatron_infer.models.latent_attention import FusedLatentAttention
from megatron_infer.models.layer_adoption import LayerAdoption
from megatron_infer.models.layer_programs import with_programs
from megatron_infer.models.live_model_shape import model_shape
from megatron_infer.models.model_chunks import ModelChunks, chunks_of
from megatron_infer.models.module_guard import ModuleGuard
from megatron_infer.models.moe import FusedExperts, routing_shape
from megatron_infer.models.mtp_head import MTPHead
from megatron_infer.models.paged_layers import SEQUENCE_PARALLEL, require_inference
from megatron_infer.models.rotary import cpu_rotary, latent_rotary_table, rotary_table, rotate_alike
from megatron_infer.models.sharded_weights import is_dtensor
from megatron_infer.models.tp_collectives import Reducer

log = logging.getLogger("megatron_infer")

_AROUND_FOREIGN = {
    "sequence_parallel": SEQUENCE_PARALLEL,
    "cuda_graph_impl": "megatron-core's CUDA graphs would capture the layer; set it to 'none'",
    "moe_expert_capacity_factor": "megatron-core's experts would drop tokens, which depends on the batch",
}
"""Config field -> why it must be off where a layer is of the user's class, which megatron-core's decoder runs."""


def adopt(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    name: str = "",
    vocab_size: int | None = None,
    state_config: MambaInferenceStateConfig | None = None,
) -> AdoptedModel:
    """Make a live GPTModel, MambaModel or HybridModel paged, in place, and return it as what the runner drives.

    It may be one stage of a pipeline, with or without embedding, output layer, attention or Mamba layers.
    `model` may be wrapped (DDP, Float16Module) and may be Megatron's list of this rank's chunks. `vocab_size` is the
    true size where the model's own is padded; None: the size that `build_model` noted, else the padded one.
    `state_config` gives the dtypes of recurrent states. A model may be adopted again. Raises AdoptionError, naming the
    module and the reason, with nothing changed, if some part of the model is not known to compute what the paged path
    computes.
    """
    if (as_paged := getattr(model, "as_paged", None)) is not None:  # runs by itself: there is nothing to adopt
        paged: AdoptedModel = as_paged(name)
        return paged
    live = unwrap(model)
    unpack_weights(live)
    was_adopted = any(getattr(layer, "fused", None) is not None for layer in live.decoder.layers)
    # Not again when modules have changed: between rollouts these are the trainer's settings.
    check_config(live.config)
    if not isinstance(live, ModelChunks) and (live.config.virtual_pipeline_model_parallel_size or 1) > 1:
        raise AdoptionError(
            "config", "the model is one chunk of its rank; give the list of all, as get_model returns it"
        )
    read = partial(_read, live, vocab_size, state_config, was_adopted)
    reading = read()
    foreign = next((layer.name for layer in reading.layers if layer.fused is None), None)
    if foreign is not None and isinstance(live, ModelChunks):
        raise AdoptionError(foreign, "a layer of another class with virtual pipeline stages is not supported")
    for field, reason in _AROUND_FOREIGN.items() if foreign is not None else ():
        if not is_off(field, value := getattr(live.config, field, None)):
            raise AdoptionError(foreign, f"a layer of another class with {field}={value}: {reason}")
    return AdoptedModel(live, reading, read, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReading:
    """What adoption makes of a model, decided and not yet applied to it."""

    shape: ModelShape
    parts: list[list[LayerAdoption]]
    """The layers of each chunk; several with virtual pipeline stages."""
    norm: FusedNorm | None
    fp8: Fp8Linears | None
    tp: Reducer | None
    was_adopted: bool
    """The model had been adopted before: another engine or a session may read its weights."""
    heads: MTPHead | None = None
    """None: not read, as nothing drafts with them."""
    embedding_scale: float | None
    """Multiplies embeddings; None: nothing does."""
    logit_softcap: float | None
    """Final logit soft cap c: logits are c * tanh(logit / c). None: they are not capped."""
    logit_scale: float
    """Multiplies logits."""

    @property
    def layers(self) -> list[LayerAdoption]:
        return list(itertools.chain(*self.parts))

    @property
    def specs(self) -> list[AttendSpec]:
        return [layer.attention.attend.spec for layer in self.layers if layer.attention is not None]

    @property
    def mixers(self) -> list[RecurrentMixer]:
        return [layer.mixer for layer in self.layers if layer.mixer is not None]

    @property
    def cache_order(self) -> list[str]:
        kinds = [[("blocks", layer.attention), ("states", layer.mixer)] for layer in self.layers]
        return [kind for both in kinds for kind, part in both if part is not None]

    @property
    def experts(self) -> list[FusedExperts]:
        return [layer.experts for layer in self.layers if layer.experts is not None]

    @property
    def all_experts(self) -> list[FusedExperts]:
        """Also those of the MTP layer, which no captured step runs and whose routing is not recorded."""
        drafting = None if self.heads is None else self.heads.experts
        return self.experts if drafting is None else [*self.experts, drafting]

    @property
    def fused(self) -> list[FusedLayer | None]:
        return [layer.fused for layer in self.layers]

    @property
    def linears(self) -> dict[str, FusedLinear]:
        """The linears that adapters may have pairs for, by their path in the whole model: all but routed experts'."""
        found = [(layer, linear) for layer in self.layers for linear in layer.linears()]
        return {
            linear.name.replace(layer.name, f"decoder.layers.{layer.number}", 1): linear
            for layer, linear in found
            if ".experts." not in linear.name
        }

    @property
    def routing(self) -> list[RoutingShape] | None:
        """The routing of each chunk's experts. None where layers of the user's own have experts that are not known.

        Numbers the experts' layers, of each chunk from 0.
        """
        if None in self.fused:
            return None
        return [routing_shape([one.experts for one in part if one.experts is not None]) for part in self.parts]


def _read(
    live: Any, vocab_size: int | None, state_config: MambaInferenceStateConfig | None, was_adopted: bool
) -> ModelReading:
    """The first half of adoption: raises AdoptionError, and changes nothing."""
    tp = Reducer.of(live.pg_collection.tp)
    layers: list[LayerAdoption] = []
    parts: list[list[LayerAdoption]] = []
    num_attention = num_mamba = 0
    for number, chunk in enumerate(chunks_of(live)):
        prefix = f"chunks.{number}." if isinstance(live, ModelChunks) else ""
        check_model(chunk)
        parts.append([])
        for i, module in enumerate(chunk.decoder.layers):
            layer = LayerAdoption(
                module,
                f"{prefix}decoder.layers.{i}",
                model=chunk,
                tp=tp,
                num_attention=num_attention,
                num_mamba=num_mamba,
            )
            num_attention += layer.attention is not None
            num_mamba += layer.mixer is not None
            parts[-1].append(layer)
        _check_own_choice(parts[-1])
        layers += parts[-1]
        if all(layer.fused is not None for layer in layers):
            check_called_by_none(chunk.decoder, f"{prefix}decoder")
    _check_one_rotation(layers)
    if num_attention + num_mamba == 0 and live.pre_process and live.post_process:
        raise AdoptionError(
            "decoder.layers", "no layer of the model attends or keeps a state: there is nothing to page"
        )
    where, final_norm = final_norm_of(live)
    if final_norm is None and live.post_process:
        raise AdoptionError(where, "missing; a decoder without it is not supported")
    if final_norm is not None and not live.post_process:
        raise AdoptionError(where, "in a pipeline stage that is not the last")
    norm = None if final_norm is None else FusedNorm(final_norm, where)
    true_vocab = getattr(live, "true_vocab_size", None) if vocab_size is None else vocab_size
    shape = model_shape(live, layers, true_vocab, state_config)
    fp8 = bind_fp8(live.config, layers)
    return ModelReading(
        shape=shape,
        parts=parts,
        norm=norm,
        fp8=fp8,
        tp=tp,
        was_adopted=was_adopted,
        embedding_scale=scale_of(live.embedding) if hasattr(live, "embedding") else None,
        logit_softcap=softcap_of(live.output_layer) if live.post_process else None,
        logit_scale=multipliers_of(live.config).lm_head_multiplier,
    )


def _latent_of(layers: Sequence[LayerAdoption]) -> list[LayerAdoption]:
    return [layer for layer in layers if isinstance(layer.attention, FusedLatentAttention)]


def _check_own_choice(layers: Sequence[LayerAdoption]) -> None:
    """Raise AdoptionError unless a chunk's first layer with sparse attention chooses its keys itself."""
    for layer in _latent_of(layers)[:1]:
        if layer.attention is not None and layer.attention.attend.reuses_choice:
            raise AdoptionError(
                f"{layer.name}.self_attention", "attends to keys that a layer of another pipeline stage chooses"
            )


def _check_one_rotation(layers: Sequence[LayerAdoption]) -> None:
    """Raise AdoptionError unless all layers with latent attention, which have a rotary embedding each, rotate alike."""
    latent = _latent_of(layers)
    for layer in latent[1:]:
        first, other = (one.layer.self_attention.rotary_pos_emb for one in (latent[0], layer))
        if not rotate_alike(first, other):
            raise AdoptionError(
                f"{layer.name}.self_attention.rotary_pos_emb", f"rotates otherwise than that of {latent[0].name}"
            )


class AdoptedModel:
    """kernels.base.PagedModel over a live model. The only tensors it holds are scan weights derived from parameters."""

    unavailable: Mapping[str, str] = {}
    """Parameters of requests that the model cannot serve -> why, and what to do."""

    def __init__(self, live: Any, reading: ModelReading, read: Callable[[], ModelReading], *, name: str) -> None:
        """read: called for another reading when modules have changed."""
        self.live, self.name, self._read = live, name, read
        """live: the model itself, without wrappers."""
        self.is_first_stage: bool = live.pre_process
        """It embeds tokens; the other stages receive the residual stream of the stage before."""
        self.is_last_stage: bool = live.post_process
        """It has the final norm and the output layer."""
        self.num_adoptions = 0
        """Times that the modules were adopted."""
        self.device: torch.device = next(live.parameters()).device
        self.apply(reading)

    def apply(self, reading: ModelReading) -> None:
        """The second half of adoption: give the modules their classes and run what was read from now on."""
        for layer in reading.layers:
            layer.apply()
        for chunk in chunks_of(self.live):
            cpu_rotary(chunk)
        before = self.linears if self.num_adoptions else {}
        self._reading, self.shape = reading, reading.shape
        self.set_lora({path: linear.lora for path, linear in before.items()})
        self.specs = reading.specs
        """One for each of this rank's attention layers, in order."""
        self._mixers = reading.mixers
        self.ssm_specs: list[RecurrentSpec] = [mixer.spec for mixer in self._mixers]
        """One for each of this rank's layers with recurrent states, in order."""
        self.fp8 = reading.fp8
        """What multiplies in FP8; None: nothing does. Needs `refresh` before the first step."""
        self.layers: list[FusedLayer | None] = list(reading.fused)
        """What a step runs, in order; None: a class of the user's, and megatron-core's decoder runs all layers."""
        self._operations = None if None in reading.fused else [*map(self._operations_of, range(self.num_chunks))]
        """The operations of each chunk's layers and final norm; None where megatron-core's decoder runs the layers."""
        self.routing_of_chunks = reading.routing
        """The routing of each chunk; None if not known."""
        self.chooses_keys = any(spec.index is not None for spec in self.specs)
        """Layers have indexers (sparse attention)."""
        self._dtype = getattr(torch, self.shape.dtype)
        self._tp = reading.tp
        self.num_adoptions += 1
        self._module_guard = ModuleGuard(self.live)

    @property
    def routing(self) -> RoutingShape | None:
        """The routing of all experts on this rank; None if not known."""
        parts = self.routing_of_chunks
        if parts is None:
            return None
        return RoutingShape(
            num_layers=sum(part.num_layers for part in parts),
            top_k=max(part.top_k for part in parts),
            num_experts=max(part.num_experts for part in parts),
        )

    @property
    def num_chunks(self) -> int:
        """Parts of the model on this rank, between which other ranks run theirs."""
        return len(self._reading.parts)

    def layer_numbers(self) -> list[tuple[int, int]]:
        """Numbers in the whole model, from 1, of the first and last layer of each chunk; (0, 0): it has none."""
        return [(part[0].number + 1, part[-1].number + 1) if part else (0, 0) for part in self._reading.parts]

    def _operations_of(self, chunk: int) -> LayerOps:
        norm, part = self._norm_behind(chunk), self._reading.parts[chunk]
        each = [operation for layer in part if layer.fused is not None for operation in layer.fused.flat()]
        return LayerOps(*with_programs([*each, *([] if norm is None else [norm])], end_model=norm is not None))

    def _norm_behind(self, chunk: int) -> FusedNorm | None:
        return self._reading.norm if chunk == self.num_chunks - 1 else None

    def set_lora(self, weights: Mapping[str, AdapterPairs | None]) -> None:
        """Add these pairs' products in steps with adapters, also after the model is adopted again. By `linears`."""
        for path, linear in self._reading.linears.items():
            linear.lora = weights.get(path)

    @property
    def linears(self) -> dict[str, FusedLinear]:
        return self._reading.linears

    @property
    def was_adopted(self) -> bool:
        return self._reading.was_adopted

    @property
    def heads(self) -> MTPHead | None:
        """The MTP layer that drafts; None: none does."""
        return self._reading.heads

    def adopt_heads(self) -> None:
        """Read the MTP layers too, now and whenever modules have changed. Raises AdoptionError."""
        self._reading = replace(self._reading, heads=MTPHead(self.live, self._tp))

    def has_changed(self) -> bool:
        """Whether a module was replaced, hooked, patched, parametrized or cast, or a parameter replaced, since the
        model was adopted. Cheap enough for every step."""
        if self._module_guard.is_intact():
            return False
        now = ModuleGuard(self.live)
        if self._module_guard.difference(now) is not None or not self._module_guard.has_same_parameters(now):
            return True
        self._module_guard = now  # only attributes that do not count are others
        return False

    def is_sharded(self) -> bool:
        """Whether this rank holds a part of the weights only."""
        return any(map(is_dtensor, self.live.parameters()))

    def weights_watched(self) -> None:
        """See `ExpertWeights.watched`."""
        for experts in self._reading.all_experts:
            experts.grouped.watched()

    def has_same_modules(self) -> bool:
        """Whether only hooks and methods of instances changed: a forward that calls the modules runs them."""
        return self._module_guard.difference(ModuleGuard(self.live), calls=False) is None

    def changed_module(self) -> tuple[str, str] | None:
        """(path, what) of the first module that is not as it was adopted; None: all are."""
        return self._module_guard.difference(ModuleGuard(self.live))

    def read_changed(self) -> ModelReading | None:
        """The first half of another adoption if modules have changed; None: they are as they were adopted.

        Raises AdoptionError for modules that cannot be adopted, or not into the cache of this engine.
        """
        now = ModuleGuard(self.live)
        if (found := self._module_guard.difference(now)) is None:
            self._module_guard = now
            return None
        where, what = found
        log.info("%s %s: adopting the model again", where or "<root>", what)
        reading = self._read()
        if self.heads is not None:
            reading = replace(reading, heads=MTPHead(self.live, reading.tp))
        if (reason := self._misfit(reading)) is not None:
            raise AdoptionError(where, f"{what}, and {reason}; undo the change, or build a new engine")
        return reading

    def _misfit(self, reading: ModelReading) -> str | None:
        """Why this engine's cache, kernels and graphs are not for what was read; None: they are."""
        has_own = any(linear.lora is not None for linear in self.linears.values())
        if has_own and any(linear.attached is not None for linear in reading.linears.values()):
            return f"the model {ATTACHED}, and the engine has adapters of its own"
        had, has = asdict(self.shape), asdict(reading.shape)
        if had["dtype"] != has["dtype"]:
            return f"the weights are {has['dtype']} where the engine's cache was laid out for {had['dtype']}"
        for name in had.keys() - {"num_parameters"}:
            if had[name] != has[name]:
                return f"{name} is {has[name]} where the engine was built for {had[name]}"
        kinds = {
            "attention": (self.specs, reading.specs),
            "sinks of attention": [[spec.sinks is None for spec in specs] for specs in (self.specs, reading.specs)],
            "the recurrent layers": (self.ssm_specs, [mixer.spec for mixer in reading.mixers]),
            "the order of layers": (self.cache_order, reading.cache_order),
            "layers of the user's own classes": (_own(self._reading.fused), _own(reading.fused)),
            "the experts": (self.routing_of_chunks, reading.routing),
            "the MTP layer": (self.heads and self.heads.spec, reading.heads and reading.heads.spec),
            "products in FP8": (self.fp8 is None, reading.fp8 is None),
        }
        differing = next((kind for kind, (before, now) in kinds.items() if before != now), None)
        return None if differing is None else f"{differing} differ from what the engine was built for"

    @property
    def cache_order(self) -> list[str]:
        """What each layer with a cache keeps, "blocks" or "states", in the order of a step."""
        return self._reading.cache_order

    def embed(self, step: StepInputs) -> Tensor:
        """Token (and learned position) embeddings, [T, 1, D]."""
        return self._embed(step).unsqueeze(1)

    def hidden(self, step: StepInputs, received_TD: Tensor | None = None, *, chunk: int = 0) -> Tensor:
        """Final normed hidden states [T, D]; on a stage that is not the last, its residual stream in fp32.

        received_TD: what the stage before returned, on all stages but the first; it may be overwritten. chunk: which of
        this rank's parts runs. Runs under torch.inference_mode() (no_grad too), in eval mode.
        """
        require_inference(self.live)
        return self.decode(step, received_TD, chunk=chunk)

    def serve(self, ops: Ops, tokens_of_ranks: Sequence[int]) -> None:
        for experts in self._reading.experts:
            experts.serve(ops, tokens_of_ranks, self._dtype)

    def decode(
        self,
        step: StepInputs,
        received_TD: Tensor | None = None,
        *,
        around: Callable[..., Any] | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """`hidden` in any mode: the step's kernels and the caller decide about autograd and dropout.

        around(run, *arguments) is called for each layer in the place of run(*arguments).
        """
        if self.fp8 is not None:
            self.fp8.padding_T1 = step.padding_T1 if self.fp8.scale_is_shared and step.is_padded else None
        if received_TD is None:
            x_TD, residual_TD = self._embed(step), None
        else:
            # The stage before has added its last product; zeros in its place give the bits of an undivided decoder.
            x_TD, residual_TD = torch.zeros_like(received_TD, dtype=self._dtype), received_TD
        if self._operations is None:
            return self._stock_decoder(step, x_TD, residual_TD)
        norm = self._norm_behind(chunk)
        if around is None:
            x_TD, residual_TD = self._operations[chunk].run(step, x_TD, residual_TD)
            if norm is not None:
                return x_TD
        else:
            for layer in self._reading.parts[chunk]:
                assert layer.fused is not None
                x_TD, residual_TD = around(layer.fused.run, step, x_TD, residual_TD)
            if norm is not None:
                return norm.run(step, x_TD, residual_TD)[0]
        if residual_TD is None:
            return x_TD.float()
        return residual_TD + x_TD if torch.is_grad_enabled() else residual_TD.add_(x_TD)

    def _stock_decoder(self, step: StepInputs, x_TD: Tensor, received_TD: Tensor | None) -> Tensor:
        """`hidden` through megatron-core's own decoder, for models with a layer class of the user's."""
        decoder = self.live.decoder
        if received_TD is not None:
            x_TD = received_TD if self.live.config.fp32_residual_connection else received_TD.to(self._dtype)
            decoder.set_input_tensor(x_TD.unsqueeze(1))
        out_TD = decoder(hidden_states=x_TD.unsqueeze(1), attention_mask=None, inference_context=step).squeeze(1)
        return out_TD if self.is_last_stage else out_TD.float()

    def final_norm(self, step: StepInputs, x_TD: Tensor) -> Tensor:
        """The norm behind the last layer, without the residual."""
        norm = self._reading.norm
        assert norm is not None, "a pipeline stage that is not the last"
        return norm.norm(step.ops, x_TD)

    def logits(self, hidden_SD: Tensor, ops: Ops) -> Tensor:
        """fp32 [S, V]: this rank's part of the padded vocabulary, all of it on one rank."""
        hidden_SD, weight = hidden_SD if self._tp is None else self._tp.spread(hidden_SD), self._output_weight()
        return self._capped(ops, ops.fp32_linear(hidden_SD, weight, self._output_bias(), len(weight)))

    def first_logits(self, hidden_SD: Tensor, ops: Ops, count: int) -> Tensor | None:
        """Those of the lowest `count` tokens; None where the vocabulary is split over ranks."""
        if self._tp is not None:
            return None
        return self._capped(ops, ops.fp32_linear(hidden_SD, self._output_weight(), self._output_bias(), count))

    def _capped(self, ops: Ops, logits_SV: Tensor) -> Tensor:
        cap, scale = self._reading.logit_softcap, self._reading.logit_scale
        logits_SV = logits_SV if scale == 1.0 else logits_SV * scale
        return logits_SV if cap is None else ops.softcap(logits_SV, cap)

    def argmax(self, hidden_SD: Tensor, ops: Ops, count: int) -> tuple[Tensor, Tensor] | None:
        """The largest of the lowest `count` tokens' logits, see `Ops.argmax_linear`; None: it takes all of them."""
        if self._tp is not None or ops.argmax_linear is None or self._output_bias() is not None:
            return None
        # Capping and scaling round close logits to one, of which the lowest id counts.
        if self._reading.logit_softcap is not None or self._reading.logit_scale != 1.0:
            return None
        return ops.argmax_linear(hidden_SD, self._output_weight(), count)

    def _output_weight(self) -> Tensor:
        """[V, D], live: a trainer may replace it. The embedding's where they are tied."""
        live = self.live
        if live.share_embeddings_and_output_weights:
            tied: Tensor = live.shared_embedding_or_output_weight()
            return tied
        own: Tensor = live.output_layer._parameters["weight"]
        return own

    def _output_bias(self) -> Tensor | None:
        found: Tensor | None = self.live.output_layer._parameters["bias"]
        return found

    def whole_logits(self, logits_SW: Tensor) -> Tensor:
        """[S, V] on every rank, from the part of each; all ranks then compute the same from them."""
        return logits_SW if self._tp is None else self._tp.whole(logits_SW)

    @property
    def tp_group(self) -> Any:
        """The ranks that the vocabulary and every layer are split over; None: this rank has all of them."""
        return None if self._tp is None else self._tp.group

    def rotary_table(self, num_positions: int) -> RotaryTable | None:
        """cos and sin of positions 0 .. num_positions - 1; None without rotary embedding."""
        attends = [layer.layer for layer in self._reading.layers if layer.attention is not None]
        if not any(spec.rotary_dim for spec in self.specs):
            return None
        if self.shape.latent is not None:
            return latent_rotary_table(attends[0].self_attention.rotary_pos_emb, num_positions, self.device)
        factor = mcore.rotary_factor(attends[0].self_attention)  # of the config, so that all layers have the same
        return rotary_table(self.live.rotary_pos_emb, num_positions, self.device, factor=factor)

    def output_weight(self) -> Tensor | None:
        """The output layer's, or this rank's part of it; None on other stages than the last."""
        return self._output_weight() if self.is_last_stage else None

    def packable_weights(self) -> Iterable[Tensor]:
        """This rank's weights that go through `ops.linear`, the output layer's included."""
        output = self.output_weight()
        if output is not None:
            yield output
        for layer in self.layers:
            if layer is not None:
                yield from layer.weights()
        if self.heads is not None:
            yield from self.heads.weights()

    def unpackable(self) -> str | None:
        """Why linears would not use packed copies of their weights; None: all do."""
        if self.fp8 is not None:
            return "the model's products are in FP8, by its trainer's recipe"
        foreign = self.foreign_layer()
        return None if foreign is None else f"{foreign} is of a class of its own, which multiplies by its own weights"

    def refresh_scan_weights(self) -> None:
        """Derive the weights of the Mamba scans again; needed after every change of the model's parameters."""
        for mixer in self._mixers:
            mixer.scan_weights.refresh()

    def live_scan_weights(self, layer: int) -> SsmWeights:
        """Weights of this rank's Mamba layer number `layer`, derived from its parameters now, with gradients."""
        return self._mixers[layer].scan_weights.live()

    def products_in_fp8(self) -> Fp8Linears:
        """`fp8` of a model that has products in FP8."""
        assert self.fp8 is not None
        return self.fp8

    def foreign_layer(self) -> str | None:
        """The first layer of a class of the user's, which our kernels do not run whole; None: there is none."""
        return next((f"decoder.layers.{i}" for i, layer in enumerate(self.layers) if layer is None), None)

    def waits_for_device(self, ops: Ops, num_tokens: int) -> bool:
        """Whether the layers of a padded step of so many tokens wait for a value of the device."""
        return any(experts.waits_for_device(ops, num_tokens) for experts in self._reading.experts)

    def token_counts(self, ops: Ops) -> list[int]:
        """Numbers of tokens from which on a step's layers run other kernels than a smaller step's, ascending."""
        return sorted({count for experts in self._reading.experts for count in experts.token_counts(ops)})

    @property
    def splits_experts(self) -> bool:
        """Whether an expert's weights are split over ranks that are no tensor-parallel ones."""
        return any(experts.is_split for experts in self._reading.all_experts)

    @property
    def expert_groups(self) -> list[Any]:
        """The process groups that experts are divided over, of each layer that has some."""
        return [experts.exchange.group for experts in self._reading.all_experts if experts.exchange is not None]

    def reducers(self) -> list[Reducer]:
        """The collectives in a step's layers, one for each process group."""
        found = [self._tp, *(experts.reduce for experts in self._reading.all_experts)]
        return list({id(one.group): one for one in found if one is not None}.values())

    def groups(self) -> list[Any]:
        return [one.group for one in self.reducers()]

    def scan_weights_differ(self) -> str | None:
        """The name of the first parameter that changed since the scans' weights were derived; None: none did."""
        for mixer in self._mixers:
            if (parameter := mixer.scan_weights.differs()) is not None:
                return f"{mixer.name}.{parameter}"
        return None

    def _embed(self, step: StepInputs) -> Tensor:
        embedding = self.live.embedding
        words = embedding.word_embeddings
        if self._tp is None:
            x_TD = step.ops.embedding(step.token_ids_T, words.weight)
        else:
            # The row of each token is on one rank: the others add zeros, which changes no bit.
            local_T = step.token_ids_T - words.vocab_start_index
            elsewhere_T = (local_T < 0) | (local_T >= len(words.weight))
            x_TD = step.ops.embedding(local_T.masked_fill_(elsewhere_T, 0), words.weight)
            x_TD = self._tp.all_reduce(x_TD.masked_fill_(elsewhere_T.unsqueeze(1), 0))
        if embedding.add_position_embedding:
            x_TD += F.embedding(step.positions_T, embedding.position_embeddings.weight)
        scale = self._reading.embedding_scale
        return x_TD if scale is None else x_TD * scale


def _own(layers: Sequence[FusedLayer | None]) -> list[int]:
    """Numbers of the layers of the user's own classes."""
    return [number for number, layer in enumerate(layers) if layer is None]
