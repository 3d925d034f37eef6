"""A replica that is a mesh of processes, and what its processes agree on."""
