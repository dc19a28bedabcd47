"""Tensors in 8 bits and what makes them: attributes of the real ones, codes of torch's float8_e4m3fn."""

import math

import torch

MAX = 448.0


def _blocks(shape, block):
    return [math.ceil(size / of) for size, of in zip(shape, block, strict=True)]


def _spread(scale, block, shape):
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _amax_of_blocks(x, block):
    rows, columns = _blocks(x.shape, block)
    padded = x.new_zeros(rows * block[0], columns * block[1])
    padded[: x.shape[0], : x.shape[1]] = x.abs()
    return padded.view(rows, block[0], columns, block[1]).amax((1, 3))


class Quantizer:
    kind = None

    def __init__(self, *, rowwise=True, columnwise=True):
        self.rowwise_usage, self.columnwise_usage, self.internal = rowwise, columnwise, False

    def set_usage(self, *, rowwise=None, columnwise=None):
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def codes(self, x):
        """(codes, inverse scales that `spread` lays over them) of a matrix."""
        raise NotImplementedError

    def quantize(self, tensor, *, out=None, dtype=None):
        if out is not None:
            return self.update_quantized(tensor, out)
        assert self.rowwise_usage
        codes, scale_inv = self.codes(tensor.detach().flatten(0, -2))
        held = (codes.view(tensor.shape), scale_inv, tensor.dtype)
        if self.internal:
            return Storage(self.kind, *held)
        made = self.kind.make(*held)
        made._quantizer = self
        return made

    __call__ = quantize

    def update_quantized(self, src, dst, *, noop_flag=None):
        assert type(dst) is self.kind, f"cannot store it in {type(dst)}"
        codes, scale_inv = self.codes(src.detach().flatten(0, -2))
        for kept, fresh in zip(dst.held(), (codes.view(src.shape), scale_inv), strict=True):
            kept.numpy()[...] = fresh.numpy()  # as a kernel writes: no version is counted
        return dst


class Storage:
    """What a quantiser gives for internal use: no torch.Tensor."""

    def __init__(self, kind, codes, scale_inv, dtype):
        self.kind, self.codes, self.scale_inv, self.fake_dtype = kind, codes, scale_inv, dtype

    def dequantize(self):
        return self.kind.decode(self.codes, self.scale_inv).to(self.fake_dtype)


class QuantizedTensor(torch.Tensor):
    names = ("", "")
    block = None

    @classmethod
    def make(cls, codes, scale_inv, dtype, requires_grad=False):
        self = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device, requires_grad=requires_grad
        )
        for name, held in zip(cls.names, (codes, scale_inv), strict=True):
            setattr(self, name, held)
        return self

    @classmethod
    def decode(cls, codes, scale_inv):
        block = cls.block if scale_inv.shape[0] != codes.shape[0] else (1, cls.block[1]) if cls.block else None
        return codes.view(torch.float8_e4m3fn).float() * (
            scale_inv if block is None else _spread(scale_inv, block, codes.shape)
        )

    def held(self):
        return tuple(getattr(self, name) for name in self.names)

    def dequantize(self, *, dtype=None):
        return self.decode(*self.held()).to(dtype or self.dtype)

    def quantize_(self, tensor):
        self._quantizer.update_quantized(tensor, self)
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            twin = args[0].make(*args[0].held(), args[0].dtype)
            twin._quantizer = args[0]._quantizer
            return twin
        if func is torch.ops.aten.copy_.default:
            source = args[1].dequantize() if isinstance(args[1], QuantizedTensor) else args[1]
            return args[0].quantize_(source.to(args[0].dtype))
        plain = [arg.dequantize() if isinstance(arg, QuantizedTensor) else arg for arg in args]
        out = func(*plain, **(kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], QuantizedTensor):
            return args[0].quantize_(plain[0])
        return out


class Float8Tensor(QuantizedTensor):
    names = ("_data", "_scale_inv")


class Float8BlockwiseQTensor(QuantizedTensor):
    names = ("_rowwise_data", "_rowwise_scale_inv")
    block = (128, 128)


class MXFP8Tensor(QuantizedTensor):
    names = ("_rowwise_data", "_rowwise_scale_inv")
    block = (1, 32)


def _encode(x, scale):
    return (x.float() * scale).clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)


class Float8Quantizer(Quantizer):
    kind = Float8Tensor

    def __init__(self, scale, amax, fp8_dtype, *, rowwise=True, columnwise=True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def codes(self, x):
        self.amax.copy_(torch.maximum(self.amax, x.abs().max().float()))
        return _encode(x, self.scale), (1 / self.scale).reshape(1)


class Float8CurrentScalingQuantizer(Quantizer):
    kind = Float8Tensor

    def __init__(self, fp8_dtype, device, *, rowwise=True, columnwise=True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.force_pow_2_scales, self.amax_epsilon = fp8_dtype, False, 0.0

    def codes(self, x):
        scale = MAX / x.abs().max().float().clamp(min=1e-12)
        return _encode(x, scale), (1 / scale).reshape(1)


class Float8BlockQuantizer(Quantizer):
    kind = Float8BlockwiseQTensor

    def __init__(self, fp8_dtype, *, rowwise, columnwise, force_pow_2_scales, block_scaling_dim):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.force_pow_2_scales, self.block_scaling_dim = fp8_dtype, force_pow_2_scales, block_scaling_dim

    def codes(self, x):
        block = (1, 128) if self.block_scaling_dim == 1 else (128, 128)
        scale = torch.exp2(torch.floor(torch.log2(MAX / _amax_of_blocks(x, block).float().clamp(min=1e-12))))
        return _encode(x, _spread(scale, block, x.shape)), 1 / scale


class MXFP8Quantizer(Quantizer):
    kind = MXFP8Tensor

    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype

    def codes(self, x):
        assert x.shape[0] % 32 == x.shape[1] % 32 == 0, f"MXFP8 needs multiples of 32, got {list(x.shape)}"
        scale = torch.exp2(torch.floor(torch.log2(MAX / _amax_of_blocks(x, (1, 32)).float().clamp(min=1e-12))))
        return _encode(x, _spread(scale, (1, 32), x.shape)), 1 / scale
