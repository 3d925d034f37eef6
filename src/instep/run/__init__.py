"""The two roles of a run: the master, which decides, and the workers, which compute."""
