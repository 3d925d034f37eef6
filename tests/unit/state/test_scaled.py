"""Codes with scales beside them are weights; codes without are refused, also in a partial start."""

import json

import pytest
import safetensors.torch
import torch
from torch import nn

from instep.errors import CheckpointError
from instep.state.files import open_file
from instep.state.load import load_model

ROWS, COLUMNS = 300, 256


def saved(path, tensors):
    bias = {"bias": torch.zeros(ROWS)}
    safetensors.torch.save_file(bias | {n: t.contiguous() for n, t in tensors.items()}, path)
    return path


def spread(scale, shape):
    """Scales as large as the weight, written out as the makers of these files do."""
    for dim, size in enumerate(shape):
        block = size if scale.shape[dim] == 1 else 128 if scale.shape[dim] < size else 1
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scale


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("weight_scale_inv", (3, 2)),
        ("weight_scale", (1,)),
        ("weight_scale", ()),
        ("weight_scale", (ROWS, 1)),
        ("weight_scale", (ROWS,)),
    ],
)
def test_codes_are_multiplied_by_their_scales(tmp_path, monkeypatch, name, shape, codes, target):
    monkeypatch.setattr(open_file, "_PIECE_BYTES", 70 * COLUMNS)  # rows arrive in several pieces
    weight = (torch.randn(ROWS, COLUMNS) * 20).to(codes)
    scale = torch.rand(shape) + 0.5
    path = saved(tmp_path / "m.safetensors", {"weight": weight, name: scale})
    config = {"quantization_config": {"weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = nn.Linear(COLUMNS, ROWS).to(target)
    report = load_model(path, model)
    assert str(report) == "2 of 2 tensors match, 1 of them decoded by their scales."
    whole = scale.reshape(scale.shape if scale.dim() == 2 else (-1, 1))
    expected = weight.float() * spread(whole, (ROWS, COLUMNS))
    assert torch.equal(model.weight, expected.to(target))


@pytest.mark.parametrize(("given", "rows"), [(96, 300), (64, 300), (None, 256)])
def test_blocks_are_as_large_as_the_configuration_says(tmp_path, given, rows):
    weight = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)[:rows]
    block = given or 128
    scale = torch.rand(-(-rows // block), -(-COLUMNS // block)) + 0.5
    spread = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :COLUMNS]
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"weight": weight, "weight_scale_inv": scale}, path)
    if given:
        config = {"quantization_config": {"weight_block_size": [given, given]}}
        (tmp_path / "config.json").write_text(json.dumps(config))
    model = nn.Linear(COLUMNS, rows, bias=False)
    load_model(path, model)
    assert torch.equal(model.weight, weight.float() * spread)


@pytest.mark.parametrize("shape", [(1,), (ROWS, 1)])
def test_zero_points_are_subtracted(tmp_path, shape):
    weight = torch.randint(-100, 100, (ROWS, COLUMNS), dtype=torch.int8)
    zero = torch.randint(-9, 9, shape, dtype=torch.int8)
    tensors = {"weight": weight, "weight_scale": torch.full(shape, 0.5), "weight_zero_point": zero}
    model = nn.Linear(COLUMNS, ROWS)
    load_model(saved(tmp_path / "m.safetensors", tensors), model)
    assert torch.equal(model.weight, (weight.float() - zero.float()) * 0.5)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"qweight": torch.zeros(4, dtype=torch.int32)}, "has packed weights ('qweight')"),
        ({"weight.absmax": torch.zeros(4)}, "has packed weights ('weight.absmax')"),
        (
            {"weight_packed": torch.zeros(4, dtype=torch.uint8)},
            "has packed weights ('weight_packed')",
        ),
        ({"SCB": torch.zeros(4)}, "has packed weights ('SCB')"),
        ({"scale_weight": torch.zeros(4)}, "'weight' is F8_E4M3, and 'scale_weight' beside it"),
        ({"weight_descale": torch.zeros(1)}, "'weight' is F8_E4M3, and 'weight_descale' beside"),
        ({"amax": torch.zeros(1)}, "'weight' is F8_E4M3, and 'amax' beside it"),
        ({"weight_zero_point": torch.zeros(1)}, "'weight_zero_point' beside it may say"),
        (
            {"weight_scale": torch.ones(1), "weight_g_idx": torch.zeros(COLUMNS)},
            "'weight_g_idx' beside it may say",
        ),
        (
            {"weight_scale": torch.ones(ROWS, 1), "weight_zero_point": torch.zeros(1)},
            "zero points of shape [1] for scales [300, 1]",
        ),
        ({"weight_scale": torch.zeros(7, 2)}, "scales of shape [7, 2] for [300, 256] are neither"),
        ({"weight_scale_inv": torch.zeros(3, 2)}, "no config.json beside the file says"),
        ({"weight_scale_inv": torch.zeros(6, 2)}, "nor one for each block of 128 by 128"),
        ({"weight_scale": torch.zeros(3, 1)}, "scales of shape [3, 1] for [300, 256]"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_codes_that_are_not_understood_are_never_loaded(tmp_path, tensors, words, strict):
    weight = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    path = saved(tmp_path / "m.safetensors", {"weight": weight, **tensors})
    model = nn.Linear(COLUMNS, ROWS)
    before = model.weight.clone()
    with pytest.raises(CheckpointError) as refused:
        load_model(path, model, strict)
    assert words in str(refused.value)
    assert "partial" not in str(refused.value)
    assert torch.equal(model.weight, before)


def test_float8_without_a_scale_is_a_weight_and_a_models_own_scale_is_its_own(tmp_path):
    weight = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    model = nn.Linear(COLUMNS, ROWS)
    load_model(saved(tmp_path / "a.safetensors", {"weight": weight}), model)
    assert torch.equal(model.weight, weight.float())
    model.register_buffer("weight_scale", torch.zeros(1))
    scaled = {"weight": weight, "weight_scale": torch.full([1], 3.0)}
    load_model(saved(tmp_path / "b.safetensors", scaled), model)
    assert torch.equal(model.weight, weight.float())
    assert float(model.weight_scale) == 3
