"""Layers with 2:4 weights, and what takes part in making them of dense ones."""
