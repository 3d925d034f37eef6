"""Small pieces of text that the views of a running job share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.units import readable_count, readable_seconds

MOST_CHARACTERS = 4000
"""Of an error on a terminal; ours, which may list all that is known, are shorter."""


def member(number: object, servers: Collection[object] = ()) -> str:
    """`worker 0`, or `server 2` for one of the servers."""
    return f"{'server' if number in servers else 'worker'} {number}"


def members(workers: int, servers: int = 0) -> str:
    """`2 workers`, `2 workers and 1 server`."""
    return plural(workers, "worker") + (f" and {plural(servers, 'server')}" if servers else "")


def some_members(numbers: Sequence[int], servers: Collection[int]) -> str:
    """`workers 0, 1 and 3 more, server 7`."""
    workers = [number for number in numbers if number not in servers]
    others = [number for number in numbers if number in servers]
    named = [some_workers(workers)] if workers else []
    named += [some_workers(others).replace("worker", "server", 1)] if others else []
    return ", ".join(named)


def some_workers(numbers: Sequence[int], most: int = 4) -> str:
    """`workers 0, 1 and 3 more`."""
    return f"worker{'s' if len(numbers) > 1 else ''} {listed(numbers, most)}"


def listed(names: Sequence[object], most: int) -> str:
    """`0, 1 and 3 more`: at most so many of the names."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + rest


def folder_contents(folder: Path) -> str:
    """What a folder holds, for the error that misses something in it."""
    if not folder.is_dir():
        return f"There is no folder {folder}."
    names = sorted(path.name for path in folder.iterdir())
    some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"The folder holds: {some or 'nothing'}."


def ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """`1 to 3, 5, 7 to 9 and 2 more`, from ascending numbers; `most` ranges are named."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    named = [f"{low} to {high}" if high > low else str(low) for low, high in runs[:most]]
    rest = f" and {len(runs) - len(named)} more" if len(runs) > len(named) else ""
    return ", ".join(named) + rest


def short_number(value: Any) -> str:
    """Four decimals, or four digits where that says more; a dash for what is no number."""
    if not isinstance(value, int | float):
        return "-"
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.4g}"


LAST_STEPS = 100
"""Over so many steps the loss of a job that counts steps is the mean."""


def of_what(steps: int | None) -> str:
    """What the one training loss that is shown is a mean of; `steps` is the job's `train.steps`."""
    return f"mean of the last {min(steps, LAST_STEPS)} steps" if steps else "mean of the epoch"


def phases_in_words(phases: dict[str, float]) -> str:
    """`import torch 2.6 s  fork 12 ms`."""
    return "  ".join(f"{name} {readable_seconds(s)}" for name, s in phases.items())


def metrics_in_words(validated: dict[str, Any]) -> str:
    """`loss 0.1234  accuracy 0.9876`, from a `validated` event."""
    return "  ".join(
        f"{name} {short_number(value)}" for name, value in validated["metrics"].items()
    )


def stop_words(asked: dict[str, Any]) -> str:
    """`accuracy 0.973 reached the target 0.97, at step 120`, from a `stop_requested` event."""
    if asked["why"].endswith(" on"):  # it says from which
        return str(asked["why"])
    if not asked["step"]:
        return f"{asked['why']}, before the first step"
    return f"{asked['why']}, at step {readable_count(asked['step'])}"


AGAIN = "came again"
"""Ends the reason of a stop that was asked for twice, and so is one at once."""


def asked_by(name: str) -> str:
    """Who asks for a stop, as people call it: `Ctrl-C`, else the signal's name."""
    return "Ctrl-C" if name == "SIGINT" else name


def apart_in_words(apart: dict[str, Any]) -> str:
    """`participants 2.31 times as far from their mean as it moved; predictions 0.012 nats apart`.

    From a `participants_apart` event.
    """
    distance, way = apart.get("distance"), apart.get("way")
    told = "a mean that has not moved"
    if distance is not None and way:
        told = f"participants {distance / way:.3g} times as far from their mean as it moved"
    if (divergence := apart.get("divergence")) is not None:
        told += f"; predictions {divergence:.3g} nats apart"
    return told


def lag_in_words(lag: dict[str, Any]) -> str:
    """`2.9 other updates while a gradient was computed, and 11 at most`.

    From `lag` in `summary.json`.
    """
    most = readable_count(lag["largest"])
    return f"{lag['mean']:.3g} other updates while a gradient was computed, and {most} at most"


def start_in_words(loaded: dict[str, Any]) -> str:
    """`body.safetensors: 40 of 42 tensors match; missing: head.bias, head.weight.`

    From a `model_loaded` event.
    """
    return f"{loaded.get('path')}: {loaded.get('text')}"


def corruption_in_words(found: dict[str, Any]) -> str:
    """`worker 1 had a wrong gradient at step 20 (batch 3): ...; training continued from step 9`.

    From a `corruption_found` event.
    """
    named = ", ".join(f"worker {n}" for n in found["workers"])
    who = named or " or ".join(f"worker {n}" for n in found["suspects"])
    then = f"training continued from step {readable_count(found['clean_step'])}"
    if found["clean_step"] < 0:
        then = "no worker had a copy to go back to"
    return (
        f"{who} had a wrong {found['what']} at step {readable_count(found['step'])} "
        f"({found['where']}): {found['how']}; {then}"
    )


def mesh_in_words(checked: dict[str, Any]) -> str:
    """`21 gradients are the same; compared were only the blocks ...`, from `mesh_checked`."""
    if "why" in checked:
        return f"not compared: {checked['why']}"
    same = f"{readable_count(checked['tensors'])} gradients are the same"
    blocks = [str(each) for each in checked.get("blocks", ())]
    only = f"; compared were only the blocks {listed(blocks, 6)}, and what is outside of blocks"
    return same + (only if blocks else "")


def not_utf8(text: str) -> int | None:
    """Where it begins to be no UTF-8, as a name of a file may; None if it is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def is_url(text: str) -> bool:
    """Whether a text names something on another file system, as `s3://bucket/file`."""
    return "://" in text


_USER = re.compile(r"(\w+)://(?:([^/]*)@|([^/@:\[]+):(?!:|\d*(?:[/#]|$))[^@]*@)")
"""User and password of a URL, which may have a slash in it; no port, and no @ of a path."""

_URL = re.compile(r"""\w+://[^\s'"<>]+""")


def shown_url(url: str) -> str:
    """A URL without what may be secret: password, query, and the user of a web server, which may be
    a token. What is none stays as it is.
    """
    scheme, separator, rest = url.partition("://")
    return _USER.sub(
        _shown_user, f"{scheme}{separator}{rest.partition('?')[0] if separator else ''}"
    )


def _shown_user(found: re.Match[str]) -> str:
    user = (found[2] or found[3] or "").partition(":")[0]
    return (
        f"{found[1]}://{user}@" if user and found[1] not in ("http", "https") else f"{found[1]}://"
    )


def without_secrets(value: Any) -> Any:
    """Show each URL within plain data, such as the table of a job, as `shown_url` does."""
    if isinstance(value, str):
        return shown_url(value)
    if isinstance(value, Mapping):
        return {name: without_secrets(each) for name, each in value.items()}
    return [*map(without_secrets, value)] if isinstance(value, list | tuple) else value


def shown_error(text: str) -> str:
    """Show each URL within an error's text as `shown_url` does."""
    return _URL.sub(lambda found: shown_url(found[0]), text)


def printable(text: str) -> str:
    """One line without control characters, whatever a user's error text holds."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " for letter in text)


def fit_to_print(text: str, most: int = MOST_CHARACTERS) -> str:
    """What an error says, for a terminal: its lines without control characters, and an end.

    Args:
        text: may hold whatever a user's exception says.
        most: characters that are kept; the rest gives way to three dots.
    """
    cut = text if len(text) <= most else text[: most - 3] + "..."
    return "\n".join(printable(line) for line in cut.split("\n"))


def whole_seconds(seconds: float) -> str:
    """Seconds without decimals: a time that moves while one looks at it."""
    return f"{seconds:.0f} s" if seconds < 9.95 else readable_seconds(seconds)


def plural(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{readable_count(count)} {noun}{'' if count == 1 else 's'}"


def split_in_words(event: Mapping[str, Any]) -> str:
    """`stratified: 90 samples to train on, 30 to validate on, fold 2 of 5`, from `data_split`."""
    fold = f", fold {event['fold'] + 1} of {event['folds']}" if event.get("folds") else ""
    return (
        f"{event.get('split')}: {plural(event['train'], 'sample')} to train on, "
        f"{readable_count(event['validation'])} to validate on{fold}"
    )


_AS_WISHED = "each sample as often as the WeightedRandomSampler wishes"


def balance_in_words(event: Mapping[str, Any]) -> str:
    """`resample: samples of an epoch: a 150 -> 150, b 40 -> 150`, from `data_balanced`; or
    `sources: a 70 %, b 30 %`."""
    how, names = str(event.get("balance")), event.get("names") or []
    if how == "drawn":
        return str(event.get("sampler"))
    if how == "sampler" and not names:
        return f"{_AS_WISHED}, rounded down or up"
    if how == "stratified":
        return "stratified: each global batch has the classes in proportion"
    if weights := event.get("class_weights"):
        counts = [f"{name} {weight:.3g}" for name, weight in zip(names, weights, strict=True)]
        return f"reweight: each sample of {listed(counts, 6)}"
    if how == "sources":
        every, pairs = sum(event["planned"]), zip(names, event["planned"], strict=True)
        return f"sources: {listed([f'{name} {100 * n / every:.3g} %' for name, n in pairs], 6)}"
    columns = zip(names, event["before"], event["planned"], strict=True)
    counts = [f"{name} {before:,} -> {planned:,}" for name, before, planned in columns]
    how = f"{_AS_WISHED}" if how == "sampler" else how
    return f"{how}: samples of an epoch: {listed(counts, 6)}" if counts else how


def lengths_in_words(event: Mapping[str, Any]) -> str:
    """`8,192 tokens in a batch at most, on average, of samples that are ...`, from
    `data_lengths`."""
    tokens, sampler = event.get("tokens_per_batch"), event.get("sampler")
    each = f"{tokens:,} tokens in a batch at most, on average" if tokens else "batches"
    source = f" (the {sampler} of the DataLoader says how long they are)" if sampler else ""
    return (
        f"{each}, of samples that are sorted by length in windows of {event['window']:,}{source}: "
        f"{event['steps']:,} steps in an epoch, {100 * event['padding']:.1f} % padding"
    )


def stream_in_words(event: Mapping[str, Any]) -> str:
    """`4 parts, mixed within 4,096 samples of each; it says where it is`, from `stream_divided`."""
    window, parts = event["window"], plural(event["parts"], "part")
    mixed = f"mixed within {plural(window, 'sample')} of each" if window else "not mixed"
    where = "it says where it is" if event["has_state"] else "without a state of its own"
    if event.get("once"):
        where = "read once, and kept until its steps are committed"
    return f"{parts}, {mixed}; {where}"


def data_facts(
    split: Mapping[str, Any],
    balanced: Mapping[str, Any],
    lengths: Mapping[str, Any],
    stream: Mapping[str, Any],
) -> dict[str, str]:
    """Facts on the data of a run, from its events if there are any."""
    facts = {"split": split_in_words(split)} if split else {}
    facts |= {"balance": balance_in_words(balanced)} if balanced else {}
    facts |= {"lengths": lengths_in_words(lengths)} if lengths else {}
    return facts | ({"stream": stream_in_words(stream)} if stream else {})


def command(name: str, run: Path, *more: str) -> str:
    """`instep resume runs/digits`, fit to be pasted into a shell."""
    return " ".join(["instep", name, shlex.quote(str(run)), *more])


def next_lines(commands: Iterable[str]) -> list[str]:
    """What one can do next, a command in each line."""
    return [f"{'' if number else 'next':8}{text}" for number, text in enumerate(commands)]


def a_or_an(value: Any) -> str:
    """`an nn.Linear`, `a str`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    vowel = name[0].lower() in "aeiou" or (name[:2].isupper() and name[0] in "FHLMNRSX")
    return f"{'an' if vowel else 'a'} {name}"
