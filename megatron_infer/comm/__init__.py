"""Process groups, and the ranks of one engine in lockstep: links, heartbeats, agreement on every call."""
