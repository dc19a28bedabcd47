"""Settings of the process: how OpenMP threads wait, when Python's garbage collector runs."""
