"""A Ray cluster is shown the token of its user, where nothing says otherwise."""

import os
import subprocess
import sys

import pytest

SHOWN = """
from instep.launch.ray_private import show_token
from ray._raylet import AuthenticationMode, get_authentication_mode
show_token()
print(get_authentication_mode() == AuthenticationMode.TOKEN)
"""


@pytest.mark.parametrize(("mode", "shown"), [({}, True), ({"RAY_AUTH_MODE": "disabled"}, False)])
def test_a_token_is_shown_where_there_is_one_unless_the_user_says_otherwise(tmp_path, mode, shown):
    pytest.importorskip("ray")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    environment = {**os.environ, "HOME": str(tmp_path), **mode}
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(shown)], done.stderr
