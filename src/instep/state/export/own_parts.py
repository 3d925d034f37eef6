"""The model of one participant: what all share, with what is this participant's own.

Where participants have something of their own, a checkpoint has that of all of them. Way in:
`write_model_of`.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from instep.errors import CheckpointError
from instep.state.files.manifest import AVERAGE
from instep.state.load import load


def write_model_of(checkpoint: Path, participant: int, target: Path) -> int:
    """Write the model of a participant into a safetensors file.

    Returns:
        The file's bytes.

    Raises:
        CheckpointError: the checkpoint is damaged, or has nothing of this participant's own.
    """
    tensors = load(checkpoint).tensors
    begin, end = "kept/", "/parameters/"
    own: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.get("strategy", {}).items():
        number, found, parameter = name.removeprefix(begin).partition(end)
        if name.startswith(begin) and found:
            own.setdefault(number, {})[parameter] = tensor
    if str(participant) not in own:
        there = ", ".join(sorted(own, key=int)) or "none"
        raise CheckpointError(
            f"--participant {participant}: {checkpoint} has parameters of participants' own, by "
            f"sync.options.local_parameters, of {there}. Name one of these, or leave it out."
        )
    model = {**tensors["model"], **tensors.get(AVERAGE, {}), **own[str(participant)]}
    save_file({name: model[name].clone().contiguous() for name in model}, target)
    return target.stat().st_size
