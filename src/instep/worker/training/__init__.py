"""Training a recipe in one worker. Way in: `training.Training`."""
