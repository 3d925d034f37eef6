"""How much memory this process may still take: its own limits, those of its cgroup, the machine's.

Limits of a process are set with `ulimit` or `prlimit`, those of a cgroup by containers, Slurm and
systemd.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def room(processes: int, cgroups: Path = _CGROUPS, *, shared: bool = False) -> int:
    """Bytes that this process may still take.

    Args:
        processes: how many like it run on this machine, and share what they share.
        cgroups: where the kernel shows the limits of cgroups.
        shared: whether it is for memory that several processes map, which does not count as data
            of one.
    """
    used = _table(Path("/proc/self/status"))
    limits = [(resource.RLIMIT_AS, "VmSize")]
    limits += [] if shared else [(resource.RLIMIT_DATA, "VmData")]
    own = [
        limit - used[name]
        for kind, name in limits
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    machine = [_table(Path("/proc/meminfo"))["MemAvailable"], *_left_in_cgroups(cgroups)]
    return max(0, min([*own, *(each // processes for each in machine)]))


def _table(file: Path) -> dict[str, int]:
    """Lines such as `VmData:  123 kB`, in bytes."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}


def _left_in_cgroups(cgroups: Path) -> Iterator[int]:
    """What each limit on this process's cgroup, and on those around it, leaves."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            root, limit, usage, cached = cgroups, "memory.max", "memory.current", "file"
        elif "memory" in kinds.split(","):
            root, limit, usage = (
                cgroups / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
            cached = "total_cache"
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            left = _left(folder, limit, usage, cached) if folder.is_relative_to(root) else None
            if left is not None:
                yield left


def _left(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    """None where it has no limit. Cached files count as free: the kernel drops them first."""
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # the root has no such files
        return None
    shared = int(rows.get("shmem", rows.get("total_shmem", 0)))
    return int(most) - used + int(rows.get(cached, 0)) - shared if most.isdigit() else None
