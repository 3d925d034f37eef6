"""A recipe's stream as a job divides it: how many parts it has, and how long an epoch is.

A stream that ends is counted before the first step of a run with `train.epochs`: each part is read
once. With `train.steps` nothing is counted, and a part that ends begins again. Ways in:
`with_stream`, `stream_of_worker`, `check_stream`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from instep.data.loader import Loader, Slice
from instep.data.reading.streams.given import GivenStream
from instep.data.reading.streams.mixed import AnyStream, JoinedStreams
from instep.data.reading.streams.stream import HEADS, Stream, is_stream
from instep.data.reading.streams.turns import READ_AHEAD, StreamPlan
from instep.engine.member import Member
from instep.errors import DataError, InstepError, RecipeError, SpecError, raise_first
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe
from instep.store.run_folder import RunFolder
from instep.sync import clashes
from instep.system.memory_files import shared
from instep.words import plural
from instep.worker.reading import read_once
from instep.worker.reading.mixed_streams import mixed_streams
from instep.worker.reading.stream_facts import FOLDER, counted, read_as

_MOST = 1 << 40
"""Samples of a part whose end is not known."""


def with_stream(
    job: JobSpec, recipe: Recipe, run: Path | None = None, writer: int = 0, memory: int = -1
) -> Recipe:
    """The recipe with its stream as the job divides it; unchanged, where it trains on no stream.

    Args:
        job: of the run.
        recipe: as the user's function returned it.
        run: the folder of the run, for what others continue from; None where there is none.
        writer: number of this process there.
        memory: file in which to keep what cannot be read again; below 0 for one of its own.

    Raises:
        SpecError: the job asks for what a stream does not have.
        DataError: its samples cannot be counted.
    """
    parts = recipe.given["train"]
    if not is_stream(parts.dataset):
        raise_first(_of_no_stream(job, recipe))
        return recipe
    raise_first(refusals(job, recipe))
    folder = run / FOLDER if run is not None else None
    if isinstance(parts.dataset, JoinedStreams):
        several = mixed_streams(job, recipe, folder, writer)
        return recipe.with_data({**recipe.given, "train": read_as(parts, several)})
    given = GivenStream(parts.dataset, parts.worker_init)
    number = job.data.parts or parts.loaders or 1
    mixed = job.data.order != "dataset"
    window = max(1, job.data.window // number) if mixed else READ_AHEAD
    if job.data.once:
        raise_first(read_once.refusals(job, number))
        window = max(window, job.per_commit.global_batch // number)  # few lie there at a time
    if job.train.steps is not None:
        samples = job.train.steps * job.per_commit.global_batch
        plan = StreamPlan(number, window, mixed, None, samples)
    else:
        unknown = StreamPlan(number, window, mixed, (_MOST,) * number, _MOST)
        sizes = counted(job, parts, Stream(given, unknown, job.seed), folder)
        plan = StreamPlan(number, window, mixed, tuple(sizes), sum(sizes))
        if not plan.samples:
            raise DataError(
                f"the stream of Recipe.train ({type(parts.dataset).__name__}) has no sample in any "
                f"of its {plural(number, 'part')}: there is nothing to learn from. See whether "
                "__iter__ finds its files, and divides them by get_worker_info()."
            )
    once = read_once.memory_of(memory) if job.data.once else None
    stream = Stream(given, plan, job.seed, folder, writer, once=once)
    return recipe.with_data({**recipe.given, "train": read_as(parts, stream)})


def stream_of_worker(member: Member, recipe: Recipe) -> Recipe:
    """Do so in a worker, which keeps in the run's folder from where others can continue."""
    if not recipe.given["train"].streams:
        return with_stream(member.job, recipe)
    memory = shared()
    if member.job.data.once and memory < 0 and member.role == "worker":
        raise SpecError(
            "data.once = true needs memory that outlives a worker, which instep run has and "
            "instep.join does not (torchrun, Slurm's srun). Start the job with instep run, or "
            "write what comes to files, and read these."
        )
    run = member.run if member.sees_run else None
    return with_stream(member.job, recipe, run, member.number, memory)


def _of_no_stream(job: JobSpec, recipe: Recipe) -> Iterator[InstepError]:
    """Refuse what is for streams, where there is none."""
    if job.data.once:
        yield SpecError(
            "data.once = true is for a stream (an IterableDataset), and Recipe.train is none. "
            "Leave it out."
        )
    if not job.data.parts:
        return
    yield from clashes.refusals(job, recipe)
    if job.data.order != "windowed":
        yield SpecError(
            f"data.parts = {job.data.parts} with data.order = {job.data.order!r} is for a "
            "stream, and Recipe.train is none. Set data.order = 'windowed', or leave "
            "data.parts out."
        )


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


def check_stream(member: Member, recipe: Recipe, train: Loader) -> None:
    """Log how a stream is divided; refuse one that cannot be continued, or does not divide itself.

    Raises:
        DataError: it cannot, or does not; or it is divided otherwise than when the run was started.
    """
    stream = recipe.train
    if not isinstance(stream, AnyStream):
        return
    plan, streams = stream.plan, getattr(stream, "streams", [stream])
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
    heads = train.ask(Slice(*HEADS)) if stream.once is None else []
    for each in streams if heads else []:
        *own, again = [heads.pop(0) for _ in range(each.plan.parts + 1)]
        _check_heads(each.given.named, own, again)
    member.emit("stream_divided", **told, has_state=stream.has_state, once=stream.once is not None)


def _check_heads(name: str, heads: list[list[int]], again: list[int]) -> None:
    """Refuse a stream by how its parts begin, and the first one when it is read again."""
    if heads[0] != again:
        raise DataError(
            f"{name} of Recipe.train gives other samples when it is read again, so a run that "
            "loses a process could not continue with what comes next. Let what __iter__ gives "
            "follow from the arguments of the dataset, get_worker_info() and set_epoch(epoch) "
            "alone. For what comes once (a socket, a queue) set data.once = true, or write it to "
            "files first."
        )
    known: dict[tuple[int, ...], int] = {}
    for number, head in enumerate(heads):
        other = known.setdefault(tuple(head), number)
        if any(head) and other != number:  # 0 is of a sample of unknown content
            raise DataError(
                f"parts {other} and {number} of {len(heads)} of {name} begin with the same "
                f"{plural(len(head), 'sample')}: your dataset does not divide itself. Set "
                "data.parts = 1; or have __iter__ take every num_workers-th file or sample, from "
                "get_worker_info().id on."
            )
