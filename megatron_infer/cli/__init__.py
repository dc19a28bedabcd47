<<<<<<< HEAD
"""The `megatron-infer` command: one module a subcommand, each with `add_parser(subparsers)` and `run(args) -> int`."""
=======
"""The command line: one module a command, each with `add_parser(subparsers)` and `run(args) -> exit code`."""
>>>>>>> main
