"""A stand-in in plain torch for the package of this name."""

import torch


def hadamard_transform(x, scale=1.0):
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.float() @ matrix[: x.shape[-1], : x.shape[-1]] * scale).to(x.dtype)
