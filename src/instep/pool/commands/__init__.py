"""Plain commands as jobs of a pool, and all that they start."""
