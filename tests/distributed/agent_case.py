"""examples/generate.py that tells when it draws tokens, slowly, and waits less: agent_case.py MARKER TIMEOUT_S [ARGS]

Creates the file MARKER.RANK once ten steps are done; steps take 20 ms more; collective_timeout_s is TIMEOUT_S.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    marker, timeout_s = Path(f"{sys.argv.pop(1)}.{os.environ['RANK']}"), float(sys.argv.pop(1))
    path = Path(__file__).parents[2] / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    machine_config, make_engine = example.machine_config, example.DynamicInferenceEngine

    def impatient(asked: dict[str, Any], *args: Any, **options: Any) -> Any:
        return machine_config({**asked, "collective_timeout_s": timeout_s}, *args, **options)

    class Telling(make_engine):
        def step(self) -> Any:
            time.sleep(0.02)
            if self.num_steps == 10:
                marker.touch()
            return super().step()

    example.machine_config, example.DynamicInferenceEngine = impatient, Telling
    return example.main()


if __name__ == "__main__":
    sys.exit(main())
