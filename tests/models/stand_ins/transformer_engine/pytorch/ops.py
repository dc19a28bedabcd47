"""Names that annotations of megatron-core ask for; nothing is built of them."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
