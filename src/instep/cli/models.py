"""The commands that use the model of a run."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli.parsing import Parser, add_set
from instep.cli.saying import say, say_aside
from instep.errors import INTERRUPTED, CheckpointError, RunError, SpecError

if TYPE_CHECKING:
    from instep.store.run_folder import RunFolder


def export(args: argparse.Namespace) -> int:
    """Copy the model of a run into a file or a Hugging Face folder, or its LoRA adapter."""
    from instep.state.export.export import check_target, choose, writing_to
    from instep.state.export.hugging_face import copy_config
    from instep.state.retention import Best
    from instep.store.run_folder import RunFolder

    folder, to = RunFolder(Path(args.run)), Path(args.to)
    _check_lora(args, folder)
    a_file = args.adapter or args.to.endswith(".safetensors")
    config = None if a_file else _config(args.to, folder.path)
    target = to if config is None else to / "model.safetensors"
    check_target(target, folder.path, folder.spec.start.model)
    model = Path(args.run) / "model.safetensors"
    kept = None
    if args.participant is not None and (args.adapter or config is not None):
        raise SpecError(
            "--participant writes a model into a .safetensors file: leave out --adapter, and name "
            "a file with --to."
        )
    if args.participant is not None and args.step is None and not args.best:
        kept = choose(Path(args.run) / "checkpoints")
    elif args.best or args.step is not None:
        best = replace(Best.by(folder.spec.checkpoint), count=1)
        kept = choose(Path(args.run) / "checkpoints", step=args.step, best=best)
    elif not model.is_file():
        raise RunError(
            f"{args.run} has no model: the run is {folder.outcome}. If it kept a checkpoint, "
            "--step or --best exports its model."
        )
    with writing_to(target):
        hugging_face = config is not None
        if args.participant is not None:
            from instep.state.export.own_parts import write_model_of

            assert kept is not None, "as chosen above"
            size = write_model_of(kept, args.participant, target)
        elif kept is not None:
            size = _write_model(kept / model.name, target, folder, args.adapter, hugging_face)
        else:
            size = _write_own(model, target, folder, args.adapter, hugging_face)
        if config is not None:
            copy_config(folder.path, to)
    what = "adapter" if args.adapter else "model"
    if args.json:
        source = str(kept) if kept else str(model)
        print(json.dumps({what: str(to), "size_bytes": size, "from": source}))
        return 0
    say(f"{what:6} {to}")
    if kept is not None:
        say(f"from   {kept}")
    if args.adapter:
        say(f"next   peft.PeftModel.from_pretrained(model, {str(to)!r})")
    elif config is None:
        say(f"next   safetensors.torch.load_file({str(to)!r})")
    else:
        say(f"next   transformers.{config['architectures'][0]}.from_pretrained({str(to)!r})")
    return 0


def _check_lora(args: argparse.Namespace, folder: RunFolder) -> None:
    if (args.adapter or args.merged) and not folder.spec.lora.modules:
        raise SpecError(
            f"{'--adapter' if args.adapter else '--merged'}: {args.run} was trained without LoRA. "
            "Leave it out to export the model."
        )


def export_options(parser: Parser) -> None:
    """Options of `instep export`."""
    parser.add_argument("run", help="run folder")
    to = "file to write; of a Hugging Face model, or with --adapter, a folder"
    parser.add_argument("--to", required=True, metavar="FILE.safetensors", help=to)
    add = parser.add_mutually_exclusive_group().add_argument
    merged = "of a run with LoRA: the whole model, adapters added to its weights (default)"
    add("--merged", action="store_true", help=merged)
    add("--adapter", action="store_true", help="of a run with LoRA: the adapter, for peft")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--best", action="store_true", help="from the kept checkpoint with the best validation")
    add("--step", type=int, metavar="N", help="from the kept checkpoint of this step")
    own = "of a run with sync.options.local_parameters: with what is this participant's own"
    parser.add_argument("--participant", type=int, metavar="N", help=own)


def _config(name: str, run: Path) -> dict[str, Any]:
    """The configuration of a run's model, for a folder that has this name.

    Raises:
        SpecError: the run's model has none, or the name is that of a file.
    """
    from instep.state.export.hugging_face import kept_config

    config = kept_config(run)
    if (
        config is None
        or Path(name).suffix in (".pt", ".pth", ".bin", ".ckpt")
        or (Path(name).is_file())
    ):
        raise SpecError(
            f"--to {name!r}: the file's name needs to end in .safetensors. The name of a folder "
            "exports a Hugging Face model with its configuration, for from_pretrained."
        )
    return config


def _write_model(
    model: Path, target: Path, folder: RunFolder, adapter: bool, hugging_face: bool
) -> int:
    """Write a model of a run: copied; or of LoRA, merged or the adapter alone. Returns its size."""
    from instep.state.export.export import copy_model, copy_own
    from instep.system.temporary import temporary_folder

    lora, of_checkpoint = folder.spec.lora, model.parent != folder.path
    if lora.modules:
        from instep.state.export.adapter import write_adapter, write_merged
        from instep.state.files.manifest import AVERAGE, file_name

        with temporary_folder(".instep-export-", target.parent) as place:
            average = model.with_name(file_name(AVERAGE)).is_file()
            if of_checkpoint and (average or not model.is_file()):  # a mesh has written parts
                whole = place / model.name
                copy_model(model.parent, whole)
                model = whole
            if adapter:
                return write_adapter(model, target, lora, folder.spec.start.model)
            return write_merged(model, target, lora, {"format": "pt"} if hugging_face else {})
    if of_checkpoint:
        return copy_model(model.parent, target, with_format=hugging_face)
    copy_own(model, target)
    return target.stat().st_size


def _write_own(
    model: Path, target: Path, folder: RunFolder, adapter: bool, hugging_face: bool
) -> int:
    """The same of a run's end; if it is damaged, name the checkpoint with the same model."""
    from instep.state.files.manifest import published
    from instep.words import command

    try:
        return _write_model(model, target, folder, adapter, hugging_face)
    except CheckpointError as error:
        step = folder.last("model_saved").get("step")
        if step not in [kept for kept, _ in published(folder.path / "checkpoints")]:
            raise
        option = " --adapter" if adapter else ""
        again = f"--step {step}{option} --to {shlex.quote(str(target))}"
        again = command("export", folder.path, again)
        raise CheckpointError(f"{error} Its checkpoint has the same model: {again}") from None


def predict(args: argparse.Namespace) -> int:
    """Predict a dataset with the model of a run or a file, each sample once and in order."""
    from instep.client.predict.command import predict as all_of

    done = all_of(
        Path(args.of),
        args.data,
        Path(args.out),
        say_aside,
        recipe=args.recipe,
        workers=args.workers,
        batch=args.batch,
        overrides=args.set,
    )
    for line in [json.dumps(done.as_table())] if args.json else done.lines():
        say(line)
    return INTERRUPTED if done.published is None else 0


def predict_options(parser: Parser) -> None:
    """Options of `instep predict`."""
    add = parser.add_argument
    add("of", metavar="RUN|FILE", help="run folder; or model file, safetensors")
    text = "function that returns the dataset: the recipe's form of samples, or inputs alone"
    add("--data", required=True, metavar="FILE.py:FUNCTION", help=text)
    text = "recipe that builds the model; needed for a model file"
    add("--recipe", metavar="FILE.py:FUNCTION", help=text)
    text = "file to write: .safetensors, .npz, .jsonl; or folder of shards (default: %(default)s)"
    add("--out", default="predictions.safetensors", metavar="FILE", help=text)
    text = "samples of a batch (default: as in a validation of the job)"
    add("--batch", type=int, metavar="N", help=text)
    add("--workers", type=int, metavar="N", help="number of worker processes")
    add_set(parser)
