"""Optimizers and schedulers with conventions of their own."""
