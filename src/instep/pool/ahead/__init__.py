"""Looks ahead in a pool: when its jobs start and end."""
