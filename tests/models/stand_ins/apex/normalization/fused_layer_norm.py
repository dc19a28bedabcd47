import torch.nn.functional as F


class FusedLayerNormAffineFunction:
    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps):
        return F.layer_norm(x, shape, weight, bias, eps)

    @classmethod
    def apply(cls, *args):
        return cls.forward(None, *args)
