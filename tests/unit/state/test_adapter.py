"""A model with adapters is exported for whoever has none of our code: merged, or for peft."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file
from test_pieces import watched
from torch import nn

from instep.errors import CheckpointError, SpecError
from instep.job.start import LoraSpec
from instep.recipe.lora import add
from instep.state.export.adapter import adapted_layers, write_adapter, write_merged
from instep.state.files.model_file import check_hash
from instep.state.files.staging import save_model
from lazily import Lazy

peft = Lazy("peft")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
        self.norm = nn.BatchNorm1d(6)
        self.head, self.other_head = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        x = self.norm(self.body(x))
        return self.head(x) + self.other_head(x)


class Twice(Net):
    def __init__(self):
        super().__init__()
        self.twin = self.body[0]  # one layer under two names

    def forward(self, x):
        return super().forward(self.twin(x))


def after_training(model, lora, path):
    """Save the model as a run with LoRA does, after all that it trains has moved."""
    add(lora, model, seed=1)
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    save_model(path, model, {"step": "7"})
    return model.eval()


def made(kind, seed=3):
    torch.manual_seed(seed)
    return kind().eval()


X = torch.linspace(-1, 1, 40).view(5, 8)
SPECS = [
    LoraSpec(modules=("body.0", "head"), rank=3),
    LoraSpec(modules=("body.*",), rank=2, alpha=5.0, also_train=("norm.*", "head.*")),
]


@pytest.mark.parametrize("kind", [Net, Twice])
@pytest.mark.parametrize("spec", SPECS)
def test_merged_it_is_the_model_without_adapters(tmp_path, spec, kind):
    trained = after_training(made(kind), spec, tmp_path / "run.safetensors")
    size = write_merged(tmp_path / "run.safetensors", tmp_path / "merged.safetensors", spec)
    assert size == (tmp_path / "merged.safetensors").stat().st_size
    assert check_hash(tmp_path / "merged.safetensors", required=True)
    merged = made(kind, seed=9)
    load_model(merged, tmp_path / "merged.safetensors", strict=True)
    torch.testing.assert_close(merged(X), trained(X), rtol=1e-6, atol=1e-6)
    assert (trained(X) - made(kind)(X)).abs().max() > 0.1
    with safe_open(tmp_path / "merged.safetensors", "pt") as file:
        assert not [name for name in file.metadata() if "lora" in name]  # nor among the ties


@pytest.mark.parametrize("spec", SPECS)
def test_peft_opens_the_adapter_with_the_same_outputs(tmp_path, spec):
    trained = after_training(made(Net), spec, tmp_path / "run.safetensors")
    write_adapter(tmp_path / "run.safetensors", tmp_path / "adapter", spec, "")
    for _ in range(2):  # the second time it overwrites its own
        write_adapter(tmp_path / "run.safetensors", tmp_path / "adapter", spec, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft warns about what it does not find
        opened = peft.PeftModel.from_pretrained(made(Net), tmp_path / "adapter")
    torch.testing.assert_close(opened.eval()(X), trained(X), rtol=0, atol=1e-6)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (spec.rank, spec.alpha)


def test_layers_are_named_by_their_ends_if_that_says_it(tmp_path):
    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.ModuleDict(), nn.ModuleDict()
            for block in (self.a, self.b):
                block.update({"q": nn.Linear(6, 4), "xq": nn.Linear(6, 4)})

    for modules, targets in (("*.q", ["q"]), ("a.q", r"a\.q"), ("[ab].*", ["q", "xq"])):
        spec = LoraSpec(modules=(modules,), rank=2)
        after_training(Ends(), spec, tmp_path / "run.safetensors")
        write_adapter(tmp_path / "run.safetensors", tmp_path / "adapter", spec, "")
        config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
        assert config["target_modules"] == targets
        opened = peft.PeftModel.from_pretrained(Ends(), tmp_path / "adapter")
        found = {n for n, m in opened.named_modules() if isinstance(m, peft.tuners.lora.Linear)}
        names = adapted_layers(tmp_path / "run.safetensors")
        assert found == {f"base_model.model.{name}" for name in names}


def test_parts_of_layers_cannot_be_in_an_adapter_and_can_be_merged(tmp_path):
    spec = LoraSpec(modules=("body.0",), rank=2, also_train=("*.bias",))
    after_training(made(Net), spec, tmp_path / "run.safetensors")
    with pytest.raises(SpecError, match=r"a part of 'body.0' and not .* with --merged\."):
        write_adapter(tmp_path / "run.safetensors", tmp_path / "adapter", spec, "")
    assert not (tmp_path / "adapter").exists()
    write_merged(tmp_path / "run.safetensors", tmp_path / "merged.safetensors", spec)


def test_a_layer_with_two_names_cannot_be_in_an_adapter(tmp_path):
    after_training(made(Twice), SPECS[0], tmp_path / "run.safetensors")
    with pytest.raises(SpecError, match=r"'body.0' and 'twin' are one layer.* with --merged\."):
        write_adapter(tmp_path / "run.safetensors", tmp_path / "adapter", SPECS[0], "")


def test_a_damaged_model_and_a_foreign_folder_are_refused(tmp_path):
    spec = SPECS[0]
    path = tmp_path / "run.safetensors"
    after_training(made(Net), spec, path)
    with pytest.raises(SpecError, match="has other files in it, and no adapter"):
        write_adapter(path, tmp_path, spec, "")
    with pytest.raises(SpecError, match="is a file: an adapter is a folder"):
        write_adapter(path, path, spec, "")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256"):
        write_merged(path, tmp_path / "merged.safetensors", spec)
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256"):
        write_adapter(path, tmp_path / "adapter", spec, "")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_file_without_adapters_has_no_adapted_layer(tmp_path):
    save_file({"a.lora_A": X, "b.lora_B": X + 1}, tmp_path / "m.safetensors")
    assert adapted_layers(tmp_path / "m.safetensors") == []


WIDTH, LAYERS = 1024, 16  # 4 MB each
LARGE = LoraSpec(modules=("*",), rank=2, also_train=("norm.*",))


def holds(folder):
    """In a process of its own: the most memory that each export holds."""
    source = Path(folder) / "run.safetensors"
    torch.ones(64, 64, dtype=torch.float64) @ torch.ones(64, 64, dtype=torch.float64)
    for write in (
        lambda: write_merged(source, source.with_name("merged.safetensors"), LARGE),
        lambda: write_adapter(source, source.with_name("adapter"), LARGE, ""),
    ):
        print(watched(write))


@pytest.mark.slow
def test_both_exports_hold_one_tensor_at_a_time(tmp_path):
    model = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in range(LAYERS)})
    model["norm"] = nn.LayerNorm(WIDTH)
    trained = after_training(model, LARGE, tmp_path / "run.safetensors")
    script = f"import sys\nsys.path[:0] = {sys.path!r}\n"
    script += f"import test_adapter\ntest_adapter.holds({str(tmp_path)!r})"
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | at_once
    )
    assert not out.returncode, out.stderr
    merged, adapter = map(int, out.stdout.split())
    tensor = 4 * WIDTH * WIDTH
    assert 0 < merged < 6 * tensor  # a weight, what is added to it in float64, and their sum
    assert 0 < adapter < tensor
    whole = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in range(LAYERS)})
    whole["norm"] = nn.LayerNorm(WIDTH)
    load_model(whole, tmp_path / "merged.safetensors")
    x = torch.randn(3, WIDTH)
    for name, layer in trained.items():
        torch.testing.assert_close(whole[name](x), layer(x), rtol=1e-5, atol=1e-5)


# ---- models of transformers


def gpt2():
    import transformers

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 23, "n_positions": 12}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def llama():
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 23}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 12}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.parametrize(
    ("kind", "modules", "whole"),
    [
        (gpt2, ("*.c_attn", "*.attn.c_proj", "*.c_fc"), ()),  # Conv1D; one of them is square
        (gpt2, ("*.c_attn",), ("transformer.wte.*",)),  # which is tied to lm_head
        (llama, ("*.q_proj", "*.v_proj", "*.down_proj"), ("lm_head.*",)),
    ],
)
def test_models_of_hugging_face_are_exported_both_ways(tmp_path, kind, modules, whole):
    spec = LoraSpec(modules=modules, rank=3, also_train=whole)
    base = tmp_path / "base"
    made(kind).save_pretrained(base)
    trained = after_training(made(kind), spec, tmp_path / "run.safetensors")
    tokens = torch.arange(24).view(2, 12) % 23
    wanted = trained(tokens).logits
    assert (wanted - made(kind)(tokens).logits).abs().max() > 0.01
    write_merged(tmp_path / "run.safetensors", base / "model.safetensors", spec)
    merged = type(trained).from_pretrained(base).eval()
    torch.testing.assert_close(merged(tokens).logits, wanted, rtol=0, atol=1e-6)
    write_adapter(tmp_path / "run.safetensors", tmp_path / "adapter", spec, str(base))
    opened = peft.PeftModel.from_pretrained(made(kind), tmp_path / "adapter").eval()
    torch.testing.assert_close(opened(tokens).logits, wanted, rtol=0, atol=1e-6)
    made(kind).save_pretrained(base)
    by_transformers = type(trained).from_pretrained(tmp_path / "adapter").eval()
    torch.testing.assert_close(by_transformers(tokens).logits, wanted, rtol=0, atol=1e-6)
    merged = opened.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, wanted, rtol=0, atol=1e-5)
