"""Gradients of single samples: clipped one by one, as whole numbers on a grid, then added up."""
