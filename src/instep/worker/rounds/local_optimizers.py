"""An optimizer's state as plain tensors, to be kept for one participant while others step.

Part of what participants remember (`local_states.py`); whose state it is, is not known here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.comm.dtensors import is_split, split_like
from instep.engine.state.capture import lay_out_state
from instep.errors import CheckpointError, RecipeError
from instep.state.packing import pack_state, unpack_state

SKELETON = "skeleton"
"""The name of the bytes that say what the other tensors of a state are."""


class LocalOptimizers:
    """The state of the one optimizer that takes every participant's steps.

    Args:
        optimizer: it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._device = self._parameters[0].device

    def resume(self, participant: int, tensors: Mapping[str, Tensor]) -> None:
        """Give the optimizer a copy of what `pack` gave."""
        tensors = dict(tensors)
        skeleton = json.loads(bytes(tensors.pop(SKELETON).cpu().numpy()))
        on_cpu = set(skeleton["on_cpu"])
        copies = {
            name: tensor.to("cpu" if name in on_cpu else self._device, copy=True)
            for name, tensor in tensors.items()
        }
        state = unpack_state(copies, skeleton["state"])
        for number, name in skeleton["split"]:
            parameter = self._parameters[number]
            assert is_split(parameter), "the mesh is that of the run"
            state[number][name] = split_like(parameter, state[number][name])
        own: defaultdict[Any, Any] = defaultdict(
            dict,
            {
                of if isinstance(of, str) else self._parameters[of]: kept
                for of, kept in state.items()
            },
        )
        self._optimizer.state = own
        lay_out_state(self._optimizer.state)

    def pack(self) -> dict[str, Tensor]:
        """The optimizer's state; it refers to the optimizer's own tensors.

        Raises:
            RecipeError: there is something in it that other processes cannot be given.
        """
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        split = list[tuple[int, str]]()
        try:
            every: dict[Any, Any] = self._optimizer.state
            moved = {numbers[p]: dict(kept) for p, kept in every.items() if p in numbers}
            others = {of: kept for of, kept in every.items() if of not in numbers}
            state: dict[Any, Any] = {**others, **moved}
            for number, kept in moved.items():
                for name, value in kept.items():
                    if isinstance(value, Tensor) and is_split(value):
                        split.append((number, name))
                        kept[name] = value.to_local()
            tensors, packed = pack_state(state)
        except (CheckpointError, KeyError) as error:
            raise RecipeError(
                f"the optimizer {type(self._optimizer).__name__} has a state that other processes "
                f"cannot be given, as sync.options.local_optimizers = 'kept' needs: {error} Use "
                "'reset'."
            ) from error
        on_cpu = [name for name, tensor in tensors.items() if tensor.device.type == "cpu"]
        text = json.dumps({"state": packed, "on_cpu": on_cpu, "split": split})
        skeleton = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        tensors[SKELETON] = skeleton
        return tensors
