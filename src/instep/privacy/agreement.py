"""How workers agree on a private step: all-reduce of whole numbers, and noise on the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm
from instep.privacy.sums import PrivateSums
from instep.sync.all_reduce import AllReduce
from instep.sync.sums import Sums


class PrivateAllReduce(AllReduce):
    """Sums whole numbers over the workers; each then adds the same noise.

    Args:
        make: the sums of these parameters.
        write: called on each rank with commit and tag of each sum, before it uses anything of it.
            Any rank may be the only one that lives to use it.
    """

    def __init__(
        self,
        make: Callable[[Sequence[Tensor]], PrivateSums],
        write: Callable[[int, bytes], None] = lambda commit, tag: None,
    ) -> None:
        super().__init__()
        self._make, self._write = make, write

    def _make_sums(self, parameters: Sequence[Parameter], comm: Comm, parts: int) -> Sums:
        self._private = self._make(parameters)
        return self._private

    def exchange(self, notes: Tensor) -> Tensor | None:
        """Exchange as `AllReduce` does; then choose the noise of the step."""
        agreed = super().exchange(notes)
        assert all(self._agreed), "a step without samples has zeros"
        views = [self._home[slot][1] for slot in range(len(self._parameters))]
        number = self._attempt.number
        self._write(number, self._private.seal(number, views))
        return agreed
