"""A live megatron-core model becomes a paged one, in place: same parameters, same state dict, same training path.

Adoption has two halves. The first looks at every module and either knows what it computes or refuses by name; nothing
has changed then. The second gives each stock attention, mixer and layer our subclass and binds it to its place in the
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import AttendSpec, Ops, RotaryTable, StepInputs
from megatron_infer.kernels.ssm import SsmSpec, SsmWeights
from megatron_infer.models.adoption_checks import check_config, check_model, final_norm_of, unwrap
from megatron_infer.models.compiled_layers import Compiled, compiled_layer, warm_up
from megatron_infer.models.compiled_pieces import PieceCompiler
from megatron_infer.models.fp8 import Fp8Linears, bind_fp8
from megatron_infer.models.fused_layers import FusedBlock, FusedLayer, FusedNorm
from megatron_infer.models.layer_plan import LayerPlan
from megatron_infer.models.model_shape import model_shape
from megatron_infer.models.moe import routing_shape
from megatron_infer.models.paged_layers import SEQUENCE_PARALLEL, require_inference
from megatron_infer.models.rotary import cpu_rotary, rotary_table
from megatron_infer.models.tp_collectives import Reducer


def adopt(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    name: str = "",
    vocab_size: int | None = None,
    state_config: MambaInferenceStateConfig | None = None,
) -> AdoptedModel:
    """Make a live GPTModel, MambaModel or HybridModel paged, in place, and give it as what the runner drives.

    It may be one stage of a pipeline, with or without embedding, output layer, attention or Mamba layers.
    `model` may be wrapped (DDP, Float16Module) and may be Megatron's one-element list of chunks. `vocab_size` is the
    true size where the model's own is padded; None: what `build_model` has noted, else the padded one. `state_config`
    says in which dtypes recurrent states are kept. Adopting twice is fine. Raises AdoptionError, with nothing changed,
    naming the module and the reason if any part of the model is not known to compute what the paged path computes.
    """
    live = unwrap(model)
    check_config(live.config)
    check_model(live)
    tp = Reducer.of(live.pg_collection.tp)
    layers: list[LayerPlan] = []
    num_attention = num_mamba = 0
    for i, layer in enumerate(live.decoder.layers):
        plan = LayerPlan(
            layer,
            f"decoder.layers.{i}",
            model=live,
            tp=tp,
            num_attention=num_attention,
            num_mamba=num_mamba,
        )
        num_attention += plan.attention is not None
        num_mamba += plan.mixer is not None
        layers.append(plan)
        if plan.lean is None and live.config.sequence_parallel:
            raise AdoptionError(plan.name, f"a layer of another class with sequence_parallel=True: {SEQUENCE_PARALLEL}")
    if num_attention + num_mamba == 0 and live.pre_process and live.post_process:
        raise AdoptionError("decoder.layers", "the model has no attention or Mamba layers: there is nothing to page")
    where, final_norm = final_norm_of(live)
    if final_norm is None and live.post_process:
        raise AdoptionError(where, "missing; a decoder without it is not supported")
    if final_norm is not None and not live.post_process:
        raise AdoptionError(where, "in a pipeline stage that is not the last")
    lean_norm = None if final_norm is None else FusedNorm(final_norm, where)
    true_vocab = getattr(live, "true_vocab_size", None) if vocab_size is None else vocab_size
    shape = model_shape(live, layers, true_vocab, state_config)
    fp8 = bind_fp8(live.config, layers)
    for plan in layers:
        plan.apply()
    cpu_rotary(live)
    return AdoptedModel(live, shape, layers, lean_norm, tp=tp, name=name, fp8=fp8)


class AdoptedModel:
    """kernels.base.PagedModel over a live model. Of tensors it holds only the scan weights derived from parameters."""

    def __init__(
        self,
        live: Any,
        shape: ModelShape,
        layers: list[LayerPlan],
        norm: FusedNorm | None,
        *,
        tp: Reducer | None,
        name: str,
        fp8: Fp8Linears | None = None,
    ) -> None:
        self.live, self.shape, self.name = live, shape, name
        """live: the model itself, without wrappers."""
        self.specs: list[AttendSpec] = [plan.attention.spec for plan in layers if plan.attention is not None]
        """Attention layers of this rank, in order."""
        self._mixers = [(f"{plan.name}.mixer", plan.mixer) for plan in layers if plan.mixer is not None]
        self.ssm_specs: list[SsmSpec] = [mixer.spec for _, mixer in self._mixers]
        """Mamba layers of this rank, in order."""
        kinds = [("blocks", plan.attention) for plan in layers], [("states", plan.mixer) for plan in layers]
        self.cache_order = [kind for both in zip(*kinds, strict=True) for kind, part in both if part is not None]
        """What the layers that keep something keep, in the order in which a step comes to them."""
        self.is_first_stage: bool = live.pre_process
        """It embeds tokens; the others take in what the stage before hands on."""
        self.is_last_stage: bool = live.post_process
        """It has the final norm and the output layer."""
        self.fp8 = fp8
        """What multiplies in FP8; None: nothing does. Its `refresh` comes before the first step."""
        self.device: torch.device = next(live.parameters()).device
        self._whole: list[FusedLayer | FusedBlock | None] = [layer.lean for layer in layers]
        self._lean: list[FusedLayer | FusedBlock | Compiled | None] = list(self._whole)
        self.pieces: PieceCompiler | None = None
        """What of the layers is compiled; None: nothing."""
        self._drives_itself = all(lean is not None for lean in self._lean)
        self._experts = experts = [plan.experts for plan in layers if plan.experts is not None]
        self.routing = routing_shape(experts) if self._drives_itself else None
        self._norm = norm
        self._dtype = getattr(torch, shape.dtype)
        self._tp = tp

    def embed(self, step: StepInputs) -> Tensor:
        """Token (and learned position) embeddings, [T, 1, D]."""
        return self._embed(step).unsqueeze(1)

    def hidden(self, step: StepInputs, received_TD: Tensor | None = None) -> Tensor:
        """Final normed hidden states [T, D]; of a stage that is not the last, its residual stream in fp32.

        received_TD: what the stage before returned, for all but the first; it may be overwritten.
        Runs under torch.inference_mode() (no_grad too), in eval mode.
        """
        require_inference(self.live)
        return self.decode(step, received_TD)

    def decode(
        self, step: StepInputs, received_TD: Tensor | None = None, *, around: Callable[..., Any] | None = None
    ) -> Tensor:
        """`hidden` in any mode: what autograd and dropout make of it is up to the step's kernels and the caller.

        around(run, *arguments) calls each layer's run; None: it is called.
        """
        if self.fp8 is not None:
            self.fp8.nobody_T1 = step.nobody_T1 if self.fp8.company_counts and step.is_padded else None
        if received_TD is None:
            x_TD, residual_TD = self._embed(step), None
        else:
            # The stage before has added its last product; zeros in its place give the bits of an undivided decoder.
            x_TD, residual_TD = torch.zeros_like(received_TD, dtype=self._dtype), received_TD
        if not self._drives_itself:
            return self._stock_decoder(step, x_TD, residual_TD)
        for layer in self._lean:
            assert layer is not None
            if around is None:
                x_TD, residual_TD = layer.run(step, x_TD, residual_TD)
            else:
                x_TD, residual_TD = around(layer.run, step, x_TD, residual_TD)
        if self._norm is not None:
            return self._norm.run_added(step.ops, x_TD, residual_TD)[0]
        return x_TD.float() if residual_TD is None else residual_TD.add_(x_TD)

    def _stock_decoder(self, step: StepInputs, x_TD: Tensor, received_TD: Tensor | None) -> Tensor:
        """As `hidden`, through megatron-core's own decoder: some layer is the user's."""
        decoder = self.live.decoder
        if received_TD is not None:
            x_TD = received_TD.to(self._dtype)
            decoder.set_input_tensor(x_TD.unsqueeze(1))
        out_TD = decoder(hidden_states=x_TD.unsqueeze(1), attention_mask=None, inference_context=step).squeeze(1)
        return out_TD if self.is_last_stage else out_TD.float()

    def compile_layers(self) -> PieceCompiler:
        """Compile what lies between the layers' kernels (see `models.compiled_layers`), now, whatever steps will come.

        Layers of the user's own stay as they are. Raises what torch.compile raises; nothing has changed then.
        """
        pieces, dtype = PieceCompiler(), self._dtype
        made = [None if lean is None else compiled_layer(pieces, lean) for lean in self._whole]
        warm_up(made, width=self.shape.hidden_size, dtype=dtype, device=self.device, is_first=self.is_first_stage)
        self._lean = [one or lean for one, lean in zip(made, self._whole, strict=True)]
        self.pieces, pieces.expects_more = pieces, False
        return pieces

    def keep_layers(self) -> None:
        """Take `compile_layers` back."""
        self._lean, self.pieces = list(self._whole), None

    def final_norm(self, step: StepInputs, x_TD: Tensor) -> Tensor:
        """The norm behind the last layer, by itself."""
        assert self._norm is not None, "a pipeline stage that is not the last"
        return self._norm.run(step.ops, x_TD)

    def logits(self, hidden_SD: Tensor, ops: Ops) -> Tensor:
        """[S, V] in the model's dtype: this rank's part of the padded vocabulary, all of it on one rank."""
        if self._tp is not None:
            hidden_SD = self._tp.spread(hidden_SD)
        return ops.linear(hidden_SD, self._output_weight(), self.live.output_layer._parameters["bias"])

    def whole_logits(self, logits_SW: Tensor) -> Tensor:
        """[S, V] on every rank from each one's part; all go on alike with them."""
        return logits_SW if self._tp is None else self._tp.whole(logits_SW)

    @property
    def tp_group(self) -> Any:
        """The ranks that the vocabulary (and every layer) is split over; None: this process alone."""
        return None if self._tp is None else self._tp.group

    def rotary_table(self, num_positions: int) -> RotaryTable | None:
        """cos and sin of positions 0 .. num_positions - 1; None without rotary embedding."""
        if not any(spec.rotary_dim for spec in self.specs):
            return None
        return rotary_table(self.live.rotary_pos_emb, num_positions, self.device)

    def packable_weights(self) -> Iterable[Tensor]:
        """Weights of this rank that go through `ops.linear`, the output layer's included."""
        if self.is_last_stage:
            yield self._output_weight()
        for layer in self._lean:
            if layer is not None:
                yield from layer.weights()

    def refresh_scan_weights(self) -> None:
        """Derive the weights of the Mamba scans again; after every change of the model's parameters."""
        for _, mixer in self._mixers:
            mixer.scan.refresh()

    def live_scan_weights(self, layer: int) -> SsmWeights:
        """Weights of Mamba layer number `layer` of this rank, derived from its parameters now, for autograd too."""
        return self._mixers[layer][1].scan.live()

    def foreign_layer(self) -> str | None:
        """The first layer of the user's own, which our kernels do not run whole; None: there is none."""
        return next((f"decoder.layers.{i}" for i, lean in enumerate(self._lean) if lean is None), None)

    def asks_host(self, ops: Ops, num_tokens: int) -> bool:
        """Whether a padded step of so many tokens asks the device for something on its way through the layers."""
        return any(experts.asks_host(ops, num_tokens) for experts in self._experts)

    def token_counts(self, ops: Ops) -> list[int]:
        """The least tokens of steps whose layers run other kernels than smaller steps do, ascending."""
        return sorted({count for experts in self._experts for count in experts.token_counts(ops)})

    def groups(self) -> list[Any]:
        """Process groups that a step's layers talk over."""
        reducers = [self._tp, *(experts.reduce for experts in self._experts)]
        return list({id(one.group): one.group for one in reducers if one is not None}.values())

    def scan_weights_differ(self) -> str | None:
        """The first parameter that the scans do not see as it is now, by name; None when they are up to date."""
        for name, mixer in self._mixers:
            if (parameter := mixer.scan.differs()) is not None:
                return f"{name}.{parameter}"
        return None

    def _embed(self, step: StepInputs) -> Tensor:
        embedding = self.live.embedding
        words = embedding.word_embeddings
        if self._tp is None:
            x_TD = F.embedding(step.token_ids_T, words.weight)
        else:
            # Every token's row is on one rank: the others add zeros, which changes no bit of it.
            local_T = step.token_ids_T - words.vocab_start_index
            elsewhere_T = (local_T < 0) | (local_T >= len(words.weight))
            x_TD = F.embedding(local_T.masked_fill_(elsewhere_T, 0), words.weight)
            x_TD = self._tp.all_reduce(x_TD.masked_fill_(elsewhere_T.unsqueeze(1), 0))
        if embedding.add_position_embedding:
            x_TD += F.embedding(step.positions_T, embedding.position_embeddings.weight)
        return x_TD

    def _output_weight(self) -> Tensor:
        live = self.live
        if live.share_embeddings_and_output_weights:
            return live.shared_embedding_or_output_weight()
        return live.output_layer._parameters["weight"]
