"""A worker's door to samples that lie on its host, and its way to those of other hosts.

With `data.parts` each worker looks which shards of its datasets lie in their folders, and tells the
others: before it reads anything, by way of the master, and again when a group forms. So all members
know who has what, and with `data.copies` which host copies what. With `secure_sums` nobody is given
samples: a participant is computed where its data lie. Way in: `PartedData`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.data.parts.near import Held
from instep.data.shard_sizes import Lot
from instep.data.shards.hosts import peers
from instep.data.shards.hosts.board import Board, HeldShards, PeerDoor
from instep.data.shards.hosts.copies import Copier, to_copy
from instep.data.shards.hosts.door import OpenDoor
from instep.data.shards.sets import sets_in
from instep.engine.member import Member
from instep.errors import DataError
from instep.words import listed, plural

LOOK_S = 0.1
"""Pauses between two looks who else is there."""

KEYS = "doors"


class PartedData:
    """Tells what lies where.

    Args:
        member: this worker's membership in the run.
        datasets: those of its recipe.

    Raises:
        DataError: some shard is on no host, or other workers have other manifests; or samples to
            validate on are not here, and nobody gives them.
        Released: the run does not need this worker.
    """

    bound = False
    """Whether samples stay on their hosts."""

    def __init__(self, member: Member, *datasets: Any) -> None:
        self._member = member
        found = [each for dataset in datasets for each in sets_in(dataset)]
        self._sets = {each.manifest.sha256: each for each in found}
        self._train = next(sets_in(datasets[0]), None)
        token, shown = member.token, member.credentials
        if member.job.sync.sealed and self._train is not None:
            self.bound = not self._train.reads_elsewhere
        given = {} if self.bound and member.job.data.copies < 2 else self._sets
        self._open = OpenDoor(member.outside, given, token, shown)
        self._board = Board()
        self._peers = peers.NoPeers() if self.bound else peers.Peers(self._board, token, shown)
        peers.use(self._peers)
        self._copies_peers = peers.Peers(self._board, token, shown)  # else training would wait
        self._copiers = self._made_copiers()
        own = self._told()
        self._check_validation(own)
        if self._train is not None and not (any(own.holdings[0].shards) or self.bound):
            member.warn(
                f"worker {member.number} on {own.node} has no shard in {self._train.folder}: all "
                "that it computes comes over the network."
            )
        with member.during("meeting"):
            self._wait(msgspec.msgpack.encode(own))

    def _told(self) -> PeerDoor:
        """List what lies here now."""
        holdings = [
            HeldShards(sha256, str(each.folder), each.held) for sha256, each in self._sets.items()
        ]
        return PeerDoor(self._member.number, platform.node(), *self._open.address, holdings)

    def _check_validation(self, own: PeerDoor) -> None:
        for sha256, each in self._sets.items() if self.bound else ():
            shards = range(len(each.manifest.shards))
            whole = each is self._train or each.reads_elsewhere
            if not (whole or all(own.has(sha256, number) for number in shards)):
                raise DataError(
                    f"{each.folder} on {own.node} has not all shards to validate on, and with "
                    "sync.options.secure_sums and data.parts no host gives another one samples. "
                    "Copy it whole to every host, or give shards() a source."
                )

    def _leave(self) -> None:
        """Tell workers that start later what lies here now."""
        own = msgspec.msgpack.encode(self._told())
        self._member.run_store.set(f"{KEYS}/{self._member.number}", own)

    def _made_copiers(self) -> dict[str, Copier]:
        """One for each dataset that lies in a folder; none without `data.copies`."""
        if self._member.job.data.copies < 2:
            return {}
        return {
            sha256: Copier(
                Path(each.folder),
                each.manifest.shards,
                partial(self._copies_peers.bytes_of, sha256),
                self._leave,
                self._member.warn,
            )
            for sha256, each in self._sets.items()
            if isinstance(each.folder, Path)
        }

    def _wait(self, own: bytes) -> None:
        """Wait until every shard lies with somebody who is there."""
        member = self._member
        while True:
            left = member.run_store.share(KEYS, own).values()
            doors = [msgspec.msgpack.decode(each, type=PeerDoor) for each in left]
            self._board.write([door for door in doors if door.worker != member.number])
            missing = next(self._missing(doors), None)
            if missing is None or (self.bound and member.others_have_state):
                break  # rounds go on without those whose host is lost
            if len(doors) >= member.job.workers:
                raise DataError(missing)
            time.sleep(LOOK_S)

    def _missing(self, doors: list[PeerDoor]) -> Iterator[str]:
        """A sentence for each dataset of which shards lie nowhere."""
        for sha256, dataset in self._sets.items():
            shards, elsewhere = dataset.manifest.shards, dataset.reads_elsewhere
            gone = [n for n in range(len(shards)) if not any(d.has(sha256, n) for d in doors)]
            if elsewhere or not gone:
                continue
            folder = str(dataset.folder)
            others = [
                f"worker {door.worker} on {door.node}"
                for door in doors
                if any(h.folder == folder and h.dataset != sha256 for h in door.holdings)
            ]
            if others:
                yield (
                    f"{folder}/manifest.json of worker {self._member.number} is another than that "
                    f"of {listed(others, 4)}: parts are of one prepared dataset. Copy its manifest "
                    "to every host, and of the shards those that are to lie there."
                )
            names = [shards[number].file for number in gone]
            yield (
                f"{plural(len(gone), 'shard')} of {folder} ({listed(names, 4)}) "
                f"{'lie' if len(gone) > 1 else 'lies'} on none of the hosts of the run. Copy "
                f"{'them' if len(gone) > 1 else 'it'} to one of them; or name another place that "
                "has all: shards(folder, source=URL)."
            )

    def holds(self, lots: Sequence[Lot]) -> list[bool]:
        """Whether all samples of a part, or of a participant, lie here: of each.

        Args:
            lots: where they stand.
        """
        if self._train is None:
            return [False] * len(lots)
        own, name = self._told(), self._train.manifest.sha256
        return [all(own.has(name, int(number)) for number in numbers) for numbers, _ in lots]

    @property
    def given(self) -> tuple[int, int]:
        """Samples and bytes that other workers have got here so far."""
        return self._open.samples, self._open.bytes

    def meet(self, comm: Comm, lots: Sequence[Lot], device: torch.device) -> Held:
        """Ask what lies with the members of a group; all of them call it.

        Args:
            comm: the group.
            lots: where the samples of each part of the training set stand, or of each participant.
            device: on which tensors of the group are.
        """
        own = msgspec.msgpack.encode(self._told())
        doors = [msgspec.msgpack.decode(each, type=PeerDoor) for each in _all(comm, own, device)]
        self._board.write([door for door in doors if door.worker != self._member.number])
        name = self._train.manifest.sha256 if self._train is not None else ""
        shards = len(self._train.manifest.shards) if self._train is not None else 0
        held = []
        for door in doors:
            has = [number for number in range(shards) if door.has(name, number)]
            held.append([int(samples[np.isin(numbers, has)].sum()) for numbers, samples in lots])
        self._copy(doors, [numbers.tolist() for numbers, _ in lots])
        return held

    def _copy(self, doors: list[PeerDoor], lots: list[list[int]]) -> None:
        """Begin this worker's copies, if it is the first of its host."""
        for sha256, copier in self._copiers.items():
            train = self._sets[sha256] is self._train
            every = [[number] for number in range(len(self._sets[sha256].manifest.shards))]
            wanted = to_copy(doors, sha256, lots if train else every, self._member.job.data.copies)
            copier.want(wanted.get(self._member.number, ()))

    @property
    def copied(self) -> tuple[int, int]:
        """Shards and bytes that this worker has copied to its host so far."""
        made = self._copiers.values()
        return sum(each.shards for each in made), sum(each.bytes for each in made)

    def close(self) -> None:
        """Give nothing and copy nothing any more; a second call does nothing."""
        for copier in self._copiers.values():
            copier.close()
        self._open.close()
        self._peers.close()
        self._copies_peers.close()


def _all(comm: Comm, own: bytes, device: torch.device) -> list[bytes]:
    """Collect what each rank gives, in rank order."""
    lengths = torch.zeros(comm.size, dtype=torch.int64, device=device)
    comm.all_gather(lengths, torch.tensor([len(own)], device=device)).wait()
    each = int(lengths.max())
    padded = own + bytes(each - len(own))
    part = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    out = torch.empty(comm.size * each, dtype=torch.uint8, device=device)
    comm.all_gather(out, part).wait()
    rows: Tensor = out.to("cpu").view(comm.size, each)
    return [
        row.numpy().tobytes()[:length] for row, length in zip(rows, lengths.tolist(), strict=True)
    ]
