"""Hosts and links in the JSON of a plan, for the next one.

Ways in: `machines_table`, `read_machines`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from instep.errors import SpecError
from instep.plain_file import read_plain
from instep.plan.machine import HostLink, Machines

_Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class _MachineTable(Struct):
    hosts: _Count
    host_cores: _Count
    bits_per_s: Annotated[float, Meta(ge=1.0)] | None = None
    latency_s: Annotated[float, Meta(ge=0.0)] | None = None
    emulated: bool = False
    speeds: list[Annotated[float, Meta(gt=0.0)]] = []


def machines_table(machines: Machines) -> dict[str, Any]:
    """Plain data."""
    link = machines.link
    return {
        "hosts": machines.hosts,
        "host_cores": machines.cores,
        "bits_per_s": link.bits_per_s if link else None,
        "latency_s": link.latency_s if link else None,
        "emulated": machines.emulated,
        "speeds": list(machines.speeds),
    }


def read_machines(file: Path) -> Machines:
    """The machines of an earlier plan: what `instep plan --json` printed, or its `machine`.

    Raises:
        SpecError: it has none, or such as there cannot be.
    """
    try:
        found = msgspec.json.decode(read_plain(file), type=dict[str, Any])
        table = found.get("machine", found)
        for key in ("hosts", "host_cores") if isinstance(table, dict) else ():
            if key not in table:
                raise ValueError(f"it says no {key!r}")
        told = msgspec.convert(table, _MachineTable)
        if told.speeds and len(told.speeds) != told.hosts:
            raise ValueError(f"{len(told.speeds)} speeds for {told.hosts} hosts")
    except OSError as error:
        raise SpecError(
            f"--machine {file}: it cannot be read: {error.strerror or error}. Give a file with "
            "what `instep plan --json` printed."
        ) from None
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"--machine {file}: it is not what `instep plan --json` prints ({error})."
        ) from None
    link = None
    if told.bits_per_s is not None:
        latency_s = (
            HostLink._field_defaults["latency_s"] if told.latency_s is None else told.latency_s
        )
        link = HostLink(told.bits_per_s, latency_s)
    return Machines(told.hosts, told.host_cores, link, told.emulated, tuple(told.speeds))
