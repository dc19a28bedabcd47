"""Settings of the process: waiting of OpenMP threads, Python's garbage collector, logging."""
