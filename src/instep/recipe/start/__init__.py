"""The file, folder or URL that a run starts from."""
