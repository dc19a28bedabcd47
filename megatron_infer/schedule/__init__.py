"""What runs next: requests, plans and the scheduler. Pure Python; knows ints, never tensors."""
