"""The optimizers of a run with servers: each server moves its part of the parameters."""
