"""Chromium, and axe-core, for the tests that look at a page."""

import shutil
import subprocess
import tarfile
from contextlib import ExitStack

import pytest


@pytest.fixture(scope="session")
def chromium():
    """Where it is."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    return found or pytest.skip("needs chromium")


@pytest.fixture(scope="module")  # while it lives, asyncio.run does not work
def launch(chromium):
    """Starts a Chromium without a window, with these options more."""
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as tools, ExitStack() as all_of_them:

        def start(*words, **more):
            words = ["--no-sandbox", *words]
            found = tools.chromium.launch(executable_path=chromium, args=words, **more)
            all_of_them.callback(found.close)
            return found

        yield start


@pytest.fixture(scope="module")
def browser(launch):
    """Chromium, without a window."""
    return launch()


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    """The text of axe-core, from npm."""
    folder = tmp_path_factory.mktemp("axe")
    words = ["npm", "pack", "axe-core@4.14.1", "--silent"]
    if shutil.which("npm") is None or subprocess.run(words, cwd=folder, check=False).returncode:
        pytest.skip("needs npm, and its registry")
    (package,) = folder.glob("*.tgz")
    with tarfile.open(package) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()
