"""Refuses a job before any process is started: parts that do not exist, or do not go together.

What one section can check by itself is checked in `job/`. Ways in: `check_job`, `refusals` for all
that is wrong, `check_mesh` for processes that predict, `with_options` for what a run is to keep,
and `open_switchboard` for the address that it listens on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import msgspec

from instep.comm.codecs import CODECS
from instep.comm.encryption.certificates import Authority
from instep.comm.protocol.endpoint import Switchboard
from instep.data.partition import PARTITIONS
from instep.data.shards.urls.remote import cache_in
from instep.data.splits import COLUMNS, SPLITS
from instep.errors import (
    InstepError,
    RecipeError,
    SpecError,
    WorkerError,
    caught,
    file_beside,
    raise_first,
)
from instep.job.mesh import MeshSpec, mismatches
from instep.job.spec import JobSpec
from instep.job.sync import SyncSpec
from instep.job.sync.rounds import SHARED
from instep.job.sync.tables import defaults_of
from instep.launch import LAUNCHERS
from instep.privacy import refusals as privacy
from instep.recipe.arguments import check_arguments, members_in, signature_in
from instep.recipe.given import given
from instep.recipe.start.file import start_file
from instep.recipe.start.url import local_copy
from instep.report.loggers.base import check_loggers
from instep.state.files.sharded import check_hashes
from instep.store.copies.objects import check_url
from instep.sync import STRATEGIES, clashes
from instep.system.environment import ASKED, INSIDE
from instep.words import is_url, listed

WILDCARDS = ("::", "::0", "[::]", "*")
"""Besides 0.0.0.0, what means every address of a machine."""


def check_job(job: JobSpec, *, resumed: bool = False) -> None:
    """Refuse a job before any process starts.

    Args:
        job, resumed: as for `refusals`.

    Raises:
        SpecError: a part by that name does not exist, or not in this version; or this is a
            process of another run.
        CheckpointError: the model to start from is damaged, or not a safetensors file.
    """
    if ASKED in os.environ:
        raise SpecError(
            "the script calls instep.train, which starts its workers itself: run it as a program "
            "of its own, with python."
        )
    if INSIDE in os.environ:
        raise SpecError(
            "a run was started while the recipe's file was being imported. Put the call under "
            "`if __name__ == '__main__':`."
        )
    raise_first(refusals(job, resumed=resumed))


def refusals(job: JobSpec, *, resumed: bool = False) -> Iterator[InstepError]:
    """The reasons why a job cannot run, as far as that shows before any process starts.

    What follows an error is looked for only when the next one is asked for.

    Args:
        job: to be run.
        resumed: its model is in a checkpoint; the file it started from may be gone.
    """
    yield from (unknown := [*caught(lambda: STRATEGIES.check(job.sync.name, "sync.name"))])
    yield from caught(lambda: LAUNCHERS.check(job.launch.launcher, "launch.launcher"))
    yield from caught(lambda: CODECS.check(job.sync.codec, "sync.codec"))
    yield from caught(lambda: check_loggers(job.report.loggers))
    yield from caught(lambda: check_url(job.checkpoint.copy_to))
    yield from _of_split(job)
    if not unknown:
        yield from _of_sync(job, resumed=resumed)
    yield from clashes.refusals(job)
    yield from privacy.refusals(job)
    yield from map(SpecError, mismatches(job.mesh))
    file = Path(job.recipe.rpartition(":")[0])
    if given(job.recipe) is None and not file.is_file():
        yield RecipeError(f"there is no recipe file {str(file)!r}. {file_beside(file, '*.py')}")
    yield from caught(lambda: _check_arguments(job))
    yield from caught(lambda: _check_own_codec(job))
    if job.launch.hosts:
        yield from caught(lambda: open_switchboard(job).close())
    yield from caught(lambda: _check_start(job, resumed=resumed))


def _check_start(job: JobSpec, *, resumed: bool) -> None:
    """Refuse a model to start from that is not there, or damaged."""
    with cache_in(job.data.cache, job.data.cache_gb):
        model = None if resumed else start_file(job.start)
    if model is not None:
        check_hashes(model)


def _of_split(job: JobSpec) -> Iterator[InstepError]:
    """Refuse parts without their order, a split that does not exist, a column it does not use."""
    data = job.data
    if data.parts and data.order == "global" and not data.sources:
        yield SpecError(
            f"data.parts = {data.parts} draws each micro-batch from one part, which data.order = "
            f"{data.order!r} does not. Set data.order = 'windowed', or leave data.parts out."
        )
    if data.copies > 1 and not data.parts:
        yield SpecError(
            f"data.copies = {data.copies} is of data in parts, and data.parts is not given. Set "
            "data.parts, or leave it out: all hosts have all data."
        )
    if job.own_data == "parts" and data.parts != job.sync.participants:
        yield SpecError(
            f"sync.options.partition = 'parts' gives each participant a part, and data.parts = "
            f"{data.parts} with sync.participants = {job.sync.participants}. Set both to one "
            "number."
        )
    if data.parts and job.sync.sealed:
        yield from _of_bound(job)
    if data.split:
        yield from caught(lambda: SPLITS.check(data.split, "data.split"))
    for key in ("groups", "times"):  # of labels much else speaks
        if (given := getattr(data, key)) and key not in COLUMNS.get(data.split, ()):
            uses = [f"'{name}'" for name, columns in COLUMNS.items() if key in columns]
            yield SpecError(
                f"data.{key} = {given!r}, and data.split = {data.split!r} does not use it. Leave "
                f"it out, or set data.split to {listed(uses, 4)}."
            )


def _of_bound(job: JobSpec) -> Iterator[InstepError]:
    """Refuse what would have a host read data of a participant of another one."""
    both = f"sync.options.secure_sums = true with data.parts = {job.data.parts}"
    if job.own_data != "parts":
        yield SpecError(
            f"{both} and sync.options.partition = {job.own_data!r}: samples of one participant "
            "would lie on several hosts, and each is computed where all of its data lie. Set "
            "sync.options.partition = 'parts', or leave data.parts out."
        )
    if job.data.split:
        yield SpecError(
            f"{both} and data.split = {job.data.split!r}: every host would validate on samples of "
            "participants of others. Give Recipe.validate a dataset that lies on each host, and "
            "leave data.split out."
        )


def _check_arguments(job: JobSpec) -> None:
    """Refuse `[arguments]` that the recipe function does not take, where that can be told."""
    file, _, name = job.recipe.rpartition(":")
    function = given(job.recipe)
    found = signature_in(Path(file), name) if function is None else signature(function)
    if found is not None:
        check_arguments(name, found, job.arguments)


def _check_own_codec(job: JobSpec) -> None:
    """Refuse a codec of the user's own that its strategy cannot use, where that can be told."""
    sync, (module, _, name) = job.sync, job.sync.codec.partition(":")
    if not name or (not sync.served and sync.rounds is None):
        return
    file = Path(job.recipe.rpartition(":")[0]).parent / f"{module.replace('.', '/')}.py"
    members = members_in(file, name) or {}
    wrong = [f"{key} = False" for key in ("segmentable", "fixed_size") if members.get(key) is False]
    wrong += [key for key in ("reduce", "reducer") if key in members]
    if wrong:
        raise SpecError(
            f"sync.codec = {sync.codec!r} does not go with sync.name = {sync.name!r}, which needs "
            f"a codec that is segmentable and of fixed size: {name} in {file} has {wrong[0]}. Use "
            "int8, or all_reduce."
        )


def check_mesh(mesh: MeshSpec) -> None:
    """Refuse axes that do not go together, and keys of an axis that is not there.

    Raises:
        SpecError: names them.
    """
    raise_first(map(SpecError, mismatches(mesh)))


def with_options(job: JobSpec, before: JobSpec | None = None) -> JobSpec:
    """The job with `sync.defaults`: all options of its strategy and codec, as they are today; and
    the version of a model at a URL, so that all hosts start from the same.

    Args:
        job: of a run that begins, or is resumed.
        before: the job of the run that is resumed; its defaults are those that were, if it has
            written any.

    Raises:
        SpecError: there is no such model, or another version of it.
        DataError: it cannot be read.
    """
    kept = (before or job).sync.defaults
    names = [job.sync.name, job.sync.codec] if before is None or kept else []
    found = {name: kept.get(name) or defaults_of(name) for name in names}
    defaults = {name: options for name, options in found.items() if options}
    replace = msgspec.structs.replace
    job = replace(job, sync=replace(job.sync, defaults=defaults))
    if before is not None or not is_url(job.start.model):
        return job
    with cache_in(job.data.cache, job.data.cache_gb):
        return replace(job, start=replace(job.start, version=local_copy(job.start)[1]))


def _of_sync(job: JobSpec, *, resumed: bool) -> Iterator[InstepError]:
    """Refuse keys of `[sync]` that its strategy does not know or needs, and wrong options."""
    sync = job.sync
    if sync.rounds is None and sync.participants != SyncSpec().participants:
        yield SpecError(
            f"sync.participants = {sync.participants}: {sync.name} agrees on every step. Leave the "
            "key out, or use sync.name = 'averaging'."
        )
    if sync.rounds is None and job.stop.spread is not None:
        yield SpecError(
            f"stop.spread = {job.stop.spread:g}: {sync.name} has no participants that could be "
            "apart. Leave the key out, or use sync.name = 'averaging'."
        )
    if not sync.served and job.server_hosts:
        yield SpecError(
            f"cluster.servers = {list(job.cluster.servers)}: {sync.name} has no servers. Leave "
            "the key out, or choose a strategy that has them."
        )
    if not sync.served and sync.servers != 1:
        yield SpecError(
            f"sync.servers = {sync.servers}: {sync.name} has no servers. Leave the key out, or "
            "use sync.name = 'server_sync'."
        )
    hosts = max(job.launch.count, len(job.cluster.places))
    if sync.servers > (most := max(job.most_workers, hosts)):
        yield SpecError(
            f"sync.servers = {sync.servers}: with more servers than a job can have workers "
            f"({job.most_workers}: {job.portions}), and hosts ({hosts or 1}), the links of "
            f"workers are the limit, and nothing is faster. Set sync.servers to at most {most}."
        )
    if "copy" in sync.row.options and sync.all_options.get("copy") and sync.servers < 2:
        yield SpecError(
            f"sync.options.copy = true with sync.servers = {sync.servers}: another server keeps "
            "the copy. Set sync.servers = 2 or more, or leave it out."
        )
    if sync.leased and "copy" in sync.options:
        yield SpecError(
            f"sync.options.copy: with sync.name = {sync.name!r} no other host has a copy. If the "
            f"host of a server is lost, the run ends with exit code {WorkerError.exit_code}, and "
            "instep resume continues from the newest checkpoint. Leave copy out, and set "
            "checkpoint.every to what may be trained again; or use sync.name = 'server_sync'."
        )
    yield from _of_partition(sync)
    if not resumed:
        yield from _of_use(sync)
    own = ":" in sync.codec  # is imported by the workers, with the recipe
    options = sync.options.keys() - sync.row.round_options or sync.codec_options
    if options and not own and not resumed:  # only then: it imports torch
        from instep.sync.base import strategy_of

        yield from caught(lambda: strategy_of(sync))


def _of_partition(sync: SyncSpec) -> Iterator[InstepError]:
    """Refuse a partition that does not exist, or an option that it does not have."""
    if sync.rounds is None:
        return
    partition = sync.rounds.partition
    if partition != SHARED:
        yield from caught(lambda: PARTITIONS.check(partition, "sync.options.partition"))
    if partition != "labels" and "skew" in sync.options:
        yield SpecError(
            f"sync.options.skew = {sync.options['skew']} with partition = {partition!r}: it says "
            "how uneven labels are dealt. Leave it out, or set partition = 'labels'."
        )


def _of_use(sync: SyncSpec) -> Iterator[SpecError]:
    """Refuse an option that another one leaves without any effect."""
    values = defaults_of(sync.name) | sync.all_options
    unused = {
        option: f"sync.options.{other} = {values[other]!r}"
        for option, (other, without) in sync.row.unused.items()
        if values[other] in without
    }
    if sync.codec == "none" and "encode_vectors" in sync.row.options:
        unused["encode_vectors"] = "sync.codec = 'none'"
    for option, why in sorted(unused.items()):
        if option in sync.options:
            given = sync.options[option]
            given = str(given).lower() if isinstance(given, bool) else given
            yield SpecError(
                f"sync.options.{option} = {given} does nothing with {why}. Leave it out, or "
                f"set {why.partition(' ')[0]}."
            )


def open_switchboard(job: JobSpec) -> Switchboard:
    """Where the run's masters listen: on loopback, or where the hosts reach this machine.

    Then with an authority, so that connections are encrypted, unless the network is private.

    Raises:
        SpecError: it is not an address of this machine, or other hosts cannot reach it.
    """
    if not job.launch.count:
        return Switchboard()
    address = job.launch.address
    try:
        wild = address in WILDCARDS  # some are not IPv4
        found = "0.0.0.0" if wild else socket.gethostbyname(address or socket.gethostname())
        if found == "0.0.0.0":
            what = f"launch.address = {address!r}" if address else f"this machine's name, {found},"
            raise SpecError(
                f"{what} means every address of this machine: the run would listen on all its "
                "networks, and the hosts need one address to connect to. Give the address that "
                "they reach, such as 10.0.0.1."
            )
        if not address and found.startswith("127."):
            raise SpecError(
                f"this machine's name leads to {found}, which other hosts cannot reach. Say "
                "launch.address, the address of this machine on the network of the hosts."
            )
        encrypted = job.network != "private" and not found.startswith("127.")
        return Switchboard(found, authority=Authority() if encrypted else None)
    except OSError as error:
        raise SpecError(
            f"launch.address = {address!r}: nothing can listen there ({error.strerror}). Give an "
            "address of this machine."
        ) from None
