def cast_to_fp8(*args, **options):
    raise NotImplementedError("on a GPU")
