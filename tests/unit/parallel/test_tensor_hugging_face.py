"""Models of the transformers library, cut over two processes without a plan by hand."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from tensor_by_hand import Sent, cut_bert, cut_llama, cut_vit
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import start_processes

from instep.parallel.tensor import apply_plan, find_plan

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = 20
WIDE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
DECODER = {**WIDE, "vocab_size": 40, "num_hidden_layers": 2, "num_key_value_heads": 2}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CONFIGS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    "Mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**DECODER, "num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 41, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, **ENDS},
    ),
    "BERT": (  # as in the published ones, words are most of it and positions few
        "BertForMaskedLM",
        "BertConfig",
        {**WIDE, "vocab_size": 300, "max_position_embeddings": 16, "num_hidden_layers": 2},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 40,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "ViT": (
        "ViTForImageClassification",
        "ViTConfig",
        {**WIDE, "image_size": 8, "patch_size": 4, "num_labels": 4, "num_hidden_layers": 2},
    ),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 40, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 40,
            "num_mel_bins": 8,
            "d_model": 32,
            "max_source_positions": 8,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "max_target_positions": 16,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "dropout": 0.1,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "decoder_start_token_id": 1,
            **ENDS,
        },
    ),
}


def made(name):
    """A model from its configuration, with dropout as it is there, and batches."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(5)
    kind, config, options = CONFIGS[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).train()
    batches = []
    for _ in range(3):
        ids = torch.randint(3, 40, (3, 9))
        batch = {"input_ids": ids, "labels": ids}
        if name == "ViT":
            batch = {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 1, 3])}
        if name == "Whisper":
            batch = {"input_features": torch.randn(3, 8, 16), "labels": ids}
        batches.append(batch)
    return model, batches


BY_HAND = {"Llama": cut_llama, "BERT": cut_bert, "ViT": cut_vit}
AT_THE_ENDS = {"Llama": 3, "BERT": 3, "ViT": 0}
"""What embedding and output layer send: in BERT they are tied, and cut by the vocabulary."""


def own_loss(model, batch):
    return model(**batch).loss


def one_process(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))["tensor"]
    found = {}
    for name in CONFIGS:
        model, batches = made(name)
        plan = find_plan(model, own_loss, batches[0], 2)
        plain, by_hand, cut = (copy.deepcopy(model) for _ in range(3))
        apply_plan(model, plan, mesh)
        apply_plan(cut, plan, mesh)
        both = [(each, torch.optim.SGD(each.parameters(), lr=0.05)) for each in (plain, model)]
        away = 0.0
        for step in range(STEPS):
            losses = []
            for each, optimizer in both:
                torch.manual_seed(step)
                loss = own_loss(each, batches[step % 3])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            away = max(away, abs(losses[1] / losses[0] - 1))
        rows = sum(cut.style == "row" for cut in plan.cuts.values())
        found[name] = {"away": away, "first": losses[0], "rows": rows, "table": str(plan)}
        if name in BY_HAND:
            BY_HAND[name](by_hand, mesh)
            for key, each in (("by hand", by_hand), ("found", cut)):
                with Sent(2) as count:
                    loss = own_loss(each.eval(), batches[0])
                    loss.backward()
                found[name][key] = [float(loss.detach()), sum(count.calls.values()), count.bytes]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    start_processes(one_process, (folder,), nprocs=2, start_method="forkserver")
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    return first


PAIRS = {"Llama": 4, "Qwen3": 4, "Mixtral": 2, "GPT-2": 2, "BERT": 4, "T5": 10, "ViT": 4}
PAIRS |= {"Mamba": 0, "Whisper": 10}
"""Layers that are cut by rows: attentions and perceptrons whose activations stay cut."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_without_a_plan_trains_as_one_process(found, name):
    assert found[name]["away"] <= 1e-5
    assert found[name]["rows"] == PAIRS[name], found[name]["table"]


@pytest.mark.parametrize("name", BY_HAND)
def test_a_found_plan_sends_no_more_than_one_by_hand(found, name):
    (loss, calls, size), (loss_by_hand, calls_by_hand, size_by_hand) = (
        found[name][each] for each in ("found", "by hand")
    )
    assert loss == pytest.approx(loss_by_hand, rel=1e-5)
    assert calls_by_hand == 2 * 4 + AT_THE_ENDS[name]
    assert calls <= 1.1 * calls_by_hand
    assert size <= 1.1 * size_by_hand
