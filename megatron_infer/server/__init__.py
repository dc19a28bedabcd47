"""The text-generation server: HTTP in front of a coordinator. No torch: `pip install 'megatron-infer[server]'`."""
