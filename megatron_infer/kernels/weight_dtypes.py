"""What packed copies of linear weights may be rounded to (native/int8.cpp, int4.cpp), beside a model's own dtype."""

WEIGHT_DTYPE_BYTES = {"int8": 34 / 32, "int4": 20 / 32}
"""weight_dtype -> bytes of a weight: its code, and its share of what a block of 32 has in fp16, a scale and in int4 a
minimum."""
OUTPUT_DTYPE = "int8"
"""That of the output layer with each of them: its rounding shows most, and 4-bit files keep more bits of it, too."""


def weight_bytes(weight_dtype: str, num_weights: int, num_output: int) -> int:
    """Bytes of the copies of `num_weights` weights, `num_output` of them of the output layer."""
    layers = (num_weights - num_output) * WEIGHT_DTYPE_BYTES[weight_dtype]
    return int(layers + num_output * WEIGHT_DTYPE_BYTES[OUTPUT_DTYPE])
