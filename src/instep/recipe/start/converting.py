"""Folders of other programs that hold a model, and how to make one of them that a run starts from.

None of them is read: their metadata or their tensors are pickles, which may hold code. They are
known by the names in them. Way in: `how_to_convert`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from instep.state.files.sharded import INDEX

_DEEPSPEED = (
    *("zero_to_fp32.py", "*_optim_states.pt", "mp_rank_*_model_states.pt"),
    "global_step*/*.pt",
)


def how_to_convert(names: Sequence[str], folder: str) -> str:
    """What to do with the folder of another program; empty where it is not known.

    Args:
        names: in the folder.
        folder: for the message.
    """
    if own := _matching(names, f"*.safetensors{INDEX}"):
        return f"this folder has its model under a name of its own. Give {own[0]} in it."
    if _matching(names, ".metadata", "*.distcp"):
        return (
            "this folder is a checkpoint of torch.distributed.checkpoint, whose metadata is a "
            "pickle, which may hold code. If you trust it, convert it: python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} model.pt, then "
            "safetensors.torch.save_file of the model's state dict in torch.load('model.pt')."
        )
    if _matching(names, *_DEEPSPEED):
        return (
            "this folder is a checkpoint of DeepSpeed, whose files are pickles, which may hold "
            "code. If you trust it, convert it with the script that DeepSpeed left in the folder: "
            "python zero_to_fp32.py . OUTPUT --safe_serialization --max_shard_size 1TB, and give "
            "OUTPUT."
        )
    if _matching(names, "pytorch_model*.bin"):
        return (
            "this folder has its model as files of torch.save, which may hold code. If you trust "
            "it, load the model with its library and save it again: model.save_pretrained(folder, "
            "safe_serialization=True, max_shard_size='1TB')."
        )
    return ""


def _matching(names: Sequence[str], *patterns: str) -> list[str]:
    return sorted(name for name in names if any(fnmatchcase(name, each) for each in patterns))
