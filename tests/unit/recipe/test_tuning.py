"""Which parameters a pattern means, and what a model is like once loaded, frozen and grouped."""

from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from instep.comm.memory import run_ranks
from instep.engine.alike import align_parameters
from instep.errors import CheckpointError, RecipeError, SpecError
from instep.job.start import StartSpec
from instep.recipe.build import build
from instep.recipe.recipe import Recipe
from instep.recipe.start.patterns import matched_by
from instep.recipe.tuning import rated_by

CPU = torch.device("cpu")
NAMES = ["body.0.weight", "body.0.bias", "body.1.weight", "head.weight", "head.bias"]
EACH = [(name,) for name in NAMES]


# ---- names


@pytest.mark.parametrize(
    ("patterns", "hit"),
    [
        (["body.*"], NAMES[:3]),
        (["*.bias"], ["body.0.bias", "head.bias"]),
        (["head.weight"], ["head.weight"]),
        (["body.[01].weight"], ["body.0.weight", "body.1.weight"]),
        (["body.?.bias", "head.*"], ["body.0.bias", "head.weight", "head.bias"]),
        (["*"], NAMES),
        ([], []),
    ],
)
def test_a_pattern_means_the_parameters_whose_name_it_matches(patterns, hit):
    assert [NAMES[number] for number in sorted(matched_by("start.freeze", patterns, EACH))] == hit


PATTERNS = st.lists(
    st.text(st.sampled_from("ab.*?"), min_size=1, max_size=4), unique=True, max_size=4
)
SOME_NAMES = st.lists(st.text(st.sampled_from("ab."), min_size=1, max_size=4), unique=True)


@given(PATTERNS, SOME_NAMES)
def test_what_is_frozen_is_what_some_pattern_matches_and_every_pattern_matches_something(
    patterns, names
):
    named = [(name,) for name in names]
    wanted = {n for n, name in enumerate(names) if any(fnmatchcase(name, p) for p in patterns)}
    idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if idle:
        with pytest.raises(SpecError, match="matches no parameter"):
            matched_by("start.freeze", patterns, named)
    else:
        assert matched_by("start.freeze", patterns, named) == wanted


@given(PATTERNS, SOME_NAMES, st.randoms())
def test_the_longest_pattern_decides_in_whatever_order_they_are_written(patterns, names, chance):
    named = [(name,) for name in names]
    shuffled = chance.sample(patterns, len(patterns))
    try:
        chosen = rated_by(patterns, named)
    except SpecError:
        with pytest.raises(SpecError):
            rated_by(shuffled, named)
        return
    assert rated_by(shuffled, named) == chosen
    assert set(patterns) <= set(chosen)
    for name, pattern in zip(names, chosen, strict=True):
        matching = [p for p in patterns if fnmatchcase(name, p)]
        letters = [len(p.replace("*", "").replace("?", "")) for p in matching]
        assert pattern == (matching[letters.index(max(letters))] if matching else None)


def test_a_longer_pattern_is_an_exception_from_a_shorter_one():
    chosen = rated_by(["body.*", "*", "body.1.weight"], EACH)
    assert chosen == ["body.*", "body.*", "body.1.weight", "*", "*"]
    assert rated_by(["*", "head.[bw]*"], EACH)[2:] == ["*", "head.[bw]*", "head.[bw]*"]


@pytest.mark.parametrize(
    ("patterns", "frozen", "words"),
    [
        (
            ["head"],
            [],
            ["'head', which matches no parameter", "Did you mean 'head.*'?", "Known: bo"],
        ),
        (["boddy.*"], [], ["Did you mean 'body.*'?"]),
        (["body.0"], [], ["Did you mean 'body.0.*'?"]),
        (["head.wieght"], [], ["Did you mean 'head.weight'?"]),
        (["["], [], ["'[', which matches no parameter of the model. Known: body.0.weight"]),
        (["xyz"], [], ["matches no parameter of the model. Known: body.0.weight"]),
        (["*.scale"], [("old.scale",)], ["'*.scale', which matches frozen parameters only"]),
        (["*", "body.*", "head.*"], [], ["'*', which longer patterns overrule"]),
        (["body.*", "*.bias"], [], ["both match 'body.0.bias', with equally many letters"]),
    ],
)
def test_a_pattern_that_does_nothing_or_is_not_clear_is_refused(patterns, frozen, words):
    with pytest.raises(SpecError) as refused:
        rated_by(patterns, EACH, frozen)
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)


def test_a_model_of_thousands_of_names_is_not_listed_whole():
    with pytest.raises(SpecError) as refused:
        matched_by(
            "start.freeze", ["xyz"], [(f"layers.{number}.weight",) for number in range(3000)]
        )
    assert "and 2992 more." in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_tied_parameter_is_meant_by_each_of_its_names():
    named = [("embedding.weight", "head.weight"), ("head.bias",)]
    assert matched_by("start.freeze", ["head.weight"], named) == {0}
    assert rated_by(["embedding.*"], named) == ["embedding.*", None]


# ---- a model that was built


class Net(nn.Module):
    def __init__(self, outputs=2):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6), nn.Dropout(0.5)
        )
        self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, outputs))

    def forward(self, x):
        return self.head(self.body(x))


DATA = [(torch.ones(4), 0)] * 4


def built(start, *, load=True, **changes):
    good = {
        "model": Net(),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "train": DATA,
    }
    return build(Recipe(**{**good, **changes}), 0, CPU, 10, StartSpec(**start), load=load)


@pytest.fixture
def file(tmp_path):
    """A model with three outputs, every tensor full of sevens."""
    tensors = {name: torch.full_like(t, 7) for name, t in Net(3).state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_file_that_fits_is_loaded_whole_before_the_optimizer_is_made(file):
    seen = []

    def optimizer(parameters):
        seen.extend(parameter.clone() for parameter in parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    made = built({"model": str(file)}, model=Net(3), optimizer=optimizer)
    assert all((tensor == 7).all() for tensor in made.model.state_dict().values())
    assert seen
    assert all((tensor == 7).all() for tensor in seen)
    assert str(made.loaded.fit.report) == "19 of 19 tensors match."
    fields = made.loaded.fields()
    assert (fields["matched"], fields["missing"], fields["wrong"]) == (19, [], {})
    assert len(fields["sha256"]) == 64


def test_a_folder_with_a_model_in_it_stands_for_the_model(file):
    assert built({"model": str(file.parent)}, model=Net(3)).loaded.fit.path == file


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (".metadata", "format_utils dcp_to_torch"),
        ("__0_0.distcp", "format_utils dcp_to_torch"),
        ("zero_to_fp32.py", "python zero_to_fp32.py . OUTPUT"),
        ("global_step7/mp_rank_00_model_states.pt", "python zero_to_fp32.py . OUTPUT"),
        ("pytorch_model-00001-of-00002.bin", "safe_serialization=True"),
        ("other.safetensors.index.json", r"Give other\.safetensors\.index\.json"),
    ],
)
def test_a_folder_of_another_program_is_answered_with_how_to_convert_it(tmp_path, file, words):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(SpecError, match=words):
        built({"model": str(tmp_path)})


def test_a_file_that_does_not_fit_is_refused_with_the_names_and_the_way_out(file):
    with pytest.raises(CheckpointError) as refused:
        built({"model": str(file)})
    for words in ("17 of 19 tensors match", "head.2.weight ([3, 6] in the file", "partial = true"):
        assert words in str(refused.value)


def test_a_partial_start_takes_what_matches_and_names_the_rest(file):
    made = built({"model": str(file), "partial": True})
    fields = made.loaded.fields()
    assert fields["matched"] == 17
    assert list(fields["wrong"]) == ["head.2.weight", "head.2.bias"]
    values = made.model.state_dict()
    assert all((values[name] == 7).all() == ("head.2" not in name) for name in values)


def test_a_run_that_goes_on_freezes_and_groups_but_does_not_load(file):
    start = {"model": "/gone", "freeze": ("body.*",), "learning_rates": {"head.2.*": 0.5}}
    made = built(start, load=False)
    assert made.loaded is None
    assert not made.model.body[0].weight.requires_grad
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.1, 0.5]


def test_frozen_parameters_need_no_gradient_and_are_kept_from_the_optimizer():
    made = built({"freeze": ("body.*", "*.bias")})
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert trained == {"head.0.weight", "head.1.weight", "head.2.weight"}
    held = [p for group in made.optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in made.parameters]
    assert len(held) == 3


def test_a_frozen_part_stays_in_eval_mode_and_the_rest_does_not():
    model = built({"freeze": ("body.*",)}).model
    for mode in (True, False, True):
        model.train(mode)
        assert not any(module.training for module in model.body.modules())
        assert all(module.training == mode for module in model.head.modules())
    model.body[2].train()
    assert not model.body[2].training
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = (model.body(torch.randn(8, 4, generator=seeded())) for _ in range(2))
    assert torch.equal(first, second)  # no dropout is drawn
    model(torch.randn(8, 4))
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved == {"head.1.running_mean", "head.1.running_var", "head.1.num_batches_tracked"}


def seeded():
    return torch.Generator().manual_seed(1)


def test_a_layer_of_which_a_part_is_trained_follows_train():
    model = built({"freeze": ("*.bias",)}).model.train()
    assert all(module.training for module in model.modules())


def test_what_the_recipe_itself_froze_stays_frozen_and_follows_train():
    model = Net()
    model.body.requires_grad_(False)
    made = built({"freeze": ("head.0.*",)}, model=model)
    assert made.model.train().body[2].training
    assert not made.model.head[0].training
    assert len(made.parameters) == 4


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (
            {"freeze": ("*",)},
            ["start.freeze = ['*'] leaves nothing to train", "10 of the model's 10"],
        ),
        ({"freeze": ("bodi.*",)}, ["start.freeze has 'bodi.*'", "Did you mean 'body.*'?"]),
        ({"learning_rates": {"had.*": 1}}, ["start.learning_rates has 'had.*'", "'head.*'?"]),
        (
            {"freeze": ("body.*",), "learning_rates": {"body.0.*": 1}},
            ["'body.0.*', which matches frozen parameters only"],
        ),
        ({"model": "/nowhere/m.safetensors"}, ["there is no such file"]),
    ],
)
def test_a_start_that_does_not_fit_the_model_is_refused(start, words):
    with pytest.raises(SpecError) as refused:
        built(start)
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)


def test_learning_rates_arrive_in_groups_in_the_order_of_the_job_after_the_rest():
    rates = {"head.2.*": 0.5, "body.*": 0.001}
    made = built({"learning_rates": rates})
    names = {id(p): name for name, p in made.model.named_parameters()}
    found = [
        (group["lr"], [names[id(p)] for p in group["params"]])
        for group in made.optimizer.param_groups
    ]
    assert found == [
        (0.1, ["head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"]),
        (0.5, ["head.2.weight", "head.2.bias"]),
        (0.001, ["body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"]),
    ]
    assert sum(len(names) for _, names in found) == len(made.parameters)


def test_where_patterns_match_all_there_is_no_group_for_the_rest():
    made = built({"learning_rates": {"*": 0.5}})
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.5]


def test_a_scheduler_scales_the_rate_of_each_group():
    made = built(
        {"learning_rates": {"body.*": 0.01}},
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    )
    made.optimizer.step()
    made.scheduler.step()
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.05, 0.005]


def test_rates_beside_groups_of_the_recipe_are_refused():
    with pytest.raises(SpecError, match=r"Recipe\.parameters.*Leave one of them out"):
        built({"learning_rates": {"body.*": 0.01}}, parameters=lambda model: model.parameters())


def test_groups_of_the_recipe_go_with_what_is_frozen():
    made = built({"freeze": ("body.*",)}, parameters=lambda model: model.parameters())
    assert len(made.parameters) == 6


def test_an_optimizer_that_keeps_its_rates_as_tensors_has_taken_them():
    def tensors(groups):
        made = torch.optim.SGD(groups, lr=0.1)
        for group in made.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        return made

    made = built({"learning_rates": {"body.*": 0.01}}, optimizer=tensors)
    assert [float(g["lr"]) for g in made.optimizer.param_groups] == pytest.approx([0.1, 0.01])


def test_an_optimizer_that_drops_the_rates_is_refused():
    def flattened(groups):
        return torch.optim.SGD([p for group in groups for p in group["params"]], lr=0.1)

    with pytest.raises(RecipeError, match=r"gives 0\.01 to 'body\.0\.weight'.*has 0\.1 for it"):
        built({"learning_rates": {"body.*": 0.01}}, optimizer=flattened)


def test_a_file_that_is_not_the_same_for_all_workers_is_found_before_the_first_step(tmp_path):
    files = [tmp_path / f"{rank}.safetensors" for rank in range(2)]
    tensors = Net().state_dict()
    save_file(tensors, files[0])
    save_file({**tensors, "body.1.running_mean": torch.ones(6)}, files[1])
    models = [built({"model": str(file)}).model for file in files]
    with pytest.raises(RecipeError, match=r"'body\.1\.running_mean' has other values on rank 1"):
        run_ranks(2, lambda comm: align_parameters(models[comm.rank], comm))
