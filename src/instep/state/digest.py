"""A digest of a tensor's bits, computed about as fast as they can be read.

Tensors with different bits almost always have different digests; with one flipped bit,
always. It detects faults of the machine, not forgery. The same bits give the same digest on
every machine and device. Way in: `digests` for tensors, `combined` for several digests,
`MemoryWatch` for memory that must not change.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

_COLUMNS = 512
"""Words are summed in this many columns, which stay in the cache; only the sums are mixed."""

_STEP, _FIRST, _SECOND = (
    np.uint64(number)
    for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64's
)

Words: TypeAlias = "np.ndarray[Any, Any]"


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """A digest of each tensor's values, from 0 to below 2**64.

    Args:
        tensors: dense or sparse, of any type and layout in memory, on any device.
    """
    sums = [_sums(tensor) for tensor in tensors]
    found: list[int] = _mixed(np.stack(sums)).sum(axis=1).tolist() if sums else []
    return found


def combined(several: Sequence[int]) -> int:
    """One digest of several, in their order."""
    return int(_mixed(np.array(several, dtype=np.uint64)).sum())


def _mixed(words: Words) -> Words:
    """Mix each word with its index, so that every bit of the result depends on all of its bits.

    A plain sum would not detect two flips of a word's highest bit.
    """
    mixed = words + np.arange(1, words.shape[-1] + 1, dtype=np.uint64) * _STEP
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= factor
    mixed ^= mixed >> np.uint64(31)
    return mixed


@torch.no_grad()
def _sums(tensor: Tensor) -> Words:
    """[columns] uint64: the sum of every 512th word of a tensor."""
    if tensor.layout != torch.strided:
        whole = tensor.coalesce()
        parts = digests([whole.indices(), whole.values()])
        return _sums(torch.tensor(np.array(parts, dtype=np.uint64).view(np.int64)))
    flat = _bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
    rows = len(flat) // (8 * _COLUMNS)
    cut = rows * 8 * _COLUMNS
    rest = np.zeros(8 * _COLUMNS, dtype=np.uint8)
    rest[: len(flat) - cut] = flat[cut:].cpu().numpy()
    sums = rest.view(np.uint64)
    if rows:
        sums += _column_sums(flat[:cut], rows)
    return sums


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, [bytes] uint8."""
    # strided by hand: a tensor of one element may have any stride, which `view` refuses
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _column_sums(flat: Tensor, rows: int) -> Words:
    if flat.device.type == "cpu":  # numpy: torch 2.13 takes three times as long here
        sums: Words = np.add.reduce(flat.numpy().view(np.uint64).reshape(rows, _COLUMNS), axis=0)
        return sums
    return _column_sums_by_torch(flat, rows)


def _column_sums_by_torch(flat: Tensor, rows: int) -> Words:
    sums: Words = flat.view(torch.int64).view(rows, _COLUMNS).sum(0).cpu().numpy()
    return sums.view(np.uint64)


# ---- memory that must not change

_PIECE = 1 << 17
"""Words of a piece, which is checked as a whole."""

_ALWAYS = 1 << 15
"""Words that are checked each time, whatever it costs: about 50 us."""

_RECENT = 8
"""The number of turns whose costs are remembered."""


class MemoryPiece(NamedTuple):
    """A part of a tensor's memory."""

    name: str
    """Of the tensor."""
    words: Any
    """[words] int64, or the last bytes [up to 7] uint8; numpy's on the CPU, for it is quicker."""


class MemoryWatch:
    """Detects changes of named tensors since they were last written.

    Each turn checks only as many of them as `share` of the time allows, in rotation.

    Args:
        named: name to tensor, contiguous or channels-last; others are not watched.
        share: the largest share of the time from one `record` to the next.
        clock: gives seconds.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        share: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tensors = [(name, tensor) for name, tensor in named if _straight(tensor) is not None]
        self._share, self._clock = share, clock
        self._where: list[int] = []
        self._pieces: list[MemoryPiece] = []
        self._taken: list[Any] = []
        self._window: list[MemoryPiece] = []
        self._next, self._count, self._least = 0, 1 << 30, 1
        self._cost_s, self._since = 0.0, self._clock()
        self._costs_s, self._passed_s = deque[float](maxlen=_RECENT), deque[float](maxlen=_RECENT)

    @property
    def covered(self) -> float:
        """The share of the pieces that the last `record` covered."""
        return len(self._window) / max(1, len(self._pieces))

    def record(self) -> None:
        """The tensors were written, and must not change until the next `record`."""
        now = self._clock()
        self._settle_count(now - self._since)
        self._since = now
        where = [tensor.data_ptr() for _, tensor in self._tensors]
        if where != self._where:
            self._where, self._pieces = where, list(_cut(self._tensors))
            largest = max((len(piece.words) for piece in self._pieces), default=1)
            self._least = max(1, _ALWAYS // largest)
        count = min(max(self._count, self._least), len(self._pieces))
        first, self._next = self._next, (self._next + count) % max(1, len(self._pieces))
        around = self._pieces[first:] + self._pieces[:first]
        self._window = around[:count]
        self._taken = _plain_sums(self._window)
        self._cost_s = self._clock() - now if count else 0.0

    def find_change(self) -> str | None:
        """The name of a recorded tensor that has changed since; normally None."""
        begin = self._clock()
        changed = None
        if [tensor.data_ptr() for _, tensor in self._tensors] == self._where:
            sums = _plain_sums(self._window)
            if sums != self._taken:
                places = zip(self._window, sums, self._taken, strict=True)
                changed = next(piece.name for piece, now, before in places if now != before)
        self._cost_s += self._clock() - begin
        return changed

    def _settle_count(self, passed_s: float) -> None:
        """Set how many pieces the next turn may check, from the cost of the last turns."""
        if self._cost_s > 0:
            self._costs_s.append(self._cost_s / len(self._window))
            self._passed_s.append(passed_s)
            fitting = self._share * sum(self._passed_s) / sum(self._costs_s)
            self._count = int(fitting)


def _plain_sums(pieces: Sequence[MemoryPiece]) -> list[Any]:
    if pieces and isinstance(pieces[0].words, Tensor):
        sums: list[Any] = torch.stack([piece.words.sum() for piece in pieces]).tolist()
        return sums
    return [np.add.reduce(piece.words) for piece in pieces]


def _straight(tensor: Tensor) -> Tensor | None:
    """A tensor's memory as one vector, if its elements are contiguous."""
    plain = tensor.detach()
    if plain.layout == torch.strided and plain.is_contiguous():
        return plain.reshape(-1)
    if plain.dim() == 4 and plain.is_contiguous(memory_format=torch.channels_last):
        return plain.permute(0, 2, 3, 1).reshape(-1)
    return None


def _cut(tensors: Iterable[tuple[str, Tensor]]) -> Iterable[MemoryPiece]:
    for name, tensor in tensors:
        straight = _straight(tensor)
        assert straight is not None, name
        flat = _bytes(straight)
        even = len(flat) // 8 * 8
        parts = list(flat[:even].view(torch.int64).split(_PIECE)) if even else []
        parts += [flat[even:]] if even < len(flat) else []
        yield from (MemoryPiece(name, p.numpy() if p.device.type == "cpu" else p) for p in parts)
