"""The inputs of a recipe's passes: datasets, and the forward pass that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch.utils.data import default_collate

from instep.data.batches import Batches
from instep.data.loader import Loader, Slice
from instep.data.order import AnyOrder
from instep.data.partition.regions import HomeRegions
from instep.data.reading.streams.mixed import AnyStream
from instep.data.samples.contents import Record
from instep.data.weighted import HowSampled
from instep.engine.member import Member
from instep.errors import InstepError, RecipeError, SpecError
from instep.job.spec import JobSpec
from instep.privacy.gradients.collating import CollateApart
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.worker.reading.planned_data import PlannedData
from instep.worker.rounds.own_data import OwnData


class Inputs(NamedTuple):
    """A worker's datasets, and the forward pass that it computes with them."""

    member: Member
    forward: Forward
    train: Loader
    validate: Loader | None
    batches: Batches
    """Says what each commit takes of `train`."""

    @classmethod
    def begun(
        cls,
        member: Member,
        forward: Forward,
        own_data: OwnData | None,
        planned: PlannedData,
        home: range | None = None,
    ) -> Inputs:
        """Make the loaders, and begin to read: their processes are forked before groups exist.

        Args:
            member: this worker's membership in the run.
            forward: of the recipe.
            own_data: what participants of rounds have, where they have data of their own.
            planned: the order of `train`, and what each commit takes of it.
            home: where the samples stand that may be read before it is trained; None for all.
        """
        order: AnyOrder | HowSampled = planned.how if own_data is None else own_data.train
        if own_data is not None and home is not None:
            order = HomeRegions(own_data.train, home)
        train = _loader(member, forward.recipe, "train", order)
        validate = None
        if forward.recipe.validate is not None:
            divided = own_data.validate if own_data is not None else None
            validate = _loader(member, forward.recipe, "validate", divided)
        inputs = cls(member, forward, train, validate, planned.batches)
        for each in inputs.loaders:
            if not _reads_nothing(each.order):
                each.begin()
        with inputs.at_home():
            return inputs

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """In this context `train` reads what may be read before it is trained, from position 0."""
        order = self.train.order
        if not isinstance(order, HomeRegions):
            yield
            return
        self.train.put_in_place()
        try:
            yield
        finally:
            self.train.put_in_place(partial(_behind, order))

    @property
    def job(self) -> JobSpec:
        """The job of the run."""
        return self.member.job

    @property
    def recipe(self) -> Recipe:
        """The recipe, with the sides of a split in place of a dataset that is split."""
        return self.forward.recipe

    @property
    def loaders(self) -> list[Loader]:
        """One for each dataset."""
        return [self.train, *([self.validate] if self.validate is not None else [])]

    @property
    def stays(self) -> bool:
        """Whether each worker keeps what it reads: another part of the stream is read from its
        start."""
        stream = self.recipe.train
        return isinstance(stream, AnyStream) and not stream.has_state

    def mark(self) -> None:
        """Tell loaders which samples cannot be read."""
        for loader in self.loaders:
            loader.mark(self.member.marks)

    def close(self) -> None:
        """End all reading; a second call does nothing."""
        for loader in self.loaders:
            loader.close()

    def record(self) -> Record | None:
        """Make the file of contents of samples as steps use them, for the audit, if there is to
        be one."""
        member = self.member
        if self.job.check.content == "off" or not (member.sees_run and member.run.is_dir()):
            return None
        return Record(member.run / f"contents-{member.number}.bin")

    def warn_of_few_samples(self) -> None:
        """Warn of a dataset that is smaller than a batch, on the first worker."""
        batch, samples = self.job.train.global_batch, self.batches.samples
        if self.member.number == 0 and samples < batch:
            text = f"train.global_batch = {batch:,}, and the dataset has {samples:,} samples: "
            text += "a step takes all of them, and is an epoch."
            self.member.emit("warning", text=text)

    @property
    def pids(self) -> list[int]:
        """Ids of the reading processes."""
        return [pid for loader in self.loaders for pid in loader.pids]

    @property
    def validation_samples(self) -> int:
        """Length of the validation dataset; 0 if there is none."""
        return len(self.recipe.validate) if self.recipe.validate is not None else 0

    @property
    def first_batch(self) -> int:
        """Samples of the first batch of a validation."""
        return min(self.job.train.validation_batch, self.validation_samples)


def _loader(
    member: Member, recipe: Recipe, name: str, order: AnyOrder | HowSampled | None
) -> Loader:
    collate, processes = recipe.collate, None if member.role == "worker" else 0
    if _reads_nothing(order):  # nor is it measured how to read
        collate, processes = collate or recipe.given[name].collate or default_collate, 0
    if member.job.privacy.protects == "sample" and name == "train":
        own = collate or recipe.given[name].collate
        collate = CollateApart(own) if own is not None else None
    hidden = member.job.privacy.on or member.job.sync.sealed
    return Loader.of_job(
        member.job,
        recipe.given[name],
        "training" if name == "train" else "validation",
        order=order,
        processes=processes,  # a server reads little
        collate=collate,
        augment=recipe.augment,
        marks=member.marks,
        contents="off" if hidden else member.job.check.content,
        say=lambda text: member.emit("warning", text=f"worker {member.number}: {text}"),
        tells=True,
    )


def _reads_nothing(order: object) -> bool:
    """Whether no sample may be read before it is trained on."""
    return isinstance(order, HomeRegions) and not order.home


def _behind(order: HomeRegions, part: Slice) -> Slice:
    return part._replace(first=order.behind(part.first), stop=order.behind(part.stop))


def validation_refusals(job: JobSpec, recipe: Recipe) -> Iterator[InstepError]:
    """The reasons why a validation cannot be: one that is needed is missing, or it would predict
    where it cannot."""
    if recipe.validate is None and recipe.targets is not None:
        yield RecipeError("Recipe.targets is for metrics of a validation. Give validate too.")
    if job.mesh.stages > 1 and recipe.targets is not None:
        yield SpecError(
            f"Recipe.targets with mesh.stages = {job.mesh.stages}: the outputs that metrics "
            "compare would need a second pass through all stages. Set mesh.stages = 1, or give "
            "loss and leave targets out."
        )
