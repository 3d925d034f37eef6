"""Comparisons of passes: their numbers, their buffers, and the layer that makes a difference."""
