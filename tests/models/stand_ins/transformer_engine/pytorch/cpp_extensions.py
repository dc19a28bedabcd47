import torch


def cast_to_fp8(*args, **options):
    raise NotImplementedError("on a GPU")


def general_gemm(A, B, workspace, out_dtype=None, quantization_params=None, bias=None, use_split_accumulator=False):
    """B @ A.T of quantised operands; what cuBLAS asks of their shapes is asked here."""
    assert isinstance(workspace, torch.Tensor)
    left, right = B.dequantize().float(), A.dequantize().float()
    for operand in (left, right):
        assert operand.shape[0] % 8 == operand.shape[1] % 16 == 0, f"FP8 takes no {list(operand.shape)}"
    assert bias is None or bias.dtype is (torch.bfloat16 if out_dtype is torch.float32 else out_dtype)
    out = left @ right.T
    return (out if bias is None else out + bias.float()).to(out_dtype), None, None, None
