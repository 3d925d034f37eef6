"""How tensors and messages move between processes."""
