"""The control plane on a virtual clock and network: see `run.py` for the command."""
