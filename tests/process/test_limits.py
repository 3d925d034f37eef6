"""What a test says of a wait comes before the end that pytest makes of it."""

import re
from pathlib import Path

import pytest
from started import TIMEOUT_S


def test_no_test_may_take_as_little_as_two_of_its_waits(request: pytest.FixtureRequest) -> None:
    assert float(request.config.getini("timeout")) > 2 * TIMEOUT_S
    files = (Path(__file__).parents[1]).rglob("*.py")
    text = "".join(file.read_text("utf-8") for file in files)
    limits = re.findall(r"mark\.timeout\((\d+)\)", text)
    assert [limit for limit in limits if int(limit) <= 2 * TIMEOUT_S] == []
