"""Layers and losses that see the global batch whole."""
