"""Random numbers for activations that are cut: each rank takes its part of the whole draw.

All ranks of a tensor axis have the same random state. Where one draws for a part of a tensor, as
dropout between two cut layers does, it draws for the whole tensor and takes its part: so masks are
those of one process, differ between ranks, and all generators stay alike. Generators and layers
are not known here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from instep.errors import RecipeError
from instep.parallel.tensor.links import Links
from instep.parallel.tensor.plan import Draw

Whole = Callable[[int, Sequence[int]], tuple[int, int, tuple[int, int]] | None]
"""From the number of a draw and its shape here: the dimension that is cut, its whole size, and this
rank's part of it, [first, stop)."""

_innermost: list[CutDraws] = []


class CutDraws(TorchDispatchMode):
    """In this context, one call of a module, draws on cut activations are parts of whole draws.

    Args:
        whole: says which are.
    """

    def __init__(self, whole: Whole) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole, self._number = whole, 0

    def __enter__(self) -> CutDraws:
        _innermost.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        _innermost.remove(self)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Take the part of a draw; pass on everything else."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _innermost[-1] is not self:
            return func(*args, **kwargs)
        name = func._schema.name
        if not (name.endswith(("_", "_like")) or name in _DRAWS):
            return _drawing_nothing(func, args, kwargs)
        tensor = args[0] if isinstance(args[0], Tensor) else None
        shape = args[0] if tensor is None else tensor.shape
        cut = self._whole(self._number, shape)
        self._number += 1
        if cut is None:
            return func(*args, **kwargs)
        dim, size, (first, stop) = cut
        if tensor is None:
            sizes = [*shape[:dim], size, *shape[dim + 1 :]]
            return func(sizes, *args[1:], **kwargs).narrow(dim, first, stop - first).clone()
        wide = _widened(tensor, dim, size)
        if name == "aten::native_dropout":
            made, mask = func(wide.fill_(1), *args[1:], **kwargs)
            made, mask = (each.narrow(dim, first, stop - first).clone() for each in (made, mask))
            return tensor * made, mask
        made = func(wide, *args[1:], **kwargs).narrow(dim, first, stop - first)
        return tensor.copy_(made) if name.endswith("_") else made.clone()


_DRAWS = ("aten::native_dropout", "aten::rand", "aten::randn")
"""Besides those that fill a tensor (`bernoulli_`), or draw as many as another has (`rand_like`)."""


def _drawing_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation that may draw, such as attention with a dropout of 0."""
    before = torch.get_rng_state()
    made = func(*args, **kwargs)
    if not torch.equal(before, torch.get_rng_state()):
        raise RecipeError(
            f"torch's {func._schema.name.removeprefix('aten::')} draws random numbers beside "
            "activations that tensor parallelism cuts, and cannot draw a part of them. Draw with "
            "dropout or rand_like; or keep its layers whole: mesh.plan."
        )
    return made


def _widened(like: Tensor, dim: int, size: int) -> Tensor:
    """An empty tensor with another size and the same order of memory: draws go in that order."""
    order = sorted(range(like.dim()), key=lambda each: (-like.stride()[each], each))
    shape = [*like.shape[:dim], size, *like.shape[dim + 1 :]]
    made = like.new_empty([shape[each] for each in order])
    return made.permute([order.index(each) for each in range(like.dim())])


def around(module: nn.Module, make: Callable[[], CutDraws]) -> Callable[[], None]:
    """Have each call of a module run within new `CutDraws`; returns what undoes it.

    It is the module's `forward` that changes: a block that runs again in the backward pass, as
    `recompute.py` has it, then draws as it did.
    """
    own = module.__dict__.get("forward")
    made: Any = partial(_within, module, own, make)
    made.__signature__ = inspect.signature(module.forward)
    module.__dict__["forward"] = made

    def undo() -> None:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own

    return undo


def _within(
    module: nn.Module,
    own: Callable[..., Any] | None,
    make: Callable[[], CutDraws],
    *arguments: Any,
    **options: Any,
) -> Any:
    """The module's forward pass; its class's, unless it has one of its own."""
    with make():
        return (own or partial(type(module).forward, module))(*arguments, **options)


def as_planned(draws: Sequence[Draw | None], links: Links, name: str) -> Whole:
    """The draws of a module as the plan found them.

    Raises:
        RecipeError: when it draws more often than it did when the plan was made.
    """

    def whole(number: int, shape: Sequence[int]) -> tuple[int, int, tuple[int, int]] | None:
        if number >= len(draws):
            raise RecipeError(
                f"{name or 'the model'} draws random numbers more often than the {len(draws)} "
                "times for which its tensor plan was made: which are for cut activations is not "
                "known. Draw equally often in each call, or set mesh.tensor to 1."
            )
        draw = draws[number]
        if draw is None:
            return None
        if draw.stretch:
            length = links.lengths[draw.stretch]
            return draw.dim, length, links.share(length)
        size = shape[draw.dim] * links.ranks
        return draw.dim, size, links.part(size)

    return whole
