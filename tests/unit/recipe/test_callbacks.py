import pytest

import instep
from instep.errors import RecipeError
from instep.recipe.callbacks import MOMENTS, check_callbacks, checked_value, methods


class Good(instep.Callback):
    def on_save(self, context, checkpoint):
        pass


class OfItsOwn:
    def on_step_end(self, context):
        pass


class Nothing(instep.Callback):
    pass


class Misspelled(instep.Callback):
    def on_step_ends(self, context):
        pass


def test_only_what_a_callback_has_of_its_own_is_called():
    assert methods(Good()) == ["on_save"]
    assert methods(OfItsOwn()) == ["on_step_end"]
    assert methods(instep.Callback()) == []
    assert set(MOMENTS) <= set(dir(instep.Callback))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Good(), "but a list is wanted"),
        ([Good], r"the class Good, but an object is wanted: Good\(\)"),
        ([Nothing()], "has a Nothing, which has none of on_step_end"),
        ([Good(), Misspelled()], "Misspelled.on_step_ends .* never called.*Did you mean"),
        ([print], "it would never be called"),
    ],
)
def test_what_could_never_be_called_is_refused(given, said):
    with pytest.raises(RecipeError, match=said):
        check_callbacks(given)


def test_good_ones_pass():
    check_callbacks([Good(), OfItsOwn()])
    check_callbacks(())


@pytest.mark.parametrize("name", ["", "a\nb", 3, "x" * 200, "é"])
def test_a_name_that_cannot_be_one_is_refused(name):
    with pytest.raises(RecipeError, match="a name needs letters"):
        checked_value(name, 1.0)


@pytest.mark.parametrize("name", ["loss", "train/loss", "validation/x", "learning_rate"])
def test_names_of_the_run_itself_are_refused(name):
    with pytest.raises(RecipeError, match="the run logs this name itself"):
        checked_value(name, 1.0)


def test_a_value_is_one_number():
    import torch

    assert checked_value("a/b", torch.tensor([2.5])) == 2.5
    for wrong in ("x", None, torch.zeros(2)):
        with pytest.raises(RecipeError, match="one number is wanted"):
            checked_value("a", wrong)
