"""A worker's data: divided, checked, and read by processes that are watched."""
