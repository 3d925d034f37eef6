"""DTensors, of which a rank has a part: to recognise one, to take its part, to make one like it.

DTensor is imported only where there is one: that takes half as long as importing torch. Which part
of the whole it is, is known to `state/boxes.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = frozenset({Tensor, nn.Parameter})


def is_split(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, of which a rank has a part."""
    if type(tensor) in _PLAIN:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, through which gradients flow; any other tensor is whole."""
    return tensor.to_local() if is_split(tensor) else tensor


def split_like(whole: DTensor, part: Tensor) -> DTensor:
    """A DTensor of which this rank has `part`, split as another one is; nothing is sent."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.size(),
        stride=whole.stride(),
    )
