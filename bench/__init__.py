"""Drivers of the figures in RESULTS.md; each prints one JSON object as its last line."""
