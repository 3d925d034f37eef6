"""The hosts of a pool: who works where, and the machines on both ends."""
