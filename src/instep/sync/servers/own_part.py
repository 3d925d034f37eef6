"""What a server has of the parameters in lockstep: moved, kept for the next process, and undone.

The optimizer moves a part before it is known whether the step happens. What it has made of it is
copied, with the optimizer's state, into a slot of memory that outlives the process; a step that
does not happen is undone from the other slot.

With a codec a server has its part twice: as its optimizer has it, and as the workers hold it.
Nothing here knows messages, nor how gradients are added. Way in: `OwnPart`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.records import Attempt
from instep.sync.generation import SERVED, Memory, Mover, Piece
from instep.sync.servers.copies import PARAMETERS, of_part
from instep.sync.servers.cuts import BucketSegment, Packed, ServerPart, pieces_of
from instep.sync.servers.differences import Differences
from instep.sync.servers.kept_rows import KeptRows

ROWS = "rows/"
"""In memory that outlives a server, before what a step makes of the rows of embeddings."""

_SERVED = "served/"
"""In memory that outlives a server, before its number: with a codec, the parameters of its part as
its optimizer has them, [bytes]."""


class OwnPart:
    """Of one server, in all generations of its process.

    Args:
        mine: which server it is.
        held: by server, its own part, and that of which it has a copy, as the workers hold them.
        parameters: by slot.
        mover: the optimizer.
        back: with a codec, what goes back to the workers.
    """

    def __init__(
        self,
        mine: int,
        held: Mapping[int, Packed],
        parameters: Sequence[Parameter],
        mover: Mover,
        back: Differences | None,
    ) -> None:
        self._mine, self._held, self._mover, self._back = mine, held, mover, back
        self._new = held  # what the optimizer moves
        if back is not None:
            self._new = {n: Packed(list(each.views), parameters) for n, each in held.items()}
        for packed in self._new.values():
            packed.load()  # with a codec, the optimizer has what is beyond the parameters
        views = [packed.views.items() for packed in self._new.values()]
        mover.hold({piece: Parameter(view) for every in views for piece, view in every})
        self.at: Attempt | None = None
        """Under which memory has the state of the last commit."""
        self.moved = False
        """Whether anything of it has moved since the last commit."""
        self._layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._memory: Memory
        self.rows: KeptRows | None = None
        """Of embeddings that are on this server."""

    def begin(self, memory: Memory, rows: KeptRows | None) -> None:
        """A generation begins.

        Args:
            memory: outlives the process.
            rows: of embeddings that are on this server.
        """
        self._memory, self.rows, self.moved = memory, rows, False

    def move(self, number: int, pieces: Sequence[Piece], gradients: Mapping[Piece, Tensor]) -> None:
        """Have the optimizer move pieces by the gradients that there are, in a step's commit."""
        self.moved, held = True, self._mover.held
        for piece in pieces:
            held[piece].grad = gradients.get(piece)
        self._mover.step(number, pieces)
        for piece in pieces:
            held[piece].grad = None

    def give(self, number: int, segments: Sequence[BucketSegment], there: Sequence[bool]) -> None:
        """Have what goes back to the workers be what segments are now.

        Args:
            number: of the commit.
            segments: of this server's own part.
            there: of each parameter, whether a rank has used it.
        """
        new, held, back = self._new[self._mine], self._held[self._mine], self._back
        for segment in segments if back is not None else ():
            assert back is not None
            if segment in back.payloads:
                back.encode(segment, new, there, number)
            else:
                held.of(segment).copy_(new.of(segment))

    # ---- the commit

    def stage(self, attempt: Attempt) -> None:
        """Copy the optimizer's state, and what it has moved, into the slot of a commit."""
        states = self._mover.states()
        for server, packed in self._held.items():
            states[f"{PARAMETERS}{server}"] = packed.flat
            if self._back is not None:
                states[f"{_SERVED}{server}"] = self._new[server].flat
        if self.rows is not None:
            states |= {f"{ROWS}{name}": each for name, each in self.rows.staged().items()}
        layout = {name: (tuple(state.shape), state.dtype) for name, state in states.items()}
        if layout != self._layout:  # an optimizer makes its state in its first steps
            self._memory.lay_out(layout)
            self._layout = layout
        slot = self._memory.stage(*attempt)
        with torch.no_grad():
            for name, state in states.items():
                slot[name].copy_(state)
        self._memory.staged(*attempt)

    def apply(self, attempt: Attempt) -> None:
        """The step happens: what was staged for it is the state of the last commit."""
        if self.rows is not None:
            self.rows.apply()
        self.at, self.moved = attempt, False

    def undo(self, attempt: Attempt) -> None:
        """Be where the last commit left it; what was staged for this one is of no use."""
        if not self.moved:
            return
        assert self.at is not None
        before = self._memory.at(*self.at)
        assert before is not None, "the slot of the last commit is kept"
        self.take(before)
        for packed in self._held.values():
            packed.load()
        self._memory.forget(*attempt)
        self.moved = False

    def abandon(self, attempt: Attempt) -> None:
        """The step does not happen."""
        self.undo(attempt)
        if self.rows is not None:
            self.rows.abandon()

    # ---- from elsewhere

    def take(self, left: Mapping[str, Tensor]) -> None:
        """Be where this was left in memory, here or by the process before."""
        beside = (PARAMETERS, ROWS, _SERVED)
        self._mover.load_states({n: each for n, each in left.items() if not n.startswith(beside)})
        for server, packed in self._new.items() if self._back is not None else ():
            packed.flat.copy_(left[f"{_SERVED}{server}"])

    def states(self, part: ServerPart) -> dict[str, Tensor]:
        """What the optimizer has for this server's part, as in a checkpoint; with a codec also the
        parameters, which workers hold otherwise."""
        states = of_part(part, self._mover.states())
        for piece in pieces_of(list(self._back.payloads) if self._back is not None else ()):
            name = f"{piece.slot}/{SERVED}/{piece.start}:{piece.stop}"
            states[name] = self._new[self._mine].views[piece]
        return {f"optimizer/{name}": state for name, state in states.items()}


def rows_of(left: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the process before has left of the rows of embeddings."""
    return {n.removeprefix(ROWS): each for n, each in left.items() if n.startswith(ROWS)}
