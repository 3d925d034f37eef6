"""Which samples are trained on, and which are validated on: the table of splits.

A split is a pure function of its request: the number of samples, the seed, and columns with a value
for each sample. To add one: write a function that keeps the promises of `Scheme` in a file of its
own, add its line here, and its columns if it needs any. `sides.py` has what several of them need,
`columns.py` checks what a column holds. Nothing here knows datasets, processes or models.
"""

from __future__ import annotations

from collections.abc import Mapping

from instep.data.splits.base import Request, Scheme, Sides
from instep.registry import Registry

__all__ = ["COLUMNS", "SPLITS", "Request", "Scheme", "Sides"]

SPLITS = Registry(
    "split",
    {
        "blocks": "instep.data.splits.blocks:blocks",
        "group": "instep.data.splits.group:group",
        "hash": "instep.data.splits.hash:by_hash",
        "random": "instep.data.splits.blocks:random",
        "stratified": "instep.data.splits.stratified:stratified",
        "stratified_group": "instep.data.splits.stratified_group:stratified_group",
        "time": "instep.data.splits.time:time",
    },
)

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "group": ("groups",),
    "hash": ("groups",),
    "stratified": ("labels",),
    "stratified_group": ("labels", "groups"),
    "time": ("times",),
}
"""The columns that a split needs: fields of `Request` and of `Recipe`, and keys of `[data]`."""
