"""Run an unmodified script of Megatron on this engine: python -m megatron_infer.mcore SCRIPT [its arguments]."""

from __future__ import annotations

import os
import runpy
import sys

from megatron_infer.mcore import install


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
