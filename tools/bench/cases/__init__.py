"""The cases of tools/bench/variants.py."""
