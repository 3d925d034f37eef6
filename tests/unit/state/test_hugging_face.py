"""An export that `from_pretrained` opens, of a run's end, of a checkpoint, and of parts."""

import json

import torch
from meshes import turn_of
from torch import nn

from instep.cli import main
from instep.engine.state.capture import CommitProgress, capture
from instep.job import file as spec_file
from instep.state.boxes import BoxCut
from instep.state.export.hugging_face import keep_config
from instep.state.files.staging import SAVING, save_model, write_tensors
from instep.state.pieces import CUTS
from instep.state.save import CheckpointShard, CheckpointWriter
from instep.state.snapshot import Snapshot, model_tensors
from instep.store.folder import make_run_folder


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def a_run(runs, model):
    job = spec_file.build({"name": "net", "recipe": "/net.py:recipe"}, source="test")
    run = make_run_folder(runs, job, named=True)
    keep_config(model, run)
    save_model(run / "model.safetensors", model, {"step": "3"})
    writer = CheckpointWriter(run / "checkpoints")
    writer.save(capture(CommitProgress(step=2), model, [turn_of(model)]))
    shards = {}
    for number, (first, stop) in enumerate([(0, 5), (5, 99)]):
        tensors = {f"model/{name}": t[first:stop] for name, t in model_tensors(model).items()}
        cuts = {
            f"model/{name}": BoxCut(
                tuple(t.shape),
                ((min(first, len(t)), min(stop, len(t))), *((0, length) for length in t.shape[1:])),
            )
            for name, t in model_tensors(model).items()
        }
        path = run / "checkpoints" / f"{SAVING}3-part-{number}-1"
        entry = write_tensors(path, tensors, {CUTS: json.dumps(cuts)})
        shards[f"part-{number}"] = CheckpointShard(path, entry)
    writer.save(Snapshot(step=3, tensors={}, facts={}), shards=shards)
    writer.finish()
    return run


def test_from_pretrained_opens_the_folder_of_a_run_and_of_each_checkpoint(tmp_path, capsys):
    model = llama()
    run = a_run(tmp_path, model)
    for number, more in enumerate([[], ["--step", "2"], ["--step", "3"]]):
        folder = tmp_path / f"out-{number}"
        assert main(["export", str(run), "--to", str(folder), *more]) == 0
        said = capsys.readouterr().out
        assert f"transformers.LlamaForCausalLM.from_pretrained('{folder}')" in said
        names = {file.name for file in folder.iterdir()}
        assert names == {"config.json", "generation_config.json", "model.safetensors"}
        found, info = type(model).from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert found.config.architectures == ["LlamaForCausalLM"]
        for name, tensor in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), (more, name)
        assert found.lm_head.weight is found.model.embed_tokens.weight


def test_a_folder_is_written_of_no_other_model_and_in_no_run(tmp_path, capsys):
    model = nn.Linear(2, 2)
    run = a_run(tmp_path, model)
    assert not (run / "huggingface").exists()
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 2
    assert "end in .safetensors. The name of a folder exports" in capsys.readouterr().err
    (run / "huggingface").mkdir()
    (run / "huggingface" / "config.json").write_text('{"architectures": ["Net"]}')
    assert main(["export", str(run), "--to", str(tmp_path / "model.pt")]) == 2
    assert "end in .safetensors" in capsys.readouterr().err
    assert main(["export", str(run), "--to", str(run / "out")]) == 2
    assert "lies in the run folder" in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == {run.name}


def test_the_class_is_the_users_own_also_when_the_model_is_sharded(tmp_path):
    class PreTrainedModel(nn.Linear):
        pass

    class Own(PreTrainedModel):
        pass

    class Config:
        def to_json_string(self):
            return json.dumps(vars(self))

    model = Own(2, 2)
    model.config = Config()
    sharded = type("FSDPOwn", (Own,), {"__module__": "torch.distributed.fsdp"})
    model.__class__ = sharded
    keep_config(model, tmp_path)
    kept = json.loads((tmp_path / "huggingface" / "config.json").read_text())
    assert kept == {"architectures": ["Own"], "dtype": "float32"}
    assert not vars(model.config)
