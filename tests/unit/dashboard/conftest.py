"""Chromium, and axe-core, for the tests that look at a page."""

import shutil
import subprocess
import tarfile

import pytest


@pytest.fixture(scope="session")
def chromium():
    """Where it is."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    return found or pytest.skip("needs chromium")


@pytest.fixture(scope="module")  # while it lives, asyncio.run does not work
def browser(chromium):
    """Chromium, without a window."""
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as tools:
        found = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


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
