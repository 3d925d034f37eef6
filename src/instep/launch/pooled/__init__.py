"""The hosts of a pool as a launcher. Way in: `launcher.PoolLauncher`."""
