"""The loop of a worker: it forms groups, runs steps, and does what follows a commit."""
