"""Samplers of a `DataLoader`, taken for what they mean: what they ask for, and orders of it."""
