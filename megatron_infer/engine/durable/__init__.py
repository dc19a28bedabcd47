"""Requests that outlive their process: saved to a file, loaded from it, kept by snapshots and a journal."""
