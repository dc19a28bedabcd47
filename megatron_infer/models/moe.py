"""Mixture-of-experts layers on live weights: route, then one pass over the chosen experts of this rank."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.distributed.backends import group_size
from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import Ops, RoutingShape, StepInputs
from megatron_infer.kernels.experts import ExpertChoice, ExpertsBackend, ExpertWeights, RoutingRules
from megatron_infer.models.core_attention import WholeLinear
from megatron_infer.models.fused_layers import FusedLinear, FusedMLP, LayerOp
from megatron_infer.models.mcore_compat import (
    MLP,
    MoELayer,
    SequentialMLP,
    SharedExpertMLP,
    TopKRouter,
    TransformerConfig,
    cuda_available,
    latent_projections_of,
    rounds_router_scores,
    topk_routing,
)
from megatron_infer.models.te_apex import is_grouped_experts
from megatron_infer.models.tp_collectives import SPARED_BYTES, Reducer, TokenExchange

DENSE_TOKENS = 128
"""Tokens that a GPU multiplies by a weight in about the time that it reads the weight."""
DENSE_SHARE = 0.5
"""Choices per expert in a step from which on reading all experts costs little more than reading the chosen ones."""
GROUP_PAIRS = 1024
"""Pairs of an expert and a token whose activations are computed at once: all of a decode step's, and little memory."""
_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def gating_logits(router: TopKRouter, x: Tensor, linear: Callable[..., Tensor] = F.linear) -> Tensor:
    """[..., D] -> [..., E] in the router's dtype, on whatever device the weights are."""
    dtype = _ROUTER_DTYPES.get(router.config.moe_router_dtype, x.dtype)
    bias = router.bias
    return linear(x.to(dtype), router.weight.to(dtype), None if bias is None else bias.to(dtype))


class DeviceAgnosticRouter(TopKRouter):
    """megatron-core's router without the move of its weights to CUDA; stock where CUDA is available."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        if cuda_available() or not config.moe_router_enable_expert_bias:
            super().__init__(config, *args, **kwargs)
            return
        # The stock constructor puts the correction bias and its counts on the current CUDA device.
        plain = copy.copy(config)
        plain.moe_router_enable_expert_bias = False
        super().__init__(plain, *args, **kwargs)
        self.config, self.enable_expert_bias = config, True
        for name, is_saved in (("local_tokens_per_expert", False), ("expert_bias", True)):
            delattr(self, name)
            zeros = torch.zeros(config.num_moe_experts, dtype=torch.float32)
            self.register_buffer(name, zeros, persistent=is_saved)

    def gating(self, input: Tensor) -> Tensor:
        if cuda_available():
            return super().gating(input)
        return gating_logits(self, input)


def softmax_as_sigmoid(logits_TE: Tensor) -> Tensor:
    """Logits whose sigmoid is the softmax of `logits_TE` over its last dimension, in its dtype."""
    log_TE = logits_TE.log_softmax(-1).clamp(max=-1e-7)  # of 0, a probability of 1, the gradient is not finite
    return log_TE - torch.log(-torch.expm1(log_TE))


class SoftmaxRouter(DeviceAgnosticRouter):
    """Adds its correction bias to softmax scores, where megatron-core's router adds it to sigmoid scores only.

    Example: top 2 of scores + bias, each weighed by its score / the sum of both.
    """

    def gating(self, input: Tensor) -> Tensor:
        return softmax_as_sigmoid(super().gating(input))


class LatentMoELayer(MoELayer):
    """megatron-core's layer with latent projections in torch, where its own are Transformer Engine's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with latent_projections_of(WholeLinear):
            super().__init__(*args, **kwargs)


class FusedExperts(LayerOp):
    """Router, this rank's experts and the shared experts of one MoE layer.

    With latents (moe_latent_size) the routed experts compute in a narrower space, between two linears that every rank
    has whole. Routers and shared experts have the hidden state itself.

    With experts on several ranks, every rank routes every token alike, runs its own experts on the tokens that chose
    them, and the ranks' sums are added. No token is sent to another rank, and no rank waits for another to have work.
    Where each rank has tokens of its own (`StepInputs.tokens_of_ranks`), tokens go to the ranks of their experts, and a
    rank without tokens calls `serve`.
    """

    def __init__(self, moe: MoELayer, name: str, *, tp: Reducer | None) -> None:
        """tp: the ranks that the shared experts are split over. The layer knows the ranks of the others itself."""
        _refuse_unsupported(moe, name)
        self.router = moe.router
        self.router_dtype = _ROUTER_DTYPES.get(moe.router.config.moe_router_dtype)
        """Of its logits; None: the model's."""
        self.layer = 0
        """Its number among this rank's mixture-of-experts layers; set by `adopt`."""
        self.route, self.rules = topk_routing(), _rules_of(moe.router)
        self.softmax_scores = type(moe.router) is SoftmaxRouter
        """The rules are of logits that `softmax_as_sigmoid` gives."""
        self.probs_on_input: bool = moe.config.moe_apply_probs_on_input
        """A token's weight multiplies what its one expert is given, not what the expert answers."""
        self.reduce = Reducer.of(expert_ranks(moe))
        self.tp = tp
        self.exchange = None if group_size(moe.ep_group) == 1 else TokenExchange(moe.ep_group, tp=tp)
        """For tokens of each rank's own; None: this rank has all experts."""
        parts = Reducer.of(moe.experts.tp_group)
        self.is_split = parts is not None and (tp is None or not set(parts.members()) <= set(tp.members()))
        """Each expert is in parts on several ranks, some of which are no tensor-parallel ones."""
        self.first: int = moe.local_expert_indices[0]
        # An expert may be split over ranks itself (expert tensor parallel): its parts are added up with the others.
        where, each = f"{name}.experts", {"tp": None, "weighted": True}
        if is_grouped_experts(moe.experts):
            count = moe.experts.num_local_experts
            self.experts = [FusedMLP(moe.experts, where, expert=i, **each) for i in range(count)]
        else:
            local = enumerate(moe.experts.local_experts)
            self.experts = [FusedMLP(expert, f"{where}.local_experts.{i}", **each) for i, expert in local]
        self.grouped = ExpertWeights(
            fc1=[expert.fc1.parameters for expert in self.experts],
            fc2=[expert.fc2.parameters for expert in self.experts],
            first=self.first,
            top_k=moe.router.topk,
            activation=self.experts[0].activation.function,
        )
        self.down: FusedLinear | None = None
        """Into the latent space, and `up` out of it; None: there is none."""
        self.up: FusedLinear | None = None
        if getattr(moe.config, "moe_latent_size", None):
            self.down = FusedLinear(moe.fc1_latent_proj, f"{name}.fc1_latent_proj", tp=None)
            self.up = FusedLinear(moe.fc2_latent_proj, f"{name}.fc2_latent_proj", tp=None)
        self.shared_module: Any = moe.shared_experts
        self.shared = None
        self.shared_with_experts = self.reduce is None and self.down is None
        """Their product is summed over the ranks with that of the experts, or each rank has all of both."""
        if self.shared_module is not None:
            is_one_sum = self.reduce is not None and tp is not None and self.reduce.members() == tp.members()
            if is_one_sum and self.down is None:
                tp, self.shared_with_experts = None, True
            self.shared = FusedMLP(self.shared_module, f"{name}.shared_experts", tp=tp)

    def run(self, step: StepInputs, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if step.tokens_of_ranks is not None and self.exchange is not None:
            return self._exchanged(step, x_TD, step.tokens_of_ranks), residual_TD
        add = self._routed(step, x_TD)
        own_TX = x_TD if self.down is None else self.down.run(step, x_TD, None)[0]
        # Each rank goes on with its own part of the experts: autograd adds up the gradients.
        own_TX = own_TX if self.reduce is None else self.reduce.spread(own_TX)
        shared_TD = None if self.shared is None else self._shared(step, own_TX if self.shared_with_experts else x_TD)
        starts = shared_TD is not None and self.shared_with_experts
        sum_TX = add(own_TX, shared_TD if starts else None)
        if self.reduce is not None:
            sum_TX = self.reduce.all_reduce(sum_TX)
        out_TD = sum_TX if self.up is None else self.up.run(step, sum_TX, None)[0]
        return (out_TD if starts or shared_TD is None else out_TD + shared_TD), residual_TD

    def _exchanged(self, step: StepInputs, x_TD: Tensor, counts: Sequence[int]) -> Tensor:
        """`run` for tokens that only tensor-parallel ranks have, too. counts: tokens of each rank of the exchange."""
        ops = step.ops
        ids_TK, weight_TK = self._chosen_pairs(ops, x_TD)
        if step.routing_TLK is not None:
            step.routing_TLK[:, self.layer] = ids_TK
        own_TX = x_TD if self.down is None else self.down.run(step, x_TD, None)[0]
        sum_TX = self._answered(ops, own_TX, ids_TK, weight_TK, counts, is_padded=step.is_padded)
        if self.tp is not None:
            sum_TX = self.tp.sum_of(sum_TX)
        out_TD = sum_TX if self.up is None else self.up.run(step, sum_TX, None)[0]
        return out_TD if self.shared is None else out_TD + self._shared(step, x_TD)

    def serve(self, ops: Ops, counts: Sequence[int], dtype: torch.dtype) -> None:
        """This rank's part of a step in which only other ranks have tokens. counts: tokens of each rank."""
        if self.exchange is None:
            return
        weight = self.experts[0].fc1.weight()
        x_TX = torch.empty(0, self.grouped.shape("fc1")[1], dtype=dtype, device=weight.device)
        pairs = torch.empty(0, self.router.topk, dtype=torch.int32, device=weight.device)
        self._answered(ops, x_TX, pairs, pairs, counts)

    def _answered(
        self,
        ops: Ops,
        own_TX: Tensor,
        ids_TK: Tensor,
        weight_TK: Tensor,
        counts: Sequence[int],
        *,
        is_padded: bool = False,
    ) -> Tensor:
        """The sums of the weighted answers of all ranks' experts. See `TokenExchange.summed` for counts. is_padded: the
        host waits for nothing."""
        assert self.exchange is not None
        is_grouped = self._grouped_backend(ops, own_TX.dtype) is not None
        weight_dtype = torch.float32 if is_grouped else self.router_dtype or own_TX.dtype
        parts = (own_TX, ids_TK.int(), weight_TK.to(weight_dtype))
        bytes_of_parts = [part.element_size() * part.shape[1] for part in parts]
        row_TX = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)

        def answer(row_PX: Tensor) -> Tensor:
            x, ids, weight = (
                column.contiguous().view(part.dtype)
                for column, part in zip(row_PX.split(bytes_of_parts, dim=1), parts, strict=True)
            )
            return self._of_own_experts(ops, x, ids, weight, is_padded=is_padded)

        spares = not is_padded and self._spares(counts, sum(bytes_of_parts))
        needed_Tn = self._needing(ids_TK) if spares else None
        return self.exchange.summed(row_TX, needed_Tn, counts, answer)

    def _spares(self, counts: Sequence[int], row_bytes: int) -> bool:
        """Whether it pays to send tokens only to the ranks that need them, if choices are even; the same on each."""
        assert self.exchange is not None
        if self.router.config.moe_token_dispatcher_type == "allgather":
            return False
        size = self.exchange.size
        unneeded = (1 - 1 / size) ** self.router.topk
        return (size - 1) * max(counts) * unneeded * row_bytes > SPARED_BYTES

    def _needing(self, ids_TK: Tensor) -> Tensor:
        """bool [T, n]: the ranks that have an expert of a token."""
        assert self.exchange is not None
        rank_TK = torch.where(ids_TK < 0, self.exchange.size, ids_TK // len(self.experts)).long()
        needed_Tn = torch.zeros(len(ids_TK), self.exchange.size + 1, dtype=torch.bool, device=ids_TK.device)
        return needed_Tn.scatter_(1, rank_TK, True)[:, : self.exchange.size]

    def _chosen_pairs(self, ops: Ops, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts, -1 behind the last one of a token with fewer, and their weights, both [T, K]."""
        logits_TE = self._logits(ops, x_TD)
        if (grouped := self._grouped_backend(ops, x_TD.dtype)) is not None:
            choice = self._grouped_choice(grouped, ops, logits_TE)
            return choice.ids_TK, choice.weight_TK
        probs_TE, chosen_TE = self._choose(ops, logits_TE)
        ids_TK = chosen_ids(chosen_TE, self.router.topk)
        is_one_TK = ids_TK < logits_TE.shape[1]
        weight_TK = probs_TE.gather(1, torch.where(is_one_TK, ids_TK, 0))
        return torch.where(is_one_TK, ids_TK, -1), weight_TK

    def _of_own_experts(self, ops: Ops, x_PX: Tensor, ids_PK: Tensor, weight_PK: Tensor, *, is_padded: bool) -> Tensor:
        """The weighted sum of this rank's experts for tokens of all ranks."""
        num_experts = self.router.config.num_moe_experts
        place_PK = torch.where(ids_PK < 0, num_experts, ids_PK).long()
        chosen_PE = torch.zeros(len(x_PX), num_experts + 1, dtype=torch.bool, device=x_PX.device)
        probs_PE = weight_PK.new_zeros(len(x_PX), num_experts + 1)
        chosen_PE = chosen_PE.scatter_(1, place_PK, True)[:, :num_experts]
        probs_PE = probs_PE.scatter_(1, place_PK, weight_PK)[:, :num_experts]
        if (grouped := self._grouped_backend(ops, x_PX.dtype)) is not None:
            choice = grouped.listed(chosen_PE, probs_PE, self.router.topk)
            return grouped.add(x_PX, choice, self.grouped, None)
        add = self._add_all if is_padded else self._add_each
        return add(ops, chosen_PE, probs_PE, x_PX, None)

    def _routed(self, step: StepInputs, x_TD: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Choose each token's experts -> the function that adds this rank's answers: add(own_TD, out_TD), with None for
        zeros."""
        ops, logits_TE = step.ops, self._logits(step.ops, x_TD)
        if (grouped := self._grouped_backend(ops, x_TD.dtype)) is not None:
            choice = self._grouped_choice(grouped, ops, logits_TE)
            if step.routing_TLK is not None:
                step.routing_TLK[:, self.layer] = choice.ids_TK
            return lambda own_TD, out_TD: grouped.add(own_TD, choice, self.grouped, out_TD)
        probs_TE, chosen_TE = self._choose(ops, logits_TE)
        if step.routing_TLK is not None:
            step.routing_TLK[:, self.layer] = chosen_ids(chosen_TE, step.routing_TLK.shape[-1])
        if self.reduce is not None:
            probs_TE = self.reduce.spread(probs_TE)
        return functools.partial(self._add_all if step.is_padded else self._add_each, ops, chosen_TE, probs_TE)

    def _add_each(self, ops: Ops, chosen_TE: Tensor, probs_TE: Tensor, own_TD: Tensor, out_TD: Tensor | None) -> Tensor:
        """One expert after the other, each on the tokens that chose it: the host waits for their numbers.

        P: pairs of an expert and a token, by expert, then by token.
        """
        out_TD = torch.zeros_like(own_TD) if out_TD is None else out_TD
        chosen_ET = chosen_TE[:, self.first : self.first + len(self.experts)].t()
        expert_P, token_P = chosen_ET.nonzero().unbind(1)
        counts = torch.bincount(expert_P, minlength=len(self.experts)).tolist()
        weight_P1 = probs_TE[token_P, expert_P + self.first].unsqueeze(-1)
        groups = _groups(self.experts, counts)
        sizes = [sum(count for _, count in group) for group in groups]
        for group, tokens, weights in zip(groups, token_P.split(sizes), weight_P1.split(sizes), strict=True):
            x_PD = own_TD.index_select(0, tokens)
            if self.probs_on_input:
                x_PD, weights = (x_PD * weights).to(x_PD.dtype), torch.ones_like(weights)
            self._add_group(ops, group, x_PD, tokens, weights, out_TD)
        return out_TD

    def _add_group(
        self,
        ops: Ops,
        group: Sequence[tuple[FusedMLP, int]],
        x_PD: Tensor,
        token_P: Tensor,
        weight_P1: Tensor,
        out_TD: Tensor,
    ) -> None:
        """Add some experts' products to out_TD. group: experts, and their numbers of pairs."""
        counts = [count for _, count in group]
        each = zip(group, x_PD.split(counts), strict=True)
        first = [mlp.fc1.multiply(ops, x, mlp.fc1.parameters["bias"]) for (mlp, _), x in each]
        middle_PF = self._middle(ops, torch.cat(first), weight_P1)
        parts = (token_P.split(counts), middle_PF.split(counts), weight_P1.split(counts))
        for (mlp, _), tokens, middle, weight in zip(group, *parts, strict=True):
            out = self._product(ops, mlp, middle, weight).to(out_TD.dtype)
            if out.requires_grad or out_TD.requires_grad:
                out_TD.index_add_(0, tokens, out)
            else:  # the same bits in a tenth of its time in bfloat16
                out_TD.index_copy_(0, tokens, out_TD.index_select(0, tokens) + out)

    def _add_all(self, ops: Ops, chosen_TE: Tensor, probs_TE: Tensor, own_TD: Tensor, out_TD: Tensor | None) -> Tensor:
        """One expert after the other, each on all tokens: the host waits for nothing (see `waits_for_device`)."""
        out_TD = torch.zeros_like(own_TD) if out_TD is None else out_TD
        for expert, mlp in enumerate(self.experts, self.first):
            weight_T1 = probs_TE[:, expert, None] * chosen_TE[:, expert, None]  # 0 where a token did not choose it
            x_TD = own_TD
            if self.probs_on_input:
                x_TD, weight_T1 = (own_TD * weight_T1).to(own_TD.dtype), chosen_TE[:, expert, None].to(weight_T1.dtype)
            first_TF = mlp.fc1.multiply(ops, x_TD, mlp.fc1.parameters["bias"])
            product_TD = self._product(ops, mlp, self._middle(ops, first_TF, weight_T1), weight_T1)
            out_TD += product_TD.to(out_TD.dtype)
        return out_TD

    def _middle(self, ops: Ops, first_TF: Tensor, weight_T1: Tensor) -> Tensor:
        """What fc2 multiplies, from the outputs of fc1: of one expert or several."""
        return (self.experts[0].activation.activate(ops, first_TF) * weight_T1).to(first_TF.dtype)

    @staticmethod
    def _product(ops: Ops, mlp: FusedMLP, middle_TF: Tensor, weight_T1: Tensor) -> Tensor:
        """One expert's weighted product, from what `_middle` gives."""
        out, bias = mlp.fc2.multiply(ops, middle_TF, None), mlp.fc2.parameters["bias"]
        return out if bias is None else out + bias * weight_T1

    def _grouped_backend(self, ops: Ops, dtype: torch.dtype) -> ExpertsBackend | None:
        """The backend that runs all experts at once; None where the kernels have none for these experts."""
        backend = ops.experts
        if self.experts[0].fc1.product is not None or self.probs_on_input:
            return None
        return backend if backend is not None and backend.supports(self.grouped, dtype) is None else None

    def waits_for_device(self, ops: Ops, num_tokens: int) -> bool:
        """Whether a step of so many tokens waits for the number of tokens that chose each expert.

        Not with grouped kernels. Nor where every expert may as well run on every token: reading its weights costs more
        than multiplying by them then, and some token chooses most of the experts.
        """
        if self.router.routing_type == "sinkhorn":
            return True
        if self._grouped_backend(ops, self.experts[0].fc1.weight().dtype) is not None:
            return False
        is_sparse = num_tokens * self.router.topk < DENSE_SHARE * self.router.config.num_moe_experts
        return is_sparse or num_tokens > DENSE_TOKENS

    def token_counts(self, ops: Ops) -> Sequence[int]:
        """Numbers of tokens from which on a step runs other kernels than a smaller step does."""
        dtype = self.experts[0].fc1.weight().dtype
        if (grouped := self._grouped_backend(ops, dtype)) is None:
            return ()
        return grouped.token_counts(self.router.config.num_moe_experts, self.router.topk, dtype)

    def _logits(self, ops: Ops, x_TD: Tensor) -> Tensor:
        """The router's scores of all experts, in its dtype."""
        router, weight = self.router, self.router._parameters["weight"]
        # `ops` can give a token the same bits in any batch. F.linear cannot, and may even choose another expert.
        if weight.dtype is not x_TD.dtype or self.router_dtype is torch.float64:
            logits_TE = gating_logits(router, x_TD, ops.linear)
        elif self.router_dtype in (None, x_TD.dtype):
            logits_TE = ops.linear(x_TD, weight, router.bias)
        else:
            logits_TE = ops.fp32_linear(x_TD, weight, router.bias, len(weight))
        return ops.rowwise(softmax_as_sigmoid, logits_TE) if self.softmax_scores else logits_TE

    def _grouped_choice(self, grouped: ExpertsBackend, ops: Ops, logits_TE: Tensor) -> ExpertChoice:
        """The choice in the form of grouped kernels: one of them makes it, or it is listed from that of `_choose`."""
        router = self.router
        choice = None if self.rules is None else grouped.choose(logits_TE, router.expert_bias, self.rules)
        if choice is None:
            probs_TE, chosen_TE = self._choose(ops, logits_TE)
            choice = grouped.listed(chosen_TE, probs_TE, router.topk)
        return choice

    def _choose(self, ops: Ops, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, chosen), both [T, E]: the choice that `TopKRouter.forward` makes in eval mode."""
        router, config = self.router, self.router.config
        if router.routing_type == "sinkhorn":
            return router.sinkhorn_load_balancing(logits_TE)
        route = functools.partial(
            self.route,
            topk=router.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=router.score_function,
            expert_bias=router.expert_bias,
            fused=config.moe_router_fusion,
        )
        if self.rules is None or ops.route is None:
            return ops.rowwise(route, logits_TE)
        return ops.route(logits_TE, router.expert_bias, self.rules, route)

    @property
    def has_shared_gate(self) -> bool:
        """Whether each token weighs the shared expert."""
        return self.shared_module is not None and bool(self.shared_module.use_shared_expert_gate)

    def _shared(self, step: StepInputs, x_TD: Tensor) -> Tensor:
        assert self.shared is not None
        out_TD: Tensor = self.shared.run(step, x_TD)[0]
        if self.has_shared_gate:
            weight = self.shared_module.gate_weight
            if self.shared_with_experts and self.reduce is not None:
                weight = self.reduce.spread(weight)
            gate_T1 = step.ops.linear(x_TD, weight)
            out_TD = step.ops.sigmoid_mul(out_TD, gate_T1.expand_as(out_TD).contiguous())
        return out_TD

    def linears(self) -> Iterator[FusedLinear]:
        for mlp in (*self.experts, *self._around()):
            yield from mlp.linears()

    def _around(self) -> Iterator[LayerOp]:
        """What every token goes through."""
        return (one for one in (self.down, self.up, self.shared) if one is not None)

    def weights(self) -> Iterator[Tensor]:
        yield self.router.weight
        for expert in self.experts:
            yield from expert.weights()
        for one in self._around():
            yield from one.weights()
        if self.has_shared_gate:
            yield self.shared_module.gate_weight


def _groups(experts: Sequence[FusedMLP], counts: Sequence[int]) -> list[list[tuple[FusedMLP, int]]]:
    """Experts that have pairs, in order, in groups of GROUP_PAIRS or a single expert."""
    groups: list[list[tuple[FusedMLP, int]]] = []
    held = GROUP_PAIRS
    for mlp, count in zip(experts, counts, strict=True):
        if count:
            if held + count > GROUP_PAIRS:
                groups.append([])
                held = 0
            groups[-1].append((mlp, count))
            held += count
    return groups


def _rules_of(router: TopKRouter) -> RoutingRules | None:
    """What a kernel needs to choose as the router does; None: only the router's own code does it."""
    config = router.config
    if router.routing_type == "sinkhorn" or config.moe_router_fusion:
        return None
    return RoutingRules(
        top_k=router.topk,
        score_function=router.score_function,
        pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups or 1,
        group_topk=config.moe_router_group_topk or 0,
        scaling_factor=config.moe_router_topk_scaling_factor or 0.0,
        rounds_scores=rounds_router_scores(),
    )


def chosen_ids(chosen_TE: Tensor, top_k: int) -> Tensor:
    """The ids of each row's `top_k` chosen experts, ascending -> int64 [T, K], without waiting for the device."""
    num_experts = chosen_TE.shape[1]
    # An expert that was not chosen counts as `num_experts`, which is larger than any id.
    ids_E = torch.arange(num_experts, device=chosen_TE.device)
    return torch.where(chosen_TE.bool(), ids_E, num_experts).topk(top_k, largest=False).values


def expert_ranks(moe: MoELayer) -> Any:
    """The process group that a layer's experts, and the parts of each, are spread over; None: this rank has all."""
    if group_size(moe.ep_group) * group_size(moe.experts.tp_group) == 1:
        return None
    return moe.token_dispatcher.tp_ep_group


def routing_shape(experts: Sequence[FusedExperts]) -> RoutingShape:
    """The routing of a model's mixture-of-experts layers; numbers the layers."""
    for layer, one in enumerate(experts):
        one.layer = layer
    if not experts:
        return RoutingShape(num_layers=0, top_k=0, num_experts=0)
    router = experts[0].router
    return RoutingShape(num_layers=len(experts), top_k=router.topk, num_experts=router.config.num_moe_experts)


def _refuse_unsupported(moe: MoELayer, name: str) -> None:
    """Raise AdoptionError for what would give other answers than training does, or answers that depend on the batch."""
    config = moe.config
    if type(moe.experts) is not SequentialMLP and not is_grouped_experts(moe.experts):
        raise AdoptionError(
            f"{name}.experts",
            f"{type(moe.experts).__qualname__}: SequentialMLP (moe_grouped_gemm=False) and TEGroupedMLP are supported",
        )
    for i, expert in enumerate(getattr(moe.experts, "local_experts", ())):
        if type(expert) is not MLP:
            raise AdoptionError(f"{name}.experts.local_experts.{i}", f"expert class {type(expert).__qualname__}")
    if type(moe.router) not in (TopKRouter, DeviceAgnosticRouter, SoftmaxRouter):
        raise AdoptionError(f"{name}.router", f"router class {type(moe.router).__qualname__} is not known")
    if moe.shared_experts is not None and type(moe.shared_experts) is not SharedExpertMLP:
        raise AdoptionError(f"{name}.shared_experts", f"class {type(moe.shared_experts).__qualname__} is not known")
    balancing = config.moe_router_load_balancing_type
    for kind in [balancing] if isinstance(balancing, str) else balancing:
        if kind not in ("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"):
            raise AdoptionError(f"{name}.router", f"moe_router_load_balancing_type={kind!r} is not known")
    reasons = {
        "moe_input_jitter_eps": "the router's input would be noisy in eval mode too",
        "moe_router_force_load_balancing": "the router's choice is random (a benchmark setting)",
        "moe_router_force_biased": "the router's choice is random (a benchmark setting)",
        "moe_expert_rank_capacity_factor": "tokens dropped over capacity would make an answer depend on the batch",
        "moe_mlp_glu_interleave_size": "interleaved gate and up projections are not supported",
        "moe_shared_expert_glu_interleave_size": "interleaved gate and up projections are not supported",
    }
    for field, reason in reasons.items():
        if getattr(config, field, None):
            raise AdoptionError(name, f"{field}={getattr(config, field)}: {reason}")
