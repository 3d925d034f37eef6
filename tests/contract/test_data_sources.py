"""Every data source refuses what it cannot read, by a `DataError` that names the file."""

import re

import pytest

from instep.data import SOURCES, sources
from instep.errors import DataError

ARGUMENTS = {"text": {"length": 4}, "tokens": {"length": 4}}
"""Arguments without a default, beside the path."""


@pytest.mark.parametrize("name", SOURCES)
def test_a_path_that_does_not_exist_is_a_data_error_that_names_it(tmp_path, name):
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "nowhere"))):
        SOURCES[name](tmp_path / "nowhere", **ARGUMENTS.get(name, {}))


@pytest.mark.parametrize("name", SOURCES)
def test_an_empty_folder_is_a_data_error_that_names_it(tmp_path, name):
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        SOURCES[name](tmp_path, **ARGUMENTS.get(name, {}))


@pytest.mark.parametrize("name", SOURCES)
def test_an_empty_file_is_a_data_error_that_names_it(tmp_path, name):
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        SOURCES[name](tmp_path / "empty", **ARGUMENTS.get(name, {}))


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_of_the_table_can_be_imported_from_sources(name):
    assert getattr(sources, name) is SOURCES[name]


def test_a_source_that_is_in_no_table_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'mnits'"):
        _ = sources.mnits
