"""What brings processes up: the table of launchers.

To add one: write a class that keeps the promises of `base.Launcher` in a file
of its own, and add its line here.
"""

from instep.registry import Registry

LAUNCHERS = Registry(
    "launcher",
    {
        "local": "instep.launch.local:LocalLauncher",
        "by_hand": "instep.launch.by_hand:ByHandLauncher",
        "pool": "instep.launch.pooled.launcher:PoolLauncher",
        "hosts": "instep.launch.hosts:HostsLauncher",
        "ray": "instep.launch.ray.launcher:RayLauncher",
        "slurm": "instep.launch.slurm:SlurmLauncher",
    },
)
