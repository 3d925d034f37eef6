"""A script that forgot `if __name__ == "__main__":`."""

import tiny

import instep

recipe = tiny.recipe

instep.train(__file__ + ":recipe", workers=2)
