"""Which file a run starts from, and whether it can be one; looked at before any process starts.

It imports no torch: a client asks it first, and each worker again. What is
done with the file is for `tuning.py`.
"""

from __future__ import annotations

from pathlib import Path

from instep.errors import SpecError, near_miss
from instep.spec import StartSpec
from instep.state.manifest import FOLDER, read_manifest
from instep.state.sharded import INDEX, MODEL, model_in, open_model
from instep.store.folder import ID
from instep.words import command


def start_file(start: StartSpec) -> Path | None:
    """The safetensors file of `start.model`, or the index of several, with headers checked.

    None if the job names none.

    Raises:
        SpecError: there is no such file, or the folder has no model in it.
        RunError: the folder is of a run of another format.
        CheckpointError: it is not a valid safetensors file, or of a checkpoint of another format.
    """
    if not start.model:
        return None
    path = Path(start.model)
    if path.is_dir():
        if not (model := model_in(path)).is_file():
            if any(path.glob("part-*.safetensors")):
                step = path.name.removeprefix("step-").lstrip("0")
                again = command(
                    "export", path.parent.parent, f"--step {step} --to FILE.safetensors"
                )
                raise SpecError(
                    f"start.model = {start.model!r}: the ranks of a mesh saved this checkpoint in "
                    f"parts. Make one file of its model, and give that: {again}"
                )
            if convert := _how_to_convert(path):
                raise SpecError(f"start.model = {start.model!r}: {convert}")
            raise SpecError(
                f"start.model = {start.model!r}: this folder holds no {MODEL}. "
                "Give the folder of a run that has ended, or a safetensors file."
            )
        if all((path / name).is_file() for name in ("job.toml", ID)):
            from instep.store.run_folder import check_format  # which imports numpy

            check_format(path)
        elif FOLDER.fullmatch(path.name):
            read_manifest(path)
        path = model
    if not path.exists():
        beside = [each.name for each in path.parent.glob("*.safetensors")]
        near = near_miss(path.name, beside) if beside else "It is relative to the job file."
        raise SpecError(f"start.model = {start.model!r}: there is no such file. {near}")
    with open_model(path):
        return path


def _how_to_convert(folder: Path) -> str:
    """What to do with the folder of another program; empty where it is not known.

    None of them is read here: their metadata or their tensors are pickles, which may hold code.
    """
    if own := sorted(each.name for each in folder.glob(f"*.safetensors{INDEX}")):
        return f"this folder has its model under a name of its own. Give {own[0]} in it."
    if (folder / ".metadata").is_file() or any(folder.glob("*.distcp")):
        return (
            "this folder is a checkpoint of torch.distributed.checkpoint, whose metadata is a "
            "pickle, which may hold code. If you trust it, convert it: python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} model.pt, then "
            "safetensors.torch.save_file of the model's state dict in torch.load('model.pt')."
        )
    states = ("zero_to_fp32.py", "*_optim_states.pt", "mp_rank_*_model_states.pt")
    if any(any(folder.glob(each)) for each in states) or any(folder.glob("global_step*/*.pt")):
        return (
            "this folder is a checkpoint of DeepSpeed, whose files are pickles, which may hold "
            "code. If you trust it, convert it with the script that DeepSpeed left in the folder: "
            "python zero_to_fp32.py . OUTPUT --safe_serialization --max_shard_size 1TB, and give "
            "OUTPUT."
        )
    if any(folder.glob("pytorch_model*.bin")):
        return (
            "this folder has its model as files of torch.save, which may hold code. If you trust "
            "it, load the model with its library and save it again: model.save_pretrained(folder, "
            "safe_serialization=True, max_shard_size='1TB')."
        )
    return ""
