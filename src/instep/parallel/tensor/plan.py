"""A tensor plan: which layers are cut how, and why the others stay whole.

A plan is a value: it can be printed, compared and stored, and one process can send it to others (as
msgspec's JSON). It knows no process and no tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from instep.errors import SpecError, near_miss

Style = Literal["column", "column_gather", "row", "vocabulary"]
Change = Literal["gather", "gather_sum", "split", "sum_split"]


@dataclass(frozen=True)
class Cut:
    """How one layer is cut."""

    style: Style
    """`column`: by outputs, which stay cut; `column_gather`: by outputs, which are gathered;
    `row`: by inputs, which arrive cut; outputs are summed; `vocabulary`: an embedding by rows,
    outputs are summed."""
    group: str
    """Layers of one name share activations that are cut; for a layer alone its own name."""


@dataclass(frozen=True)
class Crossing:
    """Where a tensor goes into or out of a module and its sequence is split or gathered."""

    side: Literal["input", "output"]
    number: int
    """Of the tensor among those of the module's inputs, or outputs."""
    change: Change
    """`gather`: it arrives split and is gathered; `gather_sum`: so, and each rank has a summand of
    the gradient; `split`: a rank keeps its part; `sum_split`: so, after the sum of what the ranks
    have."""
    dim: int
    """Of the sequence, counted from the last."""
    stretch: str
    """The list of blocks within which this sequence is split."""

    @property
    def in_words(self) -> str:
        verb = "gathered" if self.change.startswith("gather") else "split"
        return f"sequence {verb} at its {self.side}"


@dataclass(frozen=True)
class Draw:
    """Random numbers that are drawn for an activation that is cut."""

    dim: int
    """Which is cut."""
    stretch: str = ""
    """Of which the sequence is cut, as in `Crossing`; empty where features are."""


@dataclass(frozen=True)
class Plan:
    """How a model is cut for tensor parallelism; names are those of the whole model."""

    ranks: int
    """Processes that share each product."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """Modules that are cut."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Modules with parameters that stay whole on each rank: why."""
    edits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Attributes that get another value, such as a number of heads: by module and attribute."""
    summed: tuple[str, ...] = ()
    """Whole parameters that work on cut activations: their gradients are summed over the ranks."""
    draws: Mapping[str, tuple[Draw | None, ...]] = field(default_factory=dict)
    """Modules that draw random numbers for cut activations: what is cut in each draw of one call,
    or None."""
    sequence: Mapping[str, tuple[Crossing, ...]] = field(default_factory=dict)
    """Modules at which the sequence is split or gathered. Between them each rank has its part."""
    unsplit: Mapping[str, str] = field(default_factory=dict)
    """Lists of blocks in which each rank has the whole sequence, though it was to be split: why."""

    def __str__(self) -> str:
        """A table of the modules; layers that differ only by a number share a line."""
        told = [(name, cut.style.replace("_", ", ")) for name, cut in self.cuts.items()]
        told += [(name, f"whole: {why}") for name, why in self.kept.items()]
        for name, values in self.edits.items():
            each = ", ".join(f"{key} = {value}" for key, value in values.items())
            told.append((name, f"with {each}"))
        for name, crossings in self.sequence.items():
            told += [(name, each.in_words) for each in crossings]
        told += [(name, f"sequence not split: {why}") for name, why in self.unsplit.items()]
        rows = Counter((numberless(name), text) for name, text in told)
        width = max((len(name) for name, _ in rows), default=0)
        lines = [
            f"{name or '(the model)':<{width}}  {text}{f'  ({count} times)' * (count > 1)}"
            for (name, text), count in rows.items()
        ]
        return "\n".join([f"tensor plan for {self.ranks} ranks", *lines])


def numberless(name: str) -> str:
    """A module's name with `*` for the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def styles_of(table: Mapping[str, str], names: list[str]) -> dict[str, Style]:
    """The user's table, for the modules that its patterns match; the first match counts.

    Args:
        table: pattern of names (`*` matches anything), to a style or `replicate`.
        names: modules that can be cut.

    Raises:
        SpecError: a pattern matches nothing, or a style does not exist.
    """
    found: dict[str, Style] = {}
    left = list(names)
    for pattern, style in table.items():
        if style != "replicate" and style not in get_args(Style):
            raise SpecError(
                f"mesh.plan[{pattern!r}] = {style!r}: no style has this name. "
                + near_miss(style, [*get_args(Style), "replicate"])
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            known = near_miss(pattern, {numberless(name) for name in names})
            raise SpecError(
                f"mesh.plan[{pattern!r}] matches no layer that can be cut (nn.Linear, "
                f"nn.Embedding, Conv1D of transformers). {known}"
            )
        for name in [name for name in left if fnmatchcase(name, pattern)]:
            left.remove(name)
            if style != "replicate":
                found[name] = style  # type: ignore[assignment]
    return found
