"""Process groups, and the ranks of one engine in lockstep: connections, heartbeats, agreement on every call."""
