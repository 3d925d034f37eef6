"""uPlot is what its npm package has, unchanged."""

import hashlib
import tomllib
from importlib.resources import files

import pytest

CHARTS = files("instep.report.charts")
VENDORED = tomllib.loads(CHARTS.joinpath("vendored.toml").read_text())


@pytest.mark.parametrize("name", VENDORED["files"])
def test_a_file_of_another_project_is_unchanged(name):
    data = CHARTS.joinpath(name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == VENDORED["files"][name]


def test_its_licence_lies_beside_it():
    text = CHARTS.joinpath("uplot.LICENSE").read_text()
    assert text.startswith("The MIT License (MIT)")
    assert VENDORED["version"] in CHARTS.joinpath("uplot.js").read_text()[:100]
