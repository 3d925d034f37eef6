"""The commands for data: from raw files to shards, and what a folder of them holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from instep.cli.parsing import Parser, add_set, number
from instep.cli.saying import say, say_aside
from instep.errors import INTERRUPTED, DataError, SpecError, file_beside
from instep.words import plural

if TYPE_CHECKING:
    from instep.data.shards.manifest import Manifest
    from instep.report.figures.dataset import DataFigures


def prepare(args: argparse.Namespace) -> int:
    """Prepare raw files as shards, the same whatever the number of workers."""
    from instep.client.preparing import launch_of, prepared

    if args.set and args.on is None:
        raise SpecError("--set needs --on: it says how hosts are started.")
    job = launch_of(args.on, args.workers, args.map, args.set) if args.on else None
    done = prepared(
        "instep prepare",
        say_aside,
        args.workers,
        job,
        sources=args.sources,
        to=args.to,
        map=args.map,
        key=args.key,
        reduce=args.reduce,
        shuffle=args.shuffle,
        keep=not args.no_keep,
        shard_mb=args.shard_mb,
        tokens=args.tokens,
        length=args.length,
        unreadable=args.unreadable,
        types=dict(_type(each) for each in args.type),
        seed=args.seed,
        checksums=args.checksums,
    )
    for line in [json.dumps(done.as_table())] if args.json else done.lines():
        say(line)
    return INTERRUPTED if done.manifest is None else 0


_megabytes = number("a number above 0, such as 8.", 1e-6, 1e9)


def _type(typed: str) -> tuple[str, str]:
    column, is_one, name = typed.rpartition("=")
    if not is_one or not column:
        raise SpecError(f"--type {typed!r}: wanted is COLUMN=TYPE, as price=float64.")
    return column, name


def prepare_options(parser: Parser) -> None:
    """Options of `instep prepare`."""
    add = parser.add_argument
    text = "raw files, folders, URLs, or patterns in quotes: CSV, JSON lines, Parquet and more"
    add("sources", nargs="+", metavar="SOURCE", help=text)
    add("--to", required=True, metavar="FOLDER", help="folder of the shards")
    text = "function that gives the sample, several, or None of one raw record"
    add("--map", metavar="FILE.py:FUNCTION", help=text)
    text = "column whose equal values have samples put together, by --reduce"
    add("--key", metavar="COLUMN", help=text)
    text = "function that gives the sample, several, or None of all samples of one key"
    add("--reduce", metavar="FILE.py:FUNCTION", help=text)
    text = "put all samples into a random order, which only the seed decides"
    add("--shuffle", action="store_true", help=text)
    text = (
        "with --key or --shuffle, leave nothing beside the shards by which the next command is fast"
    )
    add("--no-keep", action="store_true", help=text)
    text = "about so many MB does a shard have (default: 33.6)"
    add("--shard-mb", type=_megabytes, metavar="X", help=text)
    text = "turn text into tokens: a file that tokenizers saved, or the word bytes"
    add("--tokens", metavar="TOKENIZER", help=text)
    add("--length", type=int, metavar="N", help="most tokens of a sample")
    text = "bad records: some (default) and skip leave them out, skip also where a file has no "
    text += "others; stop ends the command"
    add("--unreadable", choices=("some", "skip", "stop"), default="some", help=text)
    text = "type of a column of CSV files, where their heads say another one; may be repeated"
    add("--type", action="append", default=[], metavar="COLUMN=TYPE", help=text)
    text = "of the function's random draws (default: %(default)s)"
    add("--seed", type=int, default=0, metavar="N", help=text)
    text = "compare the contents of all sources with what was prepared, whatever their times say"
    add("--checksums", action="store_true", help=text)
    text = "number of worker processes (default: one for each processor)"
    add("--workers", type=int, metavar="N", help=text)
    text = "where they are: local, hosts, slurm or ray (default: local)"
    add("--on", metavar="LAUNCHER", help=text)
    text = """how hosts are started, as launch.hosts='["ssh a", "ssh b"]'; may be repeated"""
    add("--set", action="append", default=[], metavar="launch.KEY=VALUE", help=text)


def data(args: argparse.Namespace) -> int:
    """Show what will be trained on: of a job its sides, leaks and parts; or a prepared folder."""
    if args.html is not None:
        from instep.state.export.export import check_page

        if not args.html or not Path(args.html).absolute().parent.is_dir():
            raise SpecError(f"--html {args.html!r} names no file in a folder that is there.")
        check_page(Path(args.html), None, "--html")
    if Path(args.of).suffix == ".toml":
        return _of_job(args)
    from instep.data.shards.manifest import read_manifest
    from instep.report.figures.sample import sample_table
    from instep.report.terminal.dataset import dataset_lines, sample_lines

    folder = Path(args.of)
    if args.duplicates:
        raise SpecError(
            f"--duplicates compares the two sides of a job, and {args.of!r} is no job file (.toml)."
        )
    if not folder.exists():
        raise SpecError(f"there is no folder {args.of!r}. {file_beside(folder, '*')}")
    manifest = read_manifest(folder)
    lines, table = dataset_lines(folder, manifest), msgspec.to_builtins(manifest)
    if args.sample is not None:
        from instep.data.shards.dataset import Shards

        if not 0 <= args.sample < manifest.samples:
            raise SpecError(f"--sample {args.sample}: the folder has {manifest.samples:,} samples.")
        table["sample"] = sample_table(args.sample, Shards(folder)[args.sample])
        lines += sample_lines(table["sample"])
    if args.html:
        from instep.data.shards.dataset import Shards
        from instep.lab.data_page import of_folder

        lines += _drawn(args, table, of_folder(str(folder), Shards(folder), args.sample))
    checked = {folder: manifest} if args.verify else {}
    return _told(args, table, lines, checked)


def _of_job(args: argparse.Namespace) -> int:
    from instep.client.preparing import prepare_data
    from instep.job.file import load
    from instep.lab.about_data import about_data
    from instep.report.figures.sample import sample_table
    from instep.report.terminal.dataset import job_lines, sample_lines

    job = load(Path(args.of), args.set)
    prepare_data(job, quiet=False, here=True)
    about = about_data(job, args.sample, _comparing if args.duplicates else None)
    table = about.as_table()
    lines = job_lines(table)
    if args.sample is not None:
        table["sample"] = sample_table(args.sample, about.sample)
        lines += sample_lines(table["sample"])
    if args.html:
        from instep.lab.data_page import of_job

        lines += _drawn(args, table, of_job(job, about, table.get("sample")))
    here = {each.folder: each.manifest for each in about.folders if isinstance(each.folder, Path)}
    if args.verify and not here:
        raise SpecError(
            f"--verify compares samples with the checksums of a prepared folder, and the training "
            f"set of {args.of} is in none of this machine. Leave it out."
        )
    return _told(args, table, lines, here if args.verify else {})


def _comparing(samples: int) -> Callable[[], None]:
    from instep.prepare.progress import Progress

    return Progress("compared", samples, say_aside).step


def _told(
    args: argparse.Namespace,
    table: dict[str, Any],
    lines: list[str],
    checked: dict[Path, Manifest],
) -> int:
    """Print what was found, and compare folders with their checksums.

    Raises:
        DataError: one of these is damaged.
    """
    damage = {folder: _damaged(folder, manifest) for folder, manifest in checked.items()}
    wrong = [text for texts in damage.values() for text in texts]
    if checked:
        table["damaged"] = wrong
        lines += [f"damaged    {text}" for text in wrong] or ["verified   all samples"]
    for line in [json.dumps(table)] if args.json else lines:
        say(line)
    for folder, texts in damage.items():
        if texts:
            raise DataError(
                f"{folder} is damaged in {plural(len(texts), 'place')}. Remove the files that are "
                "named, and give the same instep prepare again."
            )
    return 0


def _drawn(args: argparse.Namespace, table: dict[str, Any], data: DataFigures) -> list[str]:
    from instep.report.page.page import write_data
    from instep.state.export.export import writing_to

    path = Path(args.html)
    with writing_to(path, "--html"):
        write_data(path, Path(args.of).absolute().name, data)
    table["html"] = str(path)
    return [f"page       {path}"]


def _damaged(folder: Path, manifest: Manifest) -> list[str]:
    from instep.data.shards.digest import BLOCK
    from instep.data.shards.verify import damaged
    from instep.prepare.progress import Progress

    progress = Progress("verified", max(1, manifest.samples // BLOCK), say_aside)
    return damaged(folder, manifest, progress.step)


def data_options(parser: Parser) -> None:
    """Options of `instep data`."""
    add = parser.add_argument
    add("of", metavar="JOB|FOLDER", help="job file, or folder that instep prepare has made")
    add(
        "--sample",
        type=int,
        metavar="N",
        help="show one sample; of a job that of its training side",
    )
    add("--html", metavar="FILE", help="draw it, as a page to look at in a browser")
    text = "compare every sample of the folder, or of the job's folders, with its checksum"
    add("--verify", action="store_true", help=text)
    text = "compare all samples of a job's two sides by content (default: 2,000 of each)"
    add("--duplicates", action="store_true", help=text)
    add_set(parser)
