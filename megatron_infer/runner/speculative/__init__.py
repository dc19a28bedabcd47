"""Speculative decoding: tokens are proposed, verified in one step and kept where they equal what is drawn."""
