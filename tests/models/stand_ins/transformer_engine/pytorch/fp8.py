import contextlib


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled():
        return False


def fp8_autocast(*args, **options):
    return contextlib.nullcontext()
