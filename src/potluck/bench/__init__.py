"""Comparisons on one job: tasks, their division between clients, an outside reference, and pictures of results."""
