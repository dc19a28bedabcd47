"""`python -m megatron_infer` is the `megatron-infer` command."""

import sys

from megatron_infer.cli.main import main

sys.exit(main())
