"""The hosts of a run, as its master sees them."""
