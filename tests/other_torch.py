"""Run the contract suites, and the tests of what touches torch most, with another release of torch.

    make test-torch VERSION=2.14.1

The release gets an environment of its own in `.venv`: with gigabytes of CUDA where no CPU wheel of
it is offered, so this is no part of `.ci/run`. The package is not installed there, as its
`torch<...` may not allow the release yet. Once the suites pass, raise that bound in
`pyproject.toml`: it names the newest release that was tested.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNITS = ("parallel", "worker", "state", "sync", "comm", "recipe", "system")
SUITES = ["tests/contract", *(f"tests/unit/{name}" for name in UNITS)]


def main(version: str, *options: str) -> int:
    """Make the environment unless it is there, and test; returns the exit code of pytest."""
    folder = ROOT / ".venv" / f"torch-{version}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        make(folder, python, version)
        (folder / "ready").touch()
    set_here = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    words = [str(python), "-m", "pytest", "-n", "2", "--dist", "loadfile", *SUITES, *options]
    return subprocess.run(words, cwd=ROOT, env={**os.environ, **set_here}, check=False).returncode


def make(folder: Path, python: Path, version: str) -> None:
    """An environment with this torch, and with what the package and its tests need besides."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, f"torch=={version}"], check=True)
    kept = folder / "torch.txt"
    kept.write_text(f"torch=={version}\n")
    uv = shutil.which("uv")
    install = [uv, "pip", "install", "--quiet", "--python", str(python)] if uv else pip
    subprocess.run([*install, "--constraint", str(kept), *needs()], check=True)


def needs() -> list[str]:
    """What the package and its tests need, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    every = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [need for need in every if not need.startswith("torch>")]


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1]:
        sys.exit("which torch? make test-torch VERSION=2.14.1")
    sys.exit(main(*sys.argv[1:]))
