"""Devices that train one model together: plans, the walk, and the processes that run it."""
