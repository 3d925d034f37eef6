"""From a plan to processes: client, master, worker, and what starts them."""
