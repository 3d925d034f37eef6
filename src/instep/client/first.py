"""First recipes: folders of files that train as they are, to be changed by their reader.

They are in `instep/templates`, a folder each, and are copied as they are. To add one: a folder
there, and its line in `KINDS`; `tests/process/test_first.py` trains it. Way in: `write`.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from instep.errors import RunError, SpecError, near_miss

KINDS = {
    "vision": "a convolutional network on images",
    "language": "a small GPT on text",
    "table": "a network on the columns of a CSV file",
    "hugging-face": "a Hugging Face model on texts of a CSV file (needs transformers)",
    "own-loop": "a training loop of your own, as a script",
}
"""What there is, in words."""

NEEDS = {"hugging-face": "transformers"}
"""Packages that instep does not bring along."""


def write(kind: str, folder: Path) -> list[Path]:
    """Copy the files of a kind into a folder, which is made if it is not there.

    Returns:
        The files: the last is the one to give to `instep run`.

    Raises:
        SpecError: there is no such kind.
        RunError: a file of that name is there already; nothing was written.
    """
    if kind not in KINDS:
        raise SpecError(f"there is no template {kind!r}. {near_miss(kind, KINDS)}")
    there = resources.files("instep") / "templates" / kind
    names = sorted(each.name for each in there.iterdir() if each.is_file())
    names.sort(key=lambda name: name in ("job.toml", "train.py"))
    files = [folder / name for name in names]
    if taken := [each for each in files if each.exists() or each.is_symlink()]:
        raise RunError(
            f"{taken[0]} exists, and instep init replaces nothing. Give another folder: "
            f"instep init {kind} DIR"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        with file.open("xb") as copy:  # also if another process makes it in this moment
            copy.write((there / file.name).read_bytes())
    return files
