"""What the suite leaves to others of a grid, and what whoever collects it does not import."""

import pytest

from lazily import Lazy, needs

KEPT = {(1, "a", "x"), (2, "b", "y"), (3, "a", "x")}
"""Each value of each axis, on the diagonal."""


@pytest.mark.grid
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(("letter", "other"), [("a", "x"), ("b", "y")])
def test_of_a_grid_all_but_the_diagonal_is_in_the_tail(
    request: pytest.FixtureRequest, number: int, letter: str, other: str
) -> None:
    left = request.node.get_closest_marker("tail") is not None
    assert left == ((number, letter, other) not in KEPT)


def test_a_test_is_skipped_where_the_package_that_it_needs_is_not_there() -> None:
    assert needs("there_is_no_such_package").args == (True,)
    assert needs("torch").args == (False,)


def test_a_lazy_package_is_not_imported_for_what_pytest_asks_of_all_that_it_collects() -> None:
    package = Lazy("there_is_no_such_package")
    assert not hasattr(package, "_mock_name")
    assert not hasattr(package, "__wrapped__")
    with pytest.raises(ModuleNotFoundError):
        package.anything  # noqa: B018
