"""Parts of tools/bench/speed_of_light.py: what a device can do at most, and how near the engine comes to it."""
