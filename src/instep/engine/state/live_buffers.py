"""The buffers of a model beside their committed values: which of them a pass has moved.

A change is seen by torch's version counter, which costs no look at the values.
But batch normalisation moves its running statistics without counting (torch
2.11 to 2.13). So values are compared too: of all buffers after the first pass,
of a module's other buffers where one was seen to move, and always of what has
the form of such statistics. What was once found to move uncounted is from then
on taken to move in every pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from instep.errors import RecipeError
from instep.state.sized import in_own_memory, resized
from instep.state.snapshot import TYPES

DTYPES = tuple(TYPES.values())
"""Those that a buffer may have."""

DIMS = 8
"""Dimensions that a buffer may have, if passes give it its shape."""


class LiveBuffers:
    """The buffers of one model, each once, and the values that they had at the last commit.

    Args:
        model: whose.
    """

    def __init__(self, model: nn.Module) -> None:
        owners = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        unique = {
            (module, name) if buffer is None else id(buffer): (module, name, buffer)
            for module, name, buffer in owners
        }
        self.owners = [(module, name) for module, name, _ in unique.values()]
        """The module of each, and its name there."""
        self.live = [buffer for _, _, buffer in unique.values()]
        """The buffers themselves; None for one that has no value yet."""
        self.committed = [None if b is None else b.detach().clone() for b in self.live]
        """The values to which `restore` brings them back."""
        self.uncounted: set[int] = set()
        """Those that passes move without counting."""
        self._versions = [-1 if b is None else b._version for b in self.live]
        self._compared = False
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.live)

    def begin_step(self) -> None:
        """Passes are about to run, and may give buffers their shape."""
        for live in self.live:
            if live is not None:
                in_own_memory(live)

    def seen(self) -> None:
        """Note that a pass was looked at whole."""
        self._compared = True

    def moved(self) -> list[int]:
        """Find which buffers the pass has moved, or must be taken to have moved."""
        present = [i for i, (m, name) in enumerate(self.owners) if m._buffers[name] is not None]
        counted = {i for i in present if self._counted(i)}
        modules = {id(self.owners[i][0]) for i in counted}
        for i in set(present) - counted - self.uncounted:
            if (
                not self._compared
                or id(self.owners[i][0]) in modules
                or _like_statistics(self.live[i])
            ):
                self.uncounted |= {i} if self.differs(i) else set()
        return [i for i in present if i in counted or i in self.uncounted]

    def _counted(self, index: int) -> bool:
        module, name = self.owners[index]
        now, live = module._buffers[name], self.live[index]
        return now is not live or live is None or live._version != self._versions[index]

    def differs(self, index: int) -> bool:
        """Compare the values of a buffer with the committed ones."""
        module, name = self.owners[index]
        now, committed = module._buffers[name], self.committed[index]
        return now is None or committed is None or not torch.equal(now, committed)

    def now(self, index: int, by: str) -> Tensor:
        """The buffer as it is.

        Args:
            index: its number.
            by: who wrote it, for the error.

        Raises:
            RecipeError: nothing else than a real buffer of few dimensions can be agreed on.
        """
        module, name = self.owners[index]
        now = module._buffers[name]
        assert now is not None
        if now.is_complex() or now.dim() > DIMS or now.dtype not in DTYPES:
            raise RecipeError(
                f"{by} wrote {now.dtype} {list(now.shape)} to the buffer {name!r} of a "
                f"{type(module).__name__}: a buffer that it writes must be real, and of at most "
                f"{DIMS} dimensions."
            )
        return now

    def in_shape(self, index: int, by: str, why: str = "") -> tuple[Tensor, Tensor]:
        """The buffer as it is, and its committed value, if both have one shape.

        Args:
            index, by: as for `now`.
            why: it must keep its shape, and what to do.

        Raises:
            RecipeError: it has another shape.
        """
        now, committed = self.now(index, by), self.committed[index]
        if committed is not None and committed.shape == now.shape:
            return now, committed
        module, name = self.owners[index]
        before = "None" if committed is None else f"shape {list(committed.shape)}"
        raise RecipeError(
            f"{by} changed the buffer {name!r} of a {type(module).__name__} from {before} to "
            f"shape {list(now.shape)}: a buffer that it writes must keep its shape.{why}"
        )

    @torch.no_grad()
    def move(self, moved: Mapping[int, Tensor]) -> None:
        """Give some of them other values than the committed ones."""
        for index, value in moved.items():
            module, name = self.owners[index]
            buffer = module._buffers[name]
            if buffer is None:
                module._buffers[name] = value.clone()
            else:
                resized(buffer, value.shape).copy_(value)

    def restore(self, index: int) -> None:
        """Give a buffer its committed value."""
        (module, name), committed = self.owners[index], self.committed[index]
        live = self.live[index]
        if committed is not None:
            live = committed.clone() if live is None else resized(live, committed.shape)
            live.copy_(committed)
            self._versions[index] = live._version
        self.live[index] = module._buffers[name] = live

    @torch.no_grad()
    def restore_all(self) -> None:
        """Give every buffer that has a value its committed one."""
        for index, (module, name) in enumerate(self.owners):
            if module._buffers[name] is not None:
                self.restore(index)

    def device(self, index: int) -> torch.device:
        """Where a buffer lies, or will."""
        live = self.live[index]
        return self._device if live is None else live.device


def _like_statistics(live: Tensor | None) -> bool:
    return live is not None and live.dim() == 1 and live.is_floating_point()
