import torch


class Float8Tensor(torch.Tensor):
    """A tensor kept in 8 bits."""
