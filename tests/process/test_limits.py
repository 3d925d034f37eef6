"""What a test says of a wait comes before the end that pytest makes of it."""

import re
from pathlib import Path

import pytest
from started import TIMEOUT_S


@pytest.mark.process
def test_tests_that_start_processes_may_take_longer_than_their_waits(
    request: pytest.FixtureRequest,
) -> None:
    mark = request.node.get_closest_marker("timeout")
    assert mark is not None
    assert mark.args[0] > 2 * TIMEOUT_S
    found = {
        (file.name, limit)
        for file in Path(__file__).parent.glob("*.py")
        for limit in re.findall(r"mark\.timeout\((\d+)\)", file.read_text("utf-8"))
    }
    assert found
    assert [each for each in found if int(each[1]) <= TIMEOUT_S] == []
