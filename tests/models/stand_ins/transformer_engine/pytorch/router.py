"""Fused routing: kernels of a GPU, which a configuration asks for by name (moe_router_fusion)."""


def _on_a_gpu(*args, **options):
    raise NotImplementedError("on a GPU")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = _on_a_gpu
