"""The model of a checkpoint as a file or folder of its own, for others."""
