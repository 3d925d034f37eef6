"""A file that cannot be imported."""

recipe = tinny.recipe  # noqa: F821
