"""The files that a state is saved in: each checked when it is read, sealed when written."""
