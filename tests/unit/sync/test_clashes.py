"""What does not go together is refused in one sentence, and nothing else is."""

import itertools
from types import SimpleNamespace

import pytest

from instep.errors import SpecError
from instep.job import file as spec_file
from instep.sync.clashes import CLASHES, check
from instep.sync.settings import SETTINGS

JOBS = {
    "averaging": {"sync": {"name": "averaging", "participants": 8}},
    "own_data": {"sync": {"name": "averaging", "options": {"partition": "blocks"}}},
    "start_after": {"sync": {"name": "averaging", "options": {"start_after": 5}}},
    "streams": {"sync": {"name": "diloco", "options": {"fragments": 2}}},
    "local_parameters": {"sync": {"name": "diloco", "options": {"local_parameters": ["norm.*"]}}},
    "local_optimizers": {"sync": {"name": "diloco", "options": {"local_optimizers": "reset"}}},
    "clip": {
        "train": {"determinism": "bits"},
        "sync": {"name": "diloco", "options": {"clip": 1.0}},
    },
    "secure_sums": {
        "train": {"determinism": "bits"},
        "sync": {
            "name": "diloco",
            "options": {
                "clip": 1.0,
                "partition": "blocks",
                "secure_sums": True,
                "local_optimizers": "reset",
            },
        },
    },
    "median": {"sync": {"name": "averaging", "options": {"combine": "median"}}},
    "fraction": {"sync": {"name": "diloco", "participants": 16, "options": {"fraction": 0.5}}},
    "server_sync": {"sync": {"name": "server_sync"}},
    "leased": {"sync": {"name": "server_async"}},
    "codec": {"sync": {"codec": "int8"}},
    "sign_vote": {"sync": {"name": "sign_vote"}},
    "merge": {"train": {"merge": "always"}},
    "clipping": {"train": {"max_grad_norm": 1.0}},
    "delayed": {"sync": {"options": {"delayed": True}}},
    "powersgd": {"sync": {"codec": "powersgd"}},
    "dgc": {"sync": {"codec": "dgc"}},
    "no_rounds": {"sync": {"codec": "nonzero"}},
    "shard": {"mesh": {"shard": 2}},
    "tensor": {"mesh": {"tensor": 2}},
    "stages": {"mesh": {"stages": 2}},
    "bits": {"train": {"determinism": "bits"}},
    "batch_norm": {"train": {"batch_norm": "global"}},
    "cuda": {"train": {"device": "cuda"}},
    "float16": {"train": {"precision": "float16"}},
    "corruption": {"train": {"determinism": "bits"}, "check": {"corruption": True}},
    "norm_rule": {"stop": {"gradient_norm": 0.5}},
    "ema": {"train": {"ema": 0.99}},
    "learning_rates": {"start": {"learning_rates": {"a.*": 0.1}}},
    "parts": {"data": {"order": "windowed", "parts": 4}},
    "balance": {"data": {"balance": "resample"}},
    "sampler": {},
    "draws": {},
    "iterable": {},
    "sources": {"data": {"sources": [{"name": "a"}]}},
    "once": {"data": {"once": True}},
    "reweight": {"data": {"balance": "reweight"}},
    "stratified": {"data": {"balance": "stratified"}},
    "in_order": {"data": {"order": "dataset"}},
    "tokens": {"train": {"tokens_per_batch": 4096}},
    "length_sampler": {},
    "own_loop": {"recipe": "a.py:__main__"},
    "private": {"privacy": {"protects": "sample", "noise": 1.0, "delta": 1e-5}},
    "private_samples": {"privacy": {"protects": "sample", "noise": 1.0, "delta": 1e-5}},
    "private_rounds": {
        "sync": {"name": "diloco"},
        "privacy": {"protects": "participant", "noise": 1.0, "delta": 1e-5},
    },
    "turns": {},
    "batch_loss": {},
}
NEEDS = {
    "own_data": {"averaging"},
    "start_after": {"averaging"},
    "streams": {"averaging"},
    "local_parameters": {"averaging"},
    "local_optimizers": {"averaging"},
    "clip": {"averaging", "bits"},
    "secure_sums": {"averaging", "own_data", "clip", "bits", "local_optimizers"},
    "median": {"averaging"},
    "fraction": {"averaging"},
    "corruption": {"bits"},
    "powersgd": {"codec", "no_rounds"},
    "dgc": {"codec", "no_rounds"},
    "no_rounds": {"codec"},
    "private": {"private_samples"},
    "private_samples": {"private"},
    "private_rounds": {"private", "averaging"},
    "reweight": {"balance"},
    "stratified": {"balance"},
}
"""Settings that another brings along."""
STRATEGIES = {"averaging", "server_sync", "leased", "delayed", "sign_vote", "private_rounds"}
"""A job has one, or an option of all_reduce."""
ALONE = [
    {"streams", "median"},
    {"private", "private_rounds"},
    {"private_samples", "private_rounds"},
    {"merge", "clip"},
    {"merge", "secure_sums"},
    {"merge", "bits"},
    {"merge", "corruption"},
    {"parts", "balance"},
    {"parts", "sources"},
    {"in_order", "sources"},
    {"parts", "stratified"},
    {"in_order", "balance"},
    {"in_order", "stratified"},
]
"""Pairs that `job/spec.py` refuses."""


def options_of(section):
    return section.get("options", {})


def asking_for(*names):
    table = {"recipe": "a.py:recipe", "workers": 8}
    for name in names:
        for section, keys in JOBS[name].items():
            before = table.get(section, {})
            if isinstance(keys, dict):
                keys = {**before, **keys}
                keys |= {"options": o} if (o := options_of(before) | options_of(keys)) else {}
            table[section] = keys
    train = SimpleNamespace(
        wishes=[2.0, 1.0] if "sampler" in names else None,
        draws=[5] if "draws" in names else None,
        grouped=[5, 4] if "length_sampler" in names else None,
        streams="iterable" in names,
    )
    recipe = SimpleNamespace(
        turns=[1, 2] if "turns" in names else [],
        batch_loss=print if "batch_loss" in names else None,
        given={"train": train},
    )
    return spec_file.build(table, source="a test"), recipe


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_seen_where_it_is_asked_for_and_only_there(name):
    given = asking_for(name)
    seen = {other for other, setting in SETTINGS.items() if setting.asked(*given)}
    assert seen == {name} | NEEDS.get(name, set())
    check(*given)


PAIRS = [
    pair
    for pair in itertools.combinations(SETTINGS, 2)
    if not STRATEGIES.issuperset(pair) and {*pair} not in ALONE
]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pair_is_refused_if_the_table_has_it_and_only_then(name):
    """Each pair stands under the setting that the table of settings has first."""
    for pair in (pair for pair in PAIRS if pair[0] == name):
        check_pair(pair)


def check_pair(pair):
    asked = {*pair}.union(*(NEEDS.get(name, ()) for name in pair))
    wanted = [CLASHES[each] for each in CLASHES if asked.issuperset(each)]
    if not wanted:
        check(*asking_for(*pair))
        return
    with pytest.raises(SpecError) as refused:
        check(*asking_for(*pair))
    assert any(f": {why}. Leave one of " in str(refused.value) for why in wanted)
    assert "{" not in str(refused.value)


def test_parts_are_refused_at_once_where_no_recipe_comes_that_could_have_a_stream():
    job, _ = asking_for("parts", "own_loop")
    with pytest.raises(SpecError, match=r"data\.parts = .* does not go with a loop of your own"):
        check(job)
    check(asking_for("parts", "leased")[0])  # of a recipe it shows later
