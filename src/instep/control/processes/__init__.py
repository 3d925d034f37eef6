"""The processes of a run: who is there, who may come in, what they say, and whether they live."""
