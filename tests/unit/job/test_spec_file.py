"""A job file says the same after a round trip, and every mistake in one names file and key."""

import datetime
import math
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import SpecError
from instep.job.file import build, dump, load
from instep.job.overrides import apply_overrides, lay_over
from instep.job.spec import JobSpec

RECIPE = {"recipe": "a.py:f"}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    TEXT,
    st.dates().filter(lambda day: day.year >= 1000),
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
TABLES = st.dictionaries(TEXT, VALUES, max_size=4)
COUNT, NATURAL = st.integers(1, 10**9), st.integers(0, 10**9)


def some(**keys):
    """Tables in which each key may be left out."""
    return st.fixed_dictionaries({}, optional=keys)


TRAIN = some(
    global_batch=st.integers(64, 10**6),
    micro_batches=st.integers(16, 64),
    merge=st.sampled_from(["auto", "always", "never"]),
    determinism=st.sampled_from(["order", "bits"]),
    batch_norm=st.sampled_from(["micro_batch", "global"]),
    precision=st.sampled_from(["float32", "bfloat16", "float16"]),
    max_grad_norm=st.floats(1e-300, 1e300) | st.integers(1, 9),
    validate_every=NATURAL,
    stop_after_steps=NATURAL,
    threads=NATURAL,
    device=st.sampled_from(["auto", "cpu", "cuda"]),
).filter(
    lambda table: (
        (table.get("merge"), table.get("determinism")) != ("always", "bits")
        and (
            table.get("batch_norm") != "global"
            or (table.get("merge") != "never" and table.get("determinism") != "bits")
        )
    )
)
STOP = some(
    metric=TEXT,
    mode=st.sampled_from(["auto", "min", "max"]),
    target=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
    patience=NATURAL,
    least_change=st.floats(0, 1e300),
    non_finite=st.booleans(),
    rise=st.floats(1.001, 1e300),
    window=COUNT,
    gradient_norm=st.floats(1e-300, 1e300),
    time_limit=st.floats(1e-300, 1e300) | st.sampled_from(["90s", "1h 30m", "1.5d", "7"]),
)


def whole_replicas(table):
    """The same job, with as many workers as make whole replicas."""
    ranks = math.prod(table.get("mesh", {}).values())
    return table | ({"workers": ranks * table.get("workers", 1)} if ranks > 1 else {})


JOBS = st.fixed_dictionaries(
    {"recipe": st.sampled_from(["a.py:f", "/x/é b.py:recipe", 'C:\\"quoted".py:_1'])},
    optional={
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
        "workers": st.integers(1, 2),
        "seed": NATURAL,
        "network": st.sampled_from(["loopback", "private"]),
        "train": st.one_of(
            TRAIN,
            st.builds(lambda t, n: {**t, "epochs": n}, TRAIN, COUNT),
            st.builds(lambda t, n: {**t, "steps": n}, TRAIN, COUNT),
        ),
        "stop": STOP,
        "sync": some(name=TEXT, servers=COUNT, codec=TEXT, options=TABLES),
        "mesh": some(tensor=COUNT, stages=COUNT) | some(shard=st.integers(1, 4)),
        "data": some(loaders=NATURAL | st.just("auto")),
        "start": some(
            model=TEXT.map(lambda text: f"m{text}"),
            freeze=st.lists(TEXT, max_size=3),
            learning_rates=st.dictionaries(TEXT, st.floats(1e-9, 1e9), max_size=3),
        ),
        "checkpoint": some(
            every=COUNT | st.sampled_from(["5m", "1h 30m", "never"]),
            keep_every=NATURAL,
            keep_last=COUNT,
            keep_best=NATURAL,
            best_metric=TEXT,
            best_mode=st.sampled_from(["auto", "min", "max"]),
        ),
        "report": some(
            trace_steps=NATURAL,
            gradient_norm=st.booleans(),
            profile=st.sampled_from([(), (1, 1), (3, 70)]),
        ),
        "arguments": TABLES,
    },
).map(whole_replicas)


@given(JOBS)
def test_a_job_that_was_dumped_is_read_back_unchanged(table):
    job = build(table, source="test")
    assert build(tomllib.loads(dump(job)), source="again") == job


def test_a_dump_gives_every_key_but_those_without_a_value():
    table = tomllib.loads(dump(build(RECIPE, source="test")))
    assert set(table) == set(JobSpec.__struct_fields__)
    assert {"epochs", "steps", "max_grad_norm"}.isdisjoint(table["train"])
    assert table["train"]["global_batch"] == 64


def test_dates_in_the_arguments_stay_dates():
    arguments = {"day": datetime.date(2026, 1, 2), "at": datetime.time(3, 4, 5)}
    job = build({**RECIPE, "arguments": arguments}, source="test")
    assert tomllib.loads(dump(job))["arguments"] == arguments


def test_a_recipe_is_found_beside_its_job_file_wherever_one_stands(tmp_path):
    (tmp_path / "job.toml").write_text('recipe = "../x/a.py:f"')
    assert load(tmp_path / "job.toml").recipe == f"{(tmp_path.parent / 'x' / 'a.py').resolve()}:f"


def test_a_model_to_start_from_is_found_beside_the_job_file_too(tmp_path):
    (tmp_path / "job.toml").write_text('recipe = "a.py:f"\n[start]\nmodel = "../runs/x"')
    assert load(tmp_path / "job.toml").start.model == str(tmp_path.parent.resolve() / "runs" / "x")
    assert load(tmp_path / "job.toml", ["start.model="]).start.model == ""
    rates = load(tmp_path / "job.toml", ['start.learning_rates={"a.*" = 0.1}']).start
    assert rates.learning_rates == {"a.*": 0.1}


MISTAKES = [
    ({"workres": 3}, ["a job has no key 'workres'", "Did you mean 'workers'?"]),
    ({"train": {"epoch": 3}}, ["[train] has no key 'epoch'", "Did you mean 'epochs'?"]),
    ({"sync": {"option": {}}}, ["[sync] has no key 'option'", "Did you mean 'options'?"]),
    ({"zebra": 1}, ["a job has no key 'zebra'", "Known:", "arguments"]),
    ({"workers": "3"}, ['workers = "3"', "a whole number"]),
    ({"workers": 2.5}, ["workers = 2.5", "a whole number"]),
    ({"workers": True}, ["workers = true", "a whole number"]),
    ({"workers": 0}, ["workers = 0", "at least 1"]),
    ({"seed": -1}, ["seed = -1", "at least 0"]),
    ({"name": ""}, ['name = ""']),
    ({"name": "a/b"}, ['name = "a/b"', "character"]),
    ({"name": 3}, ["name = 3", "text in quotes"]),
    ({"recipe": "a.py"}, ['recipe = "a.py"', "file.py:function"]),
    ({"recipe": 3}, ["recipe = 3", "text in quotes"]),
    ({"network": "public"}, ['network = "public"', "'loopback' or 'private'"]),
    ({"train": 3}, ["train = 3", "a table"]),
    ({"train": {"epochs": 0}}, ["train.epochs = 0", "at least 1"]),
    ({"train": {"epochs": "ten"}}, ['train.epochs = "ten"', "a whole number"]),
    ({"train": {"epochs": 1, "steps": 1}}, ["[train]", "epochs = 1", "steps = 1", "one length"]),
    ({"train": {"max_grad_norm": 0}}, ["train.max_grad_norm = 0", "above 0"]),
    ({"train": {"max_grad_norm": float("inf")}}, ["max_grad_norm = inf", "finite"]),
    ({"train": {"max_grad_norm": float("nan")}}, ["train.max_grad_norm = NaN"]),
    ({"train": {"merge": "maybe"}}, ['train.merge = "maybe"', "'auto'", "'never'"]),
    ({"train": {"precision": 16}}, ["train.precision = 16", "'float32' or 'bfloat16'"]),
    ({"train": {"micro_batches": 65}}, ["micro_batches = 65", "global_batch = 64", "at most 64"]),
    ({"workers": 9}, ["workers = 9", "micro_batches = 8", "to 9 or more"]),
    (
        {
            "workers": 6,
            "mesh": {"shard": 2},
            "sync": {"name": "averaging", "participants": 2},
        },
        ["sync.participants = 2: each replica needs", "participant of each round", "at most 4;"],
    ),
    ({"workers": 5, "mesh": {"shard": 4}}, ["workers = 5: ", "([mesh] shard = 4), so 4, 8, ..."]),
    (
        {"workers": 12, "mesh": {"shard": 4}},
        ["workers = 12", "`shard` rank of each replica", "workers to at most 8", "to 12 or more"],
    ),
    (
        {"workers": 36, "mesh": {"tensor": 2, "stages": 2}},
        ["workers = 36", "each replica needs", "workers to at most 32", "to 9 or more"],
    ),
    (
        {"workers": 16, "mesh": {"shard": 16}},
        ["workers = 16", "Set train.micro_batches to 16 or more"],
    ),
    ({"mesh": {"zero": 1}}, ["mesh.zero = 1: needs to be 2 or 3."]),
    ({"mesh": {"zero": "3"}}, ['mesh.zero = "3": needs to be 2 or 3.']),
    ({"mesh": {"plan": "atuo"}}, ["mesh.plan = \"atuo\": needs to be 'auto' or a table."]),
    ({"mesh": {"plan": {"a": 1}}}, ['{"a": 1}: each value in it needs to be text in quotes.']),
    ({"data": {"loaders": "many"}}, ['data.loaders = "many"', "a whole number", "'auto'"]),
    ({"data": {"loaders": -1}}, ["data.loaders = -1", "at least 0"]),
    ({"checkpoint": {"every": 2.5}}, ["checkpoint.every = 2.5", "a whole number"]),
    ({"checkpoint": {"every": "1m1m"}}, ["every = '1m1m'", "a number of steps", "'5m'", "'never'"]),
    ({"launch": {"hosts": [""]}}, ["[launch] hosts has ''", "such as 'ssh node2'"]),
    ({"launch": {"hosts": ["sh -c 'x"]}}, ["[launch]", "No closing quotation", "as in a shell"]),
    ({"launch": {"hosts": ["ssh a", "ssh a"]}}, ["a host may be named once"]),
    ({"launch": {"address": "10.0.0.1"}}, ["address = '10.0.0.1'", "Give hosts"]),
    ({"launch": {"nodes": 2}}, ["nodes = 2 is for a cluster", "Say which with on"]),
    ({"launch": {"on": "hosts"}}, ["on = 'hosts', but there are none"]),
    ({"launch": {"on": "local", "hosts": ["ssh a"]}}, ["hosts are given, and on = 'local'"]),
    ({"launch": {"name": "local"}}, ["launch.name is now called launch.on"]),
    ({"report": {"tensorboard": True}}, ["report.tensorboard is now called report.loggers"]),
    ({"report": {"loggers": "csv"}}, ['report.loggers = "csv"', "needs to be a list"]),
    ({"start": {"freeze": "a.*"}}, ['start.freeze = "a.*"', "needs to be a list", "Patterns"]),
    ({"start": {"freeze": [1]}}, ["start.freeze = [1]: each value in it needs to be text"]),
    ({"start": {"learning_rates": 0.1}}, ["start.learning_rates = 0.1: needs to be a table"]),
    (
        {"start": {"learning_rates": {"a.*": 0}}},
        ['start.learning_rates = {"a.*": 0}: each value in it needs to be above 0'],
    ),
    ({"start": {"learning_rates": {"a": "x"}}}, ['{"a": "x"}: each value in it', "a number"]),
    ({"start": {"learning_rates": {"a": float("inf")}}}, ["[start]", "'a' the rate inf"]),
    ({"start": {"partial": True}}, ["[start] partial = true", "no model is given"]),
    ({"mesh": {"shard": 0}}, ["mesh.shard = 0", "at least 1"]),
    ({"sync": {"options": 3}}, ["sync.options = 3", "a table"]),
    ({"arguments": [1]}, ["arguments = [1]", "a table"]),
    ({"train": {"ema": 1}}, ["train.ema = 1: needs to be below 1."]),
    (
        {"sync": {"name": "averaging", "options": {"local_parameters": [3]}}},
        ["[sync] options.local_parameters = [3]: needs a list of patterns of names"],
    ),
]


@pytest.mark.parametrize(("table", "words"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_names_file_key_what_was_given_and_what_is_wanted(tmp_path, table, words):
    with pytest.raises(SpecError) as error:
        build({**RECIPE, **table}, source="the/job.toml")
    text = str(error.value)
    assert text.startswith("the/job.toml: ")
    assert all(word in text for word in words), text


def test_a_missing_recipe_is_named_with_what_it_is_for():
    with pytest.raises(
        SpecError, match=r"job.toml: the key 'recipe' is missing.*file\.py:function"
    ):
        build({}, source="job.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workers = ", "is not valid TOML"),
        ("workers = 1\nworkers = 2", "is not valid TOML"),
        ("[train]\nepochs = ten", "is not valid TOML"),
    ],
)
def test_a_file_that_is_no_toml_is_refused_with_its_name_and_place(tmp_path, text, words):
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(SpecError) as error:
        load(file)
    assert str(file) in str(error.value)
    assert words in str(error.value)
    assert "(at " in str(error.value)


def test_a_file_that_is_not_text_a_folder_and_no_file_are_refused(tmp_path):
    (tmp_path / "job.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        load(tmp_path / "job.toml")
    with pytest.raises(SpecError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(SpecError, match=r"no job file .*jobs\.toml.*Did you mean 'job\.toml'\?"):
        load(tmp_path / "jobs.toml")
    with pytest.raises(SpecError, match="Nor is there another"):
        load(tmp_path / "nowhere" / "job.toml")


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("workers=3", ["workers"], 3),
        ("train.epochs = 2", ["train", "epochs"], 2),
        ("train.max_grad_norm=1e-2", ["train", "max_grad_norm"], 0.01),
        ("train.merge=never", ["train", "merge"], "never"),
        ('name="7"', ["name"], "7"),
        ("arguments.sizes=[1, 2]", ["arguments", "sizes"], [1, 2]),
        ("arguments.deep.er=true", ["arguments", "deep", "er"], True),
        ("sync.codec=none", ["sync", "codec"], "none"),
        ("arguments.path=a=b", ["arguments", "path"], "a=b"),
        ("arguments.empty=", ["arguments", "empty"], ""),
        ("arguments.off=false", ["arguments", "off"], False),
        ('arguments.name="False"', ["arguments", "name"], "False"),
        ("arguments.name='None'", ["arguments", "name"], "None"),
        ("arguments.name=Falsehood", ["arguments", "name"], "Falsehood"),
    ],
)
def test_an_override_is_read_as_toml_or_else_as_text(override, path, value):
    table = {"train": {"epochs": 1}}
    apply_overrides(table, [override])
    for key in path:
        table = table[key]
    assert table == value


def test_keys_of_an_axis_go_with_it_unless_they_are_set_too():
    given = {"stages": 2, "cuts": ["b"], "schedule": "gpipe", "shard": 2, "zero": 2}
    for overrides, left in (
        (["mesh.stages=1"], {"stages": 1, "shard": 2, "zero": 2}),
        (["mesh.shard=4"], {**given, "shard": 4}),
        (["mesh.shard=1", "mesh.tensor=2"], {**given, "shard": 1, "tensor": 2} | {"zero": None}),
        (["mesh.shard=1", "mesh.zero=2"], {**given, "shard": 1}),
        (["mesh.zero=2", "mesh.shard=1"], {**given, "shard": 1}),
    ):
        table = {"mesh": dict(given)}
        apply_overrides(table, overrides)
        assert table["mesh"] == {key: value for key, value in left.items() if value is not None}


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"stages": 1}, {"stages": 1, "shard": 2, "zero": 2}),
        ({"stages": None}, {"shard": 2, "zero": 2}),
        ({"stages": 1, "cuts": None}, {"stages": 1, "shard": 2, "zero": 2}),
        ({"shard": 4}, {"stages": 2, "cuts": ["b"], "shard": 4, "zero": 2}),
        (
            {"zero": 3, "shard": 1},  # refused when it is built
            {"stages": 2, "cuts": ["b"], "shard": 1, "zero": 3},
        ),
    ],
)
def test_keys_of_an_axis_go_with_it_in_tables_too(change, left):
    table = {"mesh": {"stages": 2, "cuts": ["b"], "shard": 2, "zero": 2}}
    lay_over(table, {"mesh": change})
    assert table == {"mesh": left}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("workers", "not of the form section.key=value"),
        ("=3", "not of the form"),
        ("train.=3", "not of the form"),
        ("workers.more=3", "'workers' is a value, not a section"),
        ("arguments.augment=False", "write false, or '\"False\"' if it is text"),
        ("stop.non_finite=True", "write true, or '\"True\"'"),
        ("arguments.x= TRUE", "write true, or '\"TRUE\"'"),
        ("stop.target=null", "leave the key out, or write"),
        ("arguments.name=None", "leave the key out, or write '\"None\"' if it is text"),
        ("arguments.name=null", "leave the key out, or write '\"null\"'"),
        ("arguments.lr=.5", "write 0.5, or '\".5\"'"),
        ("arguments.lr=1.e-3", "write 0.001, or '\"1.e-3\"'"),
        ("arguments.zip=007", "write 7, or '\"007\"'"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused_as_it_was_typed(override, words):
    with pytest.raises(SpecError) as error:
        apply_overrides({"workers": 2}, [override])
    assert repr(override) in str(error.value)
    assert words in str(error.value)


def test_a_length_laid_over_a_file_takes_the_place_of_the_other_length(tmp_path):
    (tmp_path / "job.toml").write_text('recipe = "a.py:f"\n[train]\nepochs = 3')
    train = load(tmp_path / "job.toml", ["train.steps=5"]).train
    assert (train.epochs, train.steps) == (None, 5)
    train = load(tmp_path / "job.toml", ["train.steps=5", "train.epochs=2"]).train
    assert (train.epochs, train.steps) == (2, None)


def test_tables_are_laid_over_a_table_key_by_key_and_none_takes_a_key_away():
    table = {
        "recipe": "a.py:f",
        "workers": 2,
        "stop": {"target": 0.5, "patience": 3},
        "train": {"global_batch": 16, "micro_batches": 4},
        "checkpoint": {"every": 9},
    }
    changes = {
        "recipe": Path("b.py:f"),
        "workers": None,
        "stop": {"target": None, "window": 5},
        "data": {"loaders": None},
        "arguments": {"sizes": {"deep": [1, 2]}, "day": datetime.date(2026, 1, 2)},
        "checkpoint": None,
        "unheard_of": None,
    }
    lay_over(table, changes)
    assert table == {
        "recipe": "b.py:f",
        "stop": {"patience": 3, "window": 5},
        "train": {"global_batch": 16, "micro_batches": 4},
        "data": {},
        "arguments": {"sizes": {"deep": [1, 2]}, "day": datetime.date(2026, 1, 2)},
    }
    assert build(table, source="test").stop.patience == 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"steps": 5}, {"steps": 5}),
        ({"epochs": 5}, {"epochs": 5}),
        ({"steps": 5, "epochs": None}, {"steps": 5}),
        ({"steps": None}, {"epochs": 3}),
        ({"steps": 5, "epochs": 4}, {"steps": 5, "epochs": 4}),  # refused when it is built
    ],
)
def test_a_length_laid_over_a_table_takes_the_place_of_the_other_length(change, expected):
    table = {"train": {"epochs": 3}}
    lay_over(table, {"train": change})
    assert table == {"train": expected}


@pytest.mark.parametrize(
    "table",
    [
        {"recipe": "r\udcff.py:f"},
        {**RECIPE, "arguments": {"deep": [{"a": "\ud800"}]}},
        {**RECIPE, "start": {"learning_rates": {"\udcff.*": 0.1}}},
    ],
)
def test_text_that_no_file_can_hold_is_refused(table):
    with pytest.raises(SpecError, match=r"instep.train: '.*\\ud.*cannot be written as UTF-8"):
        build(table, source="instep.train")


def test_a_value_laid_over_a_file_is_checked_like_one_in_it(tmp_path):
    (tmp_path / "job.toml").write_text('recipe = "a.py:f"')
    assert load(tmp_path / "job.toml", ["workers=3"]).workers == 3
    with pytest.raises(SpecError, match=r"workers = 0: needs to be at least 1"):
        load(tmp_path / "job.toml", ["workers=0"])


@pytest.mark.parametrize(
    "arguments",
    [{"data": Path("x")}, {"call": print}, {"large": 2**70}, {"deep": [{"a": None}]}, {1: 2}],
    ids=str,
)
def test_arguments_that_no_job_file_could_hold_are_refused_by_name(arguments):
    """From Python anything may be given; it has to reach the workers, and the run's job.toml."""
    with pytest.raises(SpecError, match="arguments"):
        build({**RECIPE, "arguments": arguments}, source="instep.train")


def test_micro_batches_are_not_looked_at_where_participants_take_their_place():
    sync = {"name": "averaging", "participants": 2}
    table = {"recipe": "a.py:recipe", "train": {"global_batch": 4, "micro_batches": 8}}
    assert build({**table, "sync": sync}, source="a test").per_commit.micro_batches == 2
    with pytest.raises(SpecError, match=r"train\.micro_batches = 8 but train\.global_batch = 4"):
        build(table, source="a test")


def test_a_job_goes_over_the_wire_as_plain_data():
    job = build({**RECIPE, "arguments": {"a": [1, 2.5, "x", {"b": True}]}}, source="test")
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(job)))
    assert build(again, source="wire") == job


@pytest.mark.parametrize(
    ("section", "old", "value", "new"),
    [
        ("train", "clip_norm", 1.0, "train.max_grad_norm"),
        ("train", "shuffle", 1, "data.order"),
        ("checkpoint", "every_steps", 500, "checkpoint.every"),
    ],
)
def test_a_key_that_was_renamed_answers_with_its_new_name(tmp_path, section, old, value, new):
    says = rf"{section}\.{old} is now called {new}\."
    (tmp_path / "job.toml").write_text('recipe = "a.py:f"')
    with pytest.raises(SpecError, match=says):
        load(tmp_path / "job.toml", [f"{section}.{old}={value}"])
    for change in (value, None):  # from Python, None takes a key away
        table = dict(RECIPE)
        lay_over(table, {section: {old: change}})
        with pytest.raises(SpecError, match=says):
            build(table, source="changes")


def test_when_a_checkpoint_is_due_is_said_in_steps_in_time_or_never():
    def due(**kept):
        spec = build({**RECIPE, "checkpoint": kept}, source="test").checkpoint
        return spec.every_s, [step for step in range(1, 13) if spec.due(step)]

    assert due() == (300, [])
    assert due(every="1m30s") == (90, [])
    assert due(every="never") == (None, [])
    assert due(every=5) == (None, [5, 10])
    assert due(every=5, keep_every=4) == (None, [4, 5, 8, 10, 12])
    assert due(every="never", keep_every=6) == (None, [6, 12])


def test_a_worker_number_says_its_place_in_the_mesh():
    mesh = build(
        {**RECIPE, "workers": 8, "mesh": {"shard": 2, "tensor": 2, "stages": 2}}, source="test"
    ).mesh
    places = [mesh.coordinate(worker) for worker in range(16)]
    assert places == sorted(places)
    assert len(set(places)) == 16
    assert places[8 + 5] == (1, 1, 0, 1)
    assert list(mesh.replica(1)) == [n for n, place in enumerate(places) if place.replica == 1]
    assert mesh.column([0, 1, 2, 3, 4, 5, 6, 7, 16, 17], 9) == [1, 17]


@pytest.mark.parametrize(
    ("name", "local_steps", "kept"), [("averaging", 10, False), ("diloco", 20, True)]
)
def test_a_strategy_says_what_its_rounds_are_if_the_job_does_not(name, local_steps, kept):
    job = build({"recipe": "a.py:recipe", "sync": {"name": name}}, source="a test")
    assert (job.local_steps, job.keeps_optimizers) == (local_steps, kept)
    assert job.per_commit.micro_batches == job.sync.participants == 8
    assert job.per_commit.global_batch == local_steps * 64
    sync = {"name": name, "options": {"fraction": 0.3, "local_optimizers": "kept"}}
    job = build({"recipe": "a.py:recipe", "sync": sync}, source="a test")
    assert (job.sync.taking_part, job.keeps_optimizers) == (2, True)
