"""The data of a recipe, as a worker of this job finds them: divided, in parts, and checked.

Way in: `RecipeData.of`. How batches are made of them is planned in `reading/planned_data.py`.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, NamedTuple

import torch

from instep.comm.base import Comm
from instep.data.lengths import ByLength
from instep.data.order import AnyOrder
from instep.data.participants import OwnRounds
from instep.data.parts.order import PartsOrder
from instep.data.reading.streams.shares import AnyTurns
from instep.data.windowed import Windowed
from instep.engine.alike import check_division, check_samples, check_shards
from instep.engine.member import Member
from instep.engine.passes import Near
from instep.errors import DataError
from instep.recipe.recipe import Recipe
from instep.words import listed
from instep.worker.reading import data_split, dataset_check
from instep.worker.reading.class_order import said_of_classes
from instep.worker.reading.planned_data import PlannedData, say_balance, say_chosen, say_lengths
from instep.worker.reading.streamed import check_stream, stream_of_worker
from instep.worker.rounds import own_data
from instep.worker.rounds.own_data import OwnData
from instep.worker.training.inputs import Inputs

if TYPE_CHECKING:
    from instep.worker.reading.parted_data import PartedData


class RecipeData(NamedTuple):
    """The data of one worker."""

    member: Member
    split: data_split.SplitData
    """The recipe, with the sides of a split in place of a dataset that is split."""
    parted: PartedData | None
    """The part that lies on this host, where a dataset lies on several."""

    @classmethod
    def of(cls, member: Member, recipe: Recipe) -> RecipeData:
        """Divide the datasets of a recipe as the job says.

        Raises:
            InstepError: they cannot be.
        """
        recipe = stream_of_worker(member, recipe)
        parted: PartedData | None = None
        if member.job.data.parts and not recipe.given["train"].streams:
            from instep.worker.reading.parted_data import PartedData  # which needs pyarrow

            parted = PartedData(member, recipe.train, recipe.validate)
        return cls(member, data_split.split_data(member.job, recipe), parted)

    def check(
        self, inputs: Inputs, planned: PlannedData, own: OwnData | None, *, hides: bool
    ) -> int | None:
        """Check the datasets and tell what was found, on the first worker of a run.

        Args:
            inputs: of the worker.
            planned: the order of the samples.
            own: of participants that have data of their own.
            hides: whether nothing may be told of single samples.

        Returns:
            A training sample that was another one when it was read again; None without one.
        """
        member, recipe, loader = self.member, self.split.recipe, inputs.train
        unrepeatable = None
        if member.others_have_state or member.number != 0:
            return None
        check_stream(member, recipe, loader)
        if not hides:
            data_split.check(self.split, member, loader, inputs.validate)
            unrepeatable = dataset_check.check_datasets(
                member, loader, inputs.validate, recipe.train
            )
            self._tell_order(planned, loader.order)
        if own is not None:
            own_data.check(own, member, recipe)
        return unrepeatable

    def _tell_order(self, planned: PlannedData, order: AnyOrder | None) -> None:
        """Tell people in which order samples come, as far as the job has chosen one."""
        member, recipe = self.member, self.split.recipe
        if member.checkpoint is None and (said := said_of_classes(member.job, recipe, order)):
            member.emit("warning", text=said)
        say_chosen(member, recipe)
        if planned.balanced:
            say_balance(member, planned)
        if planned.lengths:
            say_lengths(member, planned)

    def meet(
        self,
        comm: Comm,
        device: torch.device,
        order: AnyOrder | OwnRounds | None,
        workers: list[int],
    ) -> Near | None:
        """Find which members of a generation have which parts; all of them call it.

        Args:
            comm: the members.
            device: on which they talk.
            order: of the samples, or of the participants that have them.
            workers: number of each member.

        Raises:
            PeerError: a member went away.
        """
        if self.parted is None:
            return None
        assert isinstance(order, PartsOrder | OwnRounds), "the order of a set in parts"
        held = self.parted.meet(comm, order.lots, device)
        near = Near(order, held, self.parted.bound)
        if comm.rank == 0:
            self.member.emit(
                "parts_placed",
                sizes=[int(samples.sum()) for _, samples in order.lots],
                held={str(n): held[rank] for rank, n in enumerate(workers)},
            )
            if away := near.away():
                several = "participants" if len(away) > 1 else "participant"
                self.member.warn(
                    f"{several} {listed(away, 8)}: the host that has the data is lost, and nobody "
                    "else computes with them. Rounds go on without, until it is back."
                )
        return near

    def home(self, own: OwnData | None) -> range | None:
        """Positions that this worker may read before it trains: of participants whose data lie
        here, as far as they follow each other; None where it may read all.

        Raises:
            DataError: there are none, and nobody has tried the recipe yet.
        """
        if self.parted is None or not self.parted.bound or own is None:
            return None
        here = self.parted.holds(own.rounds.lots)
        if not any(here):
            if not self.member.others_have_state:
                raise DataError(
                    f"worker {self.member.number} on {platform.node()} has the data of no "
                    "participant, and with sync.options.secure_sums and data.parts each is "
                    "computed where its data lie. Copy the shards of one there, or start fewer "
                    "workers."
                )
            return range(0)
        first = here.index(True)
        last = here.index(False, first) if False in here[first:] else len(here)
        return range(*own.train.offsets[[first, last]].tolist())

    def tell_given(self, step: int) -> None:
        """Tell, at the end of an epoch, what others got of the parts that lie here, and copies."""
        if self.parted is None:
            return
        own, (samples, size) = self.member.number, self.parted.given
        self.member.emit("samples_given", worker=own, step=step, samples=samples, bytes=size)
        if self.member.job.data.copies > 1:
            shards, size = self.parted.copied
            self.member.emit("shards_copied", worker=own, step=step, shards=shards, bytes=size)

    def close(self) -> None:
        """Close the door to other hosts, if there is one; a second call does nothing."""
        if self.parted is not None:
            self.parted.close()


def check_order(
    comm: Comm, device: torch.device, order: AnyOrder | None, own: OwnData | None
) -> None:
    """Refuse members that found other datasets than the others; all of them call it.

    Raises:
        InstepError: some did.
        PeerError: a member went away.
    """
    if own is not None:
        check_division(comm, device, own.train.digest)
    if isinstance(order, Windowed | PartsOrder | AnyTurns):
        check_shards(comm, device, order.digest)
    if isinstance(order, ByLength):
        check_samples(comm, device, order.digest)
