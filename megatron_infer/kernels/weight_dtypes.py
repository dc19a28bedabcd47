"""What packed copies of linear weights may be rounded to (native/int8.cpp, int4.cpp), beside a model's own dtype."""

WEIGHT_DTYPE_BYTES = {"int8": 34 / 32, "int4": 20 / 32}
"""weight_dtype -> bytes of a weight: its code, and its share of what a block of 32 has in fp16, a scale and in int4 a
minimum."""
