"""The page on a machine that reaches nobody: a network namespace that has loopback alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lazily import needs
from made_up_runs import make_run
from made_up_searches import make_pool, make_search

pytestmark = [needs("playwright"), needs("starlette"), pytest.mark.slow, pytest.mark.process]

ALONE = ("unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
PAGES = {
    "#/": "td.name a",
    "#/run/one": "figure[data-drawn]",
    "#/compare/one/other": "figure[data-drawn]",
    "#/search/net-search": "figure[data-drawn]",
    "#/pool": "h1:text-is('Pool')",
}


def look(folder: Path, chromium: str) -> None:
    """Open each page; prints what was asked for, and what the browser complained of."""
    from playwright.sync_api import sync_playwright

    from instep.dashboard.serve import beside

    links: list[str] = []
    with sync_playwright() as tools, beside(folder, links.append):
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        asked, said = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(links[0])
        for where, wait_for in PAGES.items():
            page.evaluate(f"location.hash = {json.dumps(where)}")
            page.wait_for_selector(wait_for)
        browser.close()
    print(json.dumps({"asked": asked, "said": said, "link": links[0]}))


def test_all_pages_work_where_nothing_but_loopback_can_be_reached(tmp_path, chromium):
    if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a network namespace")
    runs = tmp_path / "runs"
    for name in ("one", "other"):
        (make_run(runs / name) / "run.id").write_text(name)
    make_search(runs / "net-search")
    make_pool(tmp_path / "pool")
    words = [sys.executable, __file__, str(runs), chromium]
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*ALONE, *words], capture_output=True, text=True, env=around, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    own = found["link"].partition("#")[0]
    assert len(found["asked"]) > 15
    assert all(url.startswith(own) for url in found["asked"])
    assert found["said"] == []


if __name__ == "__main__":
    look(Path(sys.argv[1]), sys.argv[2])
