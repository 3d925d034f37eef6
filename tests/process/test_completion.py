"""Completion in a real bash and a real zsh, with what is typed and the Tab key."""

import os
import pty
import re
import shutil
import subprocess
import time

import pytest

from instep.cli import COMMANDS, GROUPS
from instep.cli.completion import script
from instep.cli.parsing import make_parser
from instep.system.processes import wait_readable

pytestmark = pytest.mark.process

START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
READ = {
    "bash": "bind 'set show-all-if-ambiguous on'; source ./instep.sh",
    "zsh": "autoload -Uz compinit; compinit -u -D; setopt no_beep; source ./instep.sh",
}


@pytest.fixture(params=["bash", "zsh"])
def shell(request, tmp_path):
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    (tmp_path / "instep.sh").write_text(script(request.param, make_parser(GROUPS)))
    (tmp_path / "runs" / "net").mkdir(parents=True)
    (tmp_path / "job.toml").touch()
    typed = Terminal(request.param, tmp_path)
    yield typed
    typed.close()


class Terminal:
    """An interactive shell at the other end of a terminal."""

    def __init__(self, shell, folder):
        self._end, theirs = pty.openpty()
        environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "$ ", "HOME": str(folder)}
        self._process = subprocess.Popen(
            START[shell],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.types(f"{READ[shell]}; echo re''ady\n", until="ready\r\n")

    def types(self, text, until):
        """Type, and read until there is such text; what was read."""
        os.write(self._end, text.encode())
        read, deadline = "", time.monotonic() + 60
        while until not in read:
            left_s = deadline - time.monotonic()
            assert wait_readable([self._end], max(left_s, 0)), (until, read)
            read += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x07", "", os.read(self._end, 4096).decode())
        return read

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._end)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("instep predi", "predict "),
        ("instep run job", "job.toml "),
        ("instep run --check", "--check-determinism "),
        ("instep run job.toml --set train.global_b", "train.global_batch="),
        ("instep run job.toml --on sl", "slurm "),
        ("instep status ru", "runs/"),
        ("instep --vers", "--version "),
        ("instep init hugg", "hugging-face "),
        ("instep completion z", "zsh "),
        ("instep netlab part", "partition "),
        ("instep netlab up --ra", "--rate "),
        ("instep scale runs/net --wor", "--workers "),
    ],
)
def test_a_press_of_tab_completes(shell, typed, completed):
    rest = completed.removeprefix(typed.rpartition(" ")[2])
    shell.types(f"{typed}\t", until=f"{typed}{rest}")


def test_where_several_fit_all_are_shown(shell):
    shown = shell.types("instep re\t\t", until="resume")
    while "report" not in shown or "replay" not in shown:
        shown += shell.types("", until="re")


def test_every_command_and_option_is_in_both_scripts():
    parser = make_parser(GROUPS)
    for text in (script("bash", parser), script("zsh", parser)):
        assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", text)] == []
        for option in ("--check-determinism", "--token-file", "--partitions", "--living"):
            assert option in text
