"""Runs and parts of a step can be told apart by those who see colours in another way.

Colours are seen as Machado, Oliveira and Fernandes (2009) model it, without one of the three kinds
of cones, and their distance is that of CIELAB.
"""

import re
from importlib.resources import files

import numpy as np
import pytest

SEEN = {
    "by most": np.eye(3),
    "without red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "without green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "without blue": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def linear(text):
    part = np.array([int(text[at : at + 2], 16) / 255 for at in (0, 2, 4)])
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    found = TO_XYZ @ rgb / WHITE
    x, y, z = np.where(found > 0.008856, np.cbrt(found), 7.787 * found + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def colours(file, scheme):
    """By name, those of a style sheet."""
    package, name = file
    light, _, dark = files(package).joinpath(name).read_text().partition("@media (prefers-color")
    text = light if scheme == "light" else dark
    return dict(re.findall(r"--(\w+): #(\w{6})", text)[:60])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "file", [("instep.dashboard.static", "page.css"), ("instep.report.page", "page.css")]
)
def test_colours_are_far_enough_apart_for_everybody_and_stand_out_from_the_paper(file, scheme):
    known = colours(file, scheme)
    runs = [linear(known[f"run{number}"]) for number in range(8)]
    parts = [linear(known[f"c{number}"]) for number in range(7)]
    for how, matrix in SEEN.items():
        run, part = (
            np.array([lab(np.clip(matrix @ np.array(rgb), 0, 1)) for rgb in each])
            for each in (runs, parts)
        )
        apart = np.linalg.norm(run[:, None] - run, axis=2) + 1e3 * np.eye(8)
        assert apart.min() > 9, how
        assert apart[:4, :4].min() > 14, how
        assert np.linalg.norm(np.diff(part, axis=0), axis=1).min() > 10, how
    paper = TO_XYZ[1] @ linear(known["card"])
    for rgb in runs:
        light, dark = sorted((TO_XYZ[1] @ rgb, paper), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 3
