"""Debugging tools: recording and replay of runs, reports on the environment."""
