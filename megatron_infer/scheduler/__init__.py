"""What each step computes: requests, step plans and the scheduler. Pure Python; ids only, no tensors."""
