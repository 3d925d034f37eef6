"""What a setting takes along: never what both know, never in silence, in whatever order."""

import itertools

import pytest

from instep.errors import SpecError
from instep.job.file import build, load
from instep.job.overrides import apply_overrides, lay_over

PARTED = {"partition": "labels", "skew": 0.2, "local_steps": 5}


@pytest.mark.parametrize(
    ("overrides", "options", "left"),
    [
        (["sync.name=fedprox", "sync.options.mu=0.1"], {**PARTED, "mu": 0.1}, ["combine"]),
        (["sync.name=diloco", "sync.participants=2"], PARTED, ["combine"]),
        (["sync.name=fedprox", "sync.options.skew=0.3"], {**PARTED, "skew": 0.3}, ["combine"]),
        (["sync.name=averaging", "sync.codec=int8"], {**PARTED, "combine": "median"}, []),
        (
            ["sync.name=all_reduce", "sync.options.bucket_mb=2.0"],
            {"bucket_mb": 2.0},
            ["combine", *PARTED, "participants"],
        ),
        (["sync.name=fedprox", "sync.options={mu=0.1}"], {"mu": 0.1}, []),
        (["sync.name=nothing"], {**PARTED, "combine": "median"}, []),  # is refused by its name
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value else "",
)
def test_options_that_the_new_strategy_has_stay_and_the_others_are_said(overrides, options, left):
    for typed in itertools.permutations(overrides):
        sync = {"name": "averaging", "participants": 4}
        table = {
            "recipe": "a.py:recipe",
            "sync": sync | {"options": {**PARTED, "combine": "median"}},
        }
        said = []
        apply_overrides(table, typed, said.append)
        assert table["sync"]["options"] == options
        assert len(said) == len(left)
        for key in left:
            assert any(f".{key} = " in text and "is left out" in text for text in said)
        build(table, source="a test")


def test_options_that_the_new_codec_has_stay_and_the_others_are_said():
    for change, options, said in (
        ("int4", {"block": 64, "rounding": "random"}, []),
        ("int8", {"block": 64, "rounding": "random"}, []),
        ("sign", {"block": 64}, ['sync.codec_options.rounding = "random" is left out']),
        ("mine:Codec", {"block": 64, "rounding": "random"}, []),  # which knows its own
        ("none", None, ["sync.codec_options.block = 64 is left out"]),
    ):
        for lay in (
            lambda t, c, s: apply_overrides(t, [f"sync.codec={c}"], s),
            lambda t, c, s: lay_over(t, {"sync": {"codec": c}}, s),
        ):
            given = {"codec": "int8", "codec_options": {"block": 64, "rounding": "random"}}
            table, told = {"recipe": "a.py:recipe", "sync": given}, []
            lay(table, change, told.append)
            assert table["sync"].get("codec_options") == options
            assert all(any(text in each for each in told) for text in said)
            assert bool(told) == bool(said)


def test_no_codec_takes_away_the_option_to_encode_vectors_too():
    options, said = {"encode_vectors": True, "overlap": False}, []
    table = {"sync": {"codec": "int8", "options": dict(options)}}
    apply_overrides(table, ["sync.codec=int4"], said.append)
    assert (table["sync"]["options"], said) == (options, [])
    apply_overrides(table, ["sync.codec=none"], said.append)
    assert table["sync"]["options"] == {"overlap": False}
    assert said == ["sync.options.encode_vectors = true is left out: nothing is encoded."]
    table = {"sync": {"codec": "int8"}}
    lay_over(table, {"sync": {"options": {"encode_vectors": True}, "codec": "none"}})
    assert table["sync"]["options"] == {"encode_vectors": True}  # then it is refused


def test_keys_of_an_axis_that_goes_are_said_unless_they_say_nothing():
    table, said = {"mesh": {"stages": 2, "cuts": ["b"], "schedule": "1f1b", "shard": 1}}, []
    apply_overrides(table, ["mesh.stages=1"], said.append)
    assert said == ['mesh.cuts = ["b"] is left out: it is for mesh.stages above 1.']


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.epoch=3"], "--set train.epoch=3: [train] has no key 'epoch'"),
        (["workers=0"], "--workers 0: workers = 0: needs to be at least 1"),
        (["workers=99"], "--workers 99: workers = 99 but"),
        (["trian.epochs=3"], "--set trian.epochs=3: a job has no key 'trian'"),
        (["train.global_batch=4"], "--set train.global_batch=4: "),
        (["sync.options.skew=-1", "sync.name=fedprox"], "--set sync.options.skew=-1"),
        (["train.steps=-1", "seed=3"], "--set train.steps=-1: train.steps = -1"),
        (["train.clip_norm=1"], "--set train.clip_norm=1: train.clip_norm is now called"),
        (["seed=3"], "job.toml: stop.patience = -1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_value_is_blamed_on_where_it_was_typed(tmp_path, overrides, words):
    wrong = "[stop]\npatience = -1" if words.startswith("job.toml") else ""
    (tmp_path / "job.toml").write_text(f'recipe = "a.py:f"\n[train]\nmicro_batches = 8\n{wrong}')
    with pytest.raises(SpecError) as refused:
        load(tmp_path / "job.toml", overrides)
    assert words in str(refused.value)
    assert ("job.toml" in str(refused.value)) == words.startswith("job.toml")
