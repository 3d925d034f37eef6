"""How fast the jobs of a pool are, by the workers that they have."""
