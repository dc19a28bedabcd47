"""Process groups, and the ranks of one engine in lockstep: connections, heartbeats, agreement on every call.

`wire` carries control messages between all processes of an engine or a server.
"""
