"""Messages between the processes of a run, and the connections that carry them."""
