"""More than one process: groups, lockstep, and the coordinator that spreads requests over replicas."""
