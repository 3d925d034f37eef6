"""The optimizer of a run with servers, for the rows of an embedding that a step has touched.

The recipe's optimizer is given these rows as if they were a whole table, with a sparse gradient
for all of them, and what it keeps for them. Whether that is what it would do with the whole table
is tried on a small one before the first step: momentum, say, moves rows that have no gradient.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.engine.beside import beside
from instep.engine.served.written import kept_as, taken
from instep.engine.update import options_of
from instep.errors import InstepError, RecipeError
from instep.parallel.embeddings import EmbeddingTable
from instep.recipe.optimizers.combined import name_of_part
from instep.recipe.optimizers.made_up import STEPS, MadeUp, fitting, tried
from instep.system.causes import sentence

_WHERE = "an embedding on servers"
_MOST = 3
"""Rows that a batch of the trial has at most."""


class RowUpdate:
    """Moves rows of tables.

    Args:
        optimizer: of the recipe, made with a sample of each table, which it need not keep.
        tables: with these samples.

    Raises:
        RecipeError: the optimizer has no sample of a table, or is not for rows.
    """

    def __init__(self, optimizer: Optimizer, tables: Sequence[EmbeddingTable]) -> None:
        self._optimizer, self._tables = optimizer, list(tables)
        self._groups = list[int]()
        self._made = list[dict[str, Any]]()
        for table in tables:
            held = [
                number
                for number, group in enumerate(optimizer.param_groups)
                if any(each is table.sample for each in group["params"])
            ]
            self._groups.append(held[0])  # `check_optimizer` has found it
            self._made.append(copy.deepcopy(dict(optimizer.state.pop(table.sample, {}))))
        samples = {id(table.sample) for table in tables}
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if id(each) not in samples]

    def begin(self, table: int) -> dict[str, Tensor]:
        """As `RowMover.begin`; tries the optimizer on a table like the sample.

        Raises:
            RecipeError: it moves rows otherwise than by their own gradient and state.
        """
        of = self._tables[table]
        optimizer, name = self._optimizer, type(self._optimizer).__name__
        try:
            with tried(optimizer):
                options = [options_of(group) for group in optimizer.param_groups]
                alike, begin = self._tried(table)
                learnt = [options_of(group) for group in optimizer.param_groups] != options
        except InstepError:
            raise
        except Exception as error:  # of whatever kind, from the user's optimizer
            raise RecipeError(
                f"the optimizer {name} cannot move rows of the embedding {of.name!r}, whose "
                f"gradient is sparse: {sentence(error)}. {_REMEDY}"
            ) from error
        if learnt or not alike:
            why = (
                "changes values of its param_groups in its step"
                if learnt
                else "moves other rows than those of a batch (momentum and weight decay do), or "
                "these otherwise than by their own gradient and state"
            )
            raise RecipeError(
                f"the optimizer {name} {why}, so the embedding {of.name!r} cannot be on servers. "
                f"{_REMEDY}"
            )
        return begin

    def _tried(self, table: int) -> tuple[bool, dict[str, Tensor]]:
        """Whether some rows move alone as they do in a table, and what is kept before any step."""
        like = self._tables[table].sample
        made = MadeUp({"rows": torch.Size((_MOST, like.shape[1]))}, 0)
        whole = torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like.dtype)
        start, rows, count = whole.clone(), whole.clone(), len(whole)
        kept, state = copy.deepcopy(self._made[table]), dict[str, Tensor]()
        begin: dict[str, Tensor] | None = None
        for number, step in enumerate(STEPS):
            ids = torch.tensor([1, 3]) if number % 2 == 0 else torch.tensor([3, 4, 6])
            whole.copy_(start * step.scale)
            rows.copy_(whole)
            gradient = fitting(made.gradient("rows", number)[: len(ids)], like)
            kept = self._step(table, whole, ids, gradient, kept)
            if any(isinstance(each, Tensor) and each.is_sparse for each in kept.values()):
                return False, {}  # SGD's momentum: it has the rows of former batches
            named = {n: value.clone() for n, value in self._named(kept).items()}
            if begin is None:
                begin = {
                    name: each[:1].clone() if _by_row(each, count) else torch.zeros_like(each)
                    for name, each in named.items()
                }
                made_state = self._named(self._made[table])
                begin |= {n: each for n, each in made_state.items() if not _by_row(each, count)}
                state = {
                    name: of.expand(count, *of.shape[1:]).clone() if of.dim() else of.clone()
                    for name, of in begin.items()
                }
            moved = {name: each.clone() for name, each in state.items()}
            for place, row in enumerate(ids.tolist()):  # another server may have the others
                own = {n: each[row : row + 1] if each.dim() else each for n, each in state.items()}
                own = self.move(table, rows[row : row + 1], gradient[place : place + 1], own)
                for name, each in own.items():
                    if each.dim():
                        moved[name][row] = each[0]
                    else:
                        moved[name] = each
            state = moved
            alike = named.keys() == state.keys() and _near(rows, whole, ids)
            if not alike or not all(_near(state[name], each, ids) for name, each in named.items()):
                return False, {}
        return True, begin or {}

    def move(
        self, table: int, rows: Tensor, gradient: Tensor, state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """As `RowMover.move`."""
        count, spare = len(rows), not len(rows)
        if spare:  # the table has a step, and of its rows here none has a part in it
            rows, gradient = (
                rows.new_zeros(1, *rows.shape[1:]),
                gradient.new_zeros(1, *rows.shape[1:]),
            )
            state = {n: s.new_zeros(1, *s.shape[1:]) if s.dim() else s for n, s in state.items()}
        kept = dict(taken(name, value) for name, value in state.items())
        kept = self._step(table, rows, torch.arange(len(rows)), gradient, kept)
        return {n: s[:count] if s.dim() and spare else s for n, s in self._named(kept).items()}

    def _named(self, kept: Mapping[str, Any]) -> dict[str, Tensor]:
        return dict(kept_as(n, value, self._optimizer, _WHERE) for n, value in kept.items())

    def _step(
        self, table: int, rows: Tensor, ids: Tensor, gradient: Tensor, kept: dict[str, Any]
    ) -> dict[str, Any]:
        """One step of the optimizer, of these rows alone, in place; the state that it keeps."""
        own = nn.Parameter(rows, requires_grad=False)
        vars(own).update(vars(self._tables[table].sample))
        own.requires_grad_()
        own.grad = torch.sparse_coo_tensor(
            ids[None], gradient, rows.shape, is_coalesced=True, check_invariants=False
        )
        with self._only(table, own, kept):
            self._optimizer.step()
            self._check_beside(table)
            return dict(self._optimizer.state[own])

    def _check_beside(self, table: int) -> None:
        optimizer = self._optimizer
        begin = name_of_part(optimizer, self._groups[table])
        for name in beside(optimizer.state):
            if name.startswith(begin):
                raise RecipeError(
                    f"the optimizer {type(optimizer).__name__} keeps "
                    f"{name.removeprefix(begin)!r} for no parameter in its state, and the rows of "
                    f"the embedding {self._tables[table].name!r} move by themselves on servers. "
                    f"{_REMEDY}"
                )

    @contextmanager
    def _only(self, table: int, own: nn.Parameter, kept: dict[str, Any]) -> Iterator[None]:
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        whole, state = [group["params"] for group in groups], optimizer.state
        optimizer.state = defaultdict(dict, {own: kept} if kept else {})
        for number, group in enumerate(groups):
            group["params"] = [own] if number == self._groups[table] else []
        try:
            yield
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
            optimizer.state = state


_REMEDY = (
    "Use SGD without momentum and weight decay, Adagrad, SparseAdam or instep.RowwiseAdagrad for "
    "it; Recipe.optimizer may return a list of optimizers."
)


def _near(one: Tensor, other: Tensor, ids: Tensor) -> bool:
    """Whether two tables are equal, and their rows `ids` up to rounding: a row is summed otherwise
    when it is one of several."""
    if not other.dim() or not other.is_floating_point() or one.shape != other.shape:
        return torch.equal(one, other)
    one, other = one.nan_to_num().clone(), other.nan_to_num()
    rounding = 8 * torch.finfo(other.dtype).eps * other[ids].norm()
    if bool((one[ids] - other[ids]).norm() <= rounding):
        one[ids] = other[ids]
    return torch.equal(one, other)


def _by_row(each: Tensor, rows: int) -> bool:
    return each.dim() > 0 and len(each) == rows
