"""Embeddings whose table is elsewhere: a layer gets the rows of its batch, and has no weight.

`take_out` changes every `nn.Embedding` and `nn.EmbeddingBag` with `sparse=True` so that it asks
for each row of its batch once (`EmbeddingRows`), and computes with these as torch does with its
table.
The gradient of the rows goes where they came from. While an optimizer is made, a few
rows stand for the table (`EmbeddingTable.sample`).

Who has the rows is not known here. Alone, as while a model is tried, rows are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from instep.errors import RecipeError

_LAYERS = (nn.Embedding, nn.EmbeddingBag)

_MOST_ROWS = 2**31
"""Rows have numbers of 32 bits on their way."""


class RowSource(Protocol):
    """Has the rows."""

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """Rows [ids, dim] of a table, as of the last commit, to keep.

        Args:
            table: its place among those of the model.
            ids: [count] int64, ascending, each once.

        Raises:
            PeerError: who has them went away.
        """

    def gradient(self, table: int, ids: Tensor, gradient: Tensor) -> None:
        """What a backward pass gave for the rows `ids`, of which one may be the padding's."""


class EmbeddingRows:
    """Where the layers of one model get their rows."""

    source: RowSource | None = None
    """None where there are none to be had: then they are made up, the same for the same row."""

    def __deepcopy__(self, memo: Any) -> EmbeddingRows:
        """A copy of the model is tried alone."""
        return EmbeddingRows()

    def __reduce__(self) -> tuple[Any, ...]:
        """As is one that is loaded from a file."""
        return EmbeddingRows, ()

    def of(self, table: int, ids: Tensor, like: Tensor, padding: int | None) -> Tensor:
        """Rows [ids, dim], which need a gradient; for `padding` the source is told none."""
        source = self.source
        if source is None:
            return _made_up(ids, like).requires_grad_(torch.is_grad_enabled())
        rows = source.rows(table, ids)
        if not torch.is_grad_enabled():
            return rows
        rows.requires_grad_()
        counts = None if padding is None else ids != padding

        def told(of: Tensor) -> None:
            gradient, of.grad = of.grad, None
            assert gradient is not None, "called once there is one"
            if counts is None:
                source.gradient(table, ids, gradient)
            else:
                source.gradient(table, ids[counts], gradient[counts])

        rows.register_post_accumulate_grad_hook(told)
        return rows


def _made_up(ids: Tensor, like: Tensor) -> Tensor:
    """[ids, dim] of the type of `like` [0, dim], of about the size of weights."""
    columns = torch.arange(1, 1 + like.shape[1], dtype=torch.float64)
    return (0.1 * torch.sin(0.7 * (1 + ids.double()[:, None]) * columns.sqrt())).to(like.dtype)


@dataclass
class EmbeddingTable:
    """The table of one layer."""

    name: str
    """Of the parameter in the model: `LAYER.weight`."""
    rows: int
    sample: nn.Parameter
    """A few rows, which stand for the table while an optimizer is made."""
    initial: Tensor | None
    """[rows, dim]: what the recipe built; to be let go of as soon as somebody has it."""

    @property
    def dim(self) -> int:
        """Columns."""
        return self.sample.shape[1]


def is_sparse(layer: nn.Module) -> bool:
    """Whether a layer has a table of which a batch trains only its own rows."""
    return isinstance(layer, _LAYERS) and layer.sparse and layer.weight.requires_grad


def take_out(model: nn.Module) -> tuple[list[EmbeddingTable], EmbeddingRows]:
    """Have the sparse embeddings of a model ask for their rows.

    Call `leave_out` once the optimizer is made.

    Returns:
        Their tables, in the order of the model, and where they ask.

    Raises:
        RecipeError: a layer does what needs the whole table.
    """
    found, source = dict[str, Any](), EmbeddingRows()
    for path, layer in model.named_modules():
        if is_sparse(layer):
            found[f"{path}.weight" if path else "weight"] = layer
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    tables = list[EmbeddingTable]()
    for name, layer in found.items():
        _check(name, layer, owners[id(layer.weight)])
        weight = layer.weight.detach()
        rows = 11 if weight.shape[1] != 11 else 13  # told apart from columns by their number
        sample = nn.Parameter(weight[:1].repeat(rows, 1))
        tables.append(EmbeddingTable(name, len(weight), sample, weight))
        layer.weight = sample
        layer.__class__ = _kind(type(layer))
        layer._rows, layer._table = source, len(tables) - 1
        layer._like = weight.new_empty(0, weight.shape[1])
    return tables, source


def leave_out(model: nn.Module, tables: Sequence[EmbeddingTable]) -> None:
    """Take the samples out of a model: from here on its layers have no weight."""
    samples = {id(table.sample) for table in tables}
    for layer in model.modules():
        if isinstance(layer, _Elsewhere) and id(layer._parameters.get("weight")) in samples:
            del layer._parameters["weight"]


def _check(name: str, layer: Any, names: Sequence[str]) -> None:
    wrong = ""
    if type(layer).forward not in (nn.Embedding.forward, nn.EmbeddingBag.forward):
        wrong = f"is a {type(layer).__name__}, which has a forward() of its own"
    elif len(names) > 1:
        other = next(each for each in names if each != name)
        wrong = f"shares its weight with {other!r}, which needs all of it"
    elif layer.max_norm is not None:
        wrong = "has max_norm, which changes rows in the forward pass"
    elif layer.scale_grad_by_freq:
        wrong = "has scale_grad_by_freq, which counts rows in a batch of one worker"
    elif layer.weight._backward_hooks or getattr(layer.weight, "_post_accumulate_grad_hooks", None):
        wrong = "has a hook on the gradient of its weight"
    elif layer.weight.dtype not in (torch.float32, torch.float64):
        wrong = f"is of {layer.weight.dtype}, and rows are of float32 or float64"
    elif len(layer.weight) >= _MOST_ROWS:
        wrong = f"has {len(layer.weight):,} rows, and at most {_MOST_ROWS:,} have a number"
    if wrong:
        raise RecipeError(
            f"the sparse embedding {name!r} {wrong}: with sync.name = 'server_sync' its rows are "
            "on servers. Leave that out, or sparse=True (then every worker has the table)."
        )


class _Elsewhere:
    """What a layer without its table has in addition."""

    _rows: EmbeddingRows
    _table: int
    _like: Tensor
    _parameters: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "weight" not in self._parameters:
            raise RecipeError(
                f"the weight of an nn.{type(self).__name__} with sparse=True was asked for: with "
                "sync.name = 'server_sync' its rows are on servers, and only calls of the layer "
                "get them. Leave sparse=True out, so that every worker has the table."
            )
        return super().__getattr__(name)  # type: ignore[misc]  # of the layer

    def _apply(self, function: Callable[[Tensor], Tensor], *more: Any) -> Any:
        self._like = function(self._like)
        return super()._apply(function, *more)  # type: ignore[misc]  # of the layer

    def _found(self, given: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """The rows of a batch, where each of its numbers is in them, and where the padding is."""
        ids, places = torch.unique(given, return_inverse=True)
        layer: Any = self
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < layer.num_embeddings:
            raise IndexError(
                f"index out of range: a batch has the rows {int(ids[0])} to {int(ids[-1])} of an "
                f"embedding with {layer.num_embeddings} rows"
            )
        padding = layer.padding_idx
        rows = self._rows.of(self._table, ids.long(), self._like, padding)
        place = None
        if padding is not None and len(at := (ids == padding).nonzero()):
            place = int(at)
        return rows, places, place


class _Embedding(_Elsewhere, nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        """As torch's."""
        rows, places, padding = self._found(input)
        return functional.embedding(places, rows, padding)


class _EmbeddingBag(_Elsewhere, nn.EmbeddingBag):
    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """As torch's."""
        rows, places, padding = self._found(input)
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


def _kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer whose table is elsewhere; still one of the user's."""
    if kind not in _KINDS:
        base = _EmbeddingBag if issubclass(kind, nn.EmbeddingBag) else _Embedding
        bases = (base,) if kind in _LAYERS else (base, kind)
        _KINDS[kind] = type(kind.__name__, bases, {"__module__": __name__})
    return _KINDS[kind]
