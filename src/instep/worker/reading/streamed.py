"""A recipe's stream as a job divides it: how many parts it has, and how long an epoch is.

A stream that ends is counted before the first step of a run with `train.epochs`: each part is read
once. With `train.steps` nothing is counted, and a part that ends begins again. Ways in:
`with_stream`, `stream_of_worker`, `check_stream`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from instep.data.loader import Loader, Slice
from instep.data.reading.streams.part import GivenStream
from instep.data.reading.streams.stream import HEADS, LENGTHS, Stream, is_stream
from instep.data.reading.streams.turns import READ_AHEAD, StreamPlan
from instep.data.torch_loader import LoaderParts
from instep.engine.member import Member
from instep.errors import DataError, InstepError, RecipeError, SpecError, raise_first
from instep.job.spec import JobSpec
from instep.plain_file import replace_plain
from instep.recipe.recipe import Recipe
from instep.store.run_folder import RunFolder
from instep.sync import clashes
from instep.words import plural

FOLDER, _LENGTHS_FILE = "streams", "lengths"

_MOST = 1 << 40
"""Samples of a part whose end is not known."""


def with_stream(job: JobSpec, recipe: Recipe, run: Path | None = None, writer: int = 0) -> Recipe:
    """The recipe with its stream as the job divides it; unchanged, where it trains on no stream.

    Args:
        job: of the run.
        recipe: as the user's function returned it.
        run: the folder of the run, for what others continue from; None where there is none.
        writer: number of this process there.

    Raises:
        SpecError: the job asks for what a stream does not have.
        DataError: its samples cannot be counted.
    """
    parts = recipe.given["train"]
    if not is_stream(parts.dataset):
        if job.data.parts and job.data.order != "windowed":
            raise SpecError(
                f"data.parts = {job.data.parts} with data.order = {job.data.order!r} is for a "
                "stream, and Recipe.train is none. Set data.order = 'windowed', or leave "
                "data.parts out."
            )
        return recipe
    raise_first(refusals(job, recipe))
    given = GivenStream(parts.dataset, parts.worker_init)
    number = job.data.parts or parts.loaders or 1
    mixed = job.data.order != "dataset"
    window = max(1, job.data.window // number) if mixed else READ_AHEAD
    folder = run / FOLDER if run is not None else None
    if job.train.steps is not None:
        samples = job.train.steps * job.per_commit.global_batch
        plan = StreamPlan(number, window, mixed, None, samples)
    else:
        unknown = StreamPlan(number, window, mixed, (_MOST,) * number, _MOST)
        sizes = _lengths(job, parts, unknown, folder)
        plan = StreamPlan(number, window, mixed, tuple(sizes), sum(sizes))
        if not plan.samples:
            raise DataError(
                f"the stream of Recipe.train ({type(parts.dataset).__name__}) has no sample."
            )
    stream = Stream(given, plan, job.seed, folder, writer)
    return recipe.with_data({**recipe.given, "train": _read_so(parts, stream)})


def _read_so(parts: LoaderParts, stream: Stream) -> LoaderParts:
    return parts._replace(dataset=stream, worker_init=None)


def stream_of_worker(member: Member, recipe: Recipe) -> Recipe:
    """Do so in a worker, which keeps in the run's folder from where others can continue."""
    if not recipe.given["train"].streams:
        return with_stream(member.job, recipe)
    run = member.run if member.sees_run else None
    return with_stream(member.job, recipe, run, member.number)


def refusals(job: JobSpec, recipe: Recipe) -> Iterator[InstepError]:
    """The reasons why a job cannot train on a stream."""
    data = job.data
    yield from clashes.refusals(job, recipe)
    if data.split:
        yield SpecError(
            f"data.split = {data.split!r} does not go with a stream: a split needs to know of "
            "every sample. Give Recipe(validate=...), and leave it out."
        )
    if data.unreadable == "skip":
        yield SpecError(
            "data.unreadable = 'skip' does not go with a stream: an iterator that has raised "
            "cannot go on. Catch the error in __iter__, and leave it out."
        )
    if recipe.fit is not None:
        yield RecipeError(
            "Recipe.fit does not go with a stream: it is given the indices of all samples. Leave "
            "it out, and compute beforehand what it learns."
        )


def _lengths(job: JobSpec, parts: LoaderParts, plan: StreamPlan, folder: Path | None) -> list[int]:
    """Samples of each part, of an earlier process of the run or counted here."""
    file = folder / _LENGTHS_FILE if folder is not None else None
    if file is not None:
        with suppress(OSError, msgspec.MsgspecError):
            known = msgspec.json.decode(file.read_bytes(), type=list[int])
            if len(known) == plan.parts:
                return known
    stream = Stream(GivenStream(parts.dataset, parts.worker_init), plan, job.seed)
    loader = Loader.of_job(job, _read_so(parts, stream), "training", say=lambda text: None)
    with closing(loader):
        found: list[int] = []
        while not found:
            found = loader.ask(Slice(*LENGTHS))
    if file is not None and folder is not None:
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            replace_plain(file, msgspec.json.encode(found))
    return found


def check_stream(member: Member, recipe: Recipe, train: Loader) -> None:
    """Log how a stream is divided; refuse one that cannot be continued, or does not divide itself.

    Raises:
        DataError: it cannot, or does not; or it is divided otherwise than when the run was started.
    """
    stream = recipe.train
    if not isinstance(stream, Stream):
        return
    plan = stream.plan
    told = {
        "parts": plan.parts,
        "window": plan.window if plan.mixed else 0,
        "sizes": list(plan.sizes or ()),
    }
    if member.checkpoint is not None:
        before = RunFolder(member.run).last("stream_divided")
        for field, value in told.items():
            if before and before[field] != value:
                raise DataError(
                    f"the stream had {field} = {before[field]} when the run was started and has "
                    f"{value} now, so other samples would come. Put data.parts, train.steps and "
                    "the data back as they were; or start a new run from the model of this one: "
                    f"--set start.model={member.run}"
                )
        return
    *heads, again = train.ask(Slice(*HEADS))
    _check_heads(plan.parts, heads, again)
    member.emit("stream_divided", **told, has_state=stream.given.has_state)


def _check_heads(parts: int, heads: list[list[int]], again: list[int]) -> None:
    """Refuse a stream by how its parts begin, and the first one when it is read again."""
    if heads[0] != again:
        raise DataError(
            "the stream of Recipe.train gives other samples when it is read again, so a run that "
            "loses a process could not continue with what comes next. Let what __iter__ gives "
            "follow from the arguments of the dataset, get_worker_info() and set_epoch(epoch) "
            "alone; or write what comes (a socket, a queue) to files first, and read these."
        )
    known: dict[tuple[int, ...], int] = {}
    for number, head in enumerate(heads):
        other = known.setdefault(tuple(head), number)
        if any(head) and other != number:  # 0 is of a sample of unknown content
            raise DataError(
                f"parts {other} and {number} of {parts} of the stream begin with the same "
                f"{plural(len(head), 'sample')}: your dataset does not divide itself. Set "
                "data.parts = 1; or have __iter__ take every num_workers-th file or sample, from "
                "get_worker_info().id on."
            )
