"""A package whose recipe trains on a stream: `spelling.training.recipe`."""
