"""A model of a participant's own, all the time, of which one fragment after the other is shared.

Part of what participants remember (`local_states.py`). Which fragments have agreed meanwhile, and
on what, `sync/rounds/streaming.py` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.sync.rounds.segments import Stretch
from instep.worker.rounds.local_states import VALUES


class LocalModel:
    """The values of all that is trained, in the parameters while a participant takes its steps.

    Args:
        parameters: they hold the shared values when a participant begins.
        agreed_since: of a participant, the fragments whose values have been agreed on since.
    """

    def __init__(
        self, parameters: Sequence[Parameter], agreed_since: Callable[[int], Iterable[Stretch]]
    ) -> None:
        self._parameters, self._agreed_since = list(parameters), agreed_since

    @torch.no_grad()
    def pack(self) -> dict[str, Tensor]:
        """The participant's values, [elements] float32."""
        return {VALUES: torch.cat([each.flatten().float() for each in self._parameters])}

    def resume(self, participant: int, tensors: Mapping[str, Tensor]) -> None:
        """Its own values, but for fragments that were agreed on since it left them."""
        values = tensors[VALUES].to(self._parameters[0].device, copy=True)
        shared = self.pack()[VALUES]
        for start, stop in self._agreed_since(participant):
            values[start:stop] = shared[start:stop]
        self._put(values)

    def take(self, fragment: Stretch, shared: Tensor, mixing: float) -> None:
        """Move to the shared values of a fragment; `mixing` of the participant's own stays."""
        (start, stop), values = fragment, self.pack()[VALUES]
        values[start:stop] = shared + mixing * (values[start:stop] - shared)
        self._put(values)

    @torch.no_grad()
    def _put(self, values: Tensor) -> None:
        at = 0
        for parameter in self._parameters:
            parameter.copy_(values[at : at + parameter.numel()].view(parameter.shape))
            at += parameter.numel()
