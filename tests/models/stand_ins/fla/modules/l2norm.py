import torch


def l2norm(x, eps=1e-6, output_dtype=None):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(output_dtype or x.dtype)
