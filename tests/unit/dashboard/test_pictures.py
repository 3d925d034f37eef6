"""The pages look as they did: each is compared with a picture, on a phone and wide, light and dark.

A picture that is missing in `pictures/` is written, and the test fails: look at it, and keep it if
it is right. After a change that is wanted, remove the pictures that differ.
"""

import io
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from instep.dashboard.serve import beside
from made_up_runs import make_run
from made_up_searches import make_pool, make_search

images = pytest.importorskip("PIL.Image")
pytest.importorskip("playwright.sync_api")
pytest.importorskip("starlette")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]

PICTURES = Path(__file__).parent / "pictures"
SMALLER, MOST_DIFFERENT, MOST_SHARE = 2, 48, 0.004
"""How much smaller pictures are kept; by how much a value of a pixel may differ, of 255, and which
share of them may differ by more."""

FONTS = "DejaVu Sans", "DejaVu Sans Mono"
PAGES = {
    "runs": ("#/", "td.name a"),
    "run": ("#/run/one", "figure[data-drawn]"),
    "failed": ("#/run/failed", "figure[data-drawn]"),
    "compare": ("#/compare/one/other", "figure[data-drawn]"),
    "search": ("#/search/net-search", "figure[data-drawn]"),
    "pool": ("#/pool", "h1:text-is('Pool')"),
}
STILL = """([plain, mono]) => {
  const style = document.createElement("style");
  style.textContent = `body, button, select, input { font-family: "${plain}" !important }
    code, pre { font-family: "${mono}" !important } * { transition: none !important }`;
  document.head.append(style);
}"""
NO_PATHS = """() => {
  for (const each of document.querySelectorAll(".command code")) each.textContent = "instep ...";
}"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory, browser):
    """A page with a session."""
    if shutil.which("fc-list") is None or not all(
        subprocess.run(["fc-list", font], capture_output=True, check=False).stdout for font in FONTS
    ):
        pytest.skip("needs the fonts DejaVu")
    folder = tmp_path_factory.mktemp("pictured") / "runs"
    for name, more in (
        ("one", {"epochs": 8}),
        ("other", {"workers": 3}),
        ("failed", {"outcome": "failed", "steps": 30}),
    ):
        (make_run(folder / name, **more) / "run.id").write_text(name)
    make_search(folder / "net-search")
    make_pool(folder.parent / "pool")
    links = []
    with beside(folder, links.append):
        context = browser.new_context(bypass_csp=True, timezone_id="UTC", reduced_motion="reduce")
        page = context.new_page()
        page.goto(links[0])
        page.wait_for_selector("td.name a")
        page.evaluate(STILL, FONTS)
        yield page
        context.close()


def smaller(data):
    image = images.open(io.BytesIO(data)).convert("RGB")
    return image.resize((image.width // SMALLER, image.height // SMALLER), images.Resampling.BOX)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_looks_as_its_picture(opened, name, width, scheme):
    where, wait_for = PAGES[name]
    opened.emulate_media(color_scheme=scheme)
    opened.set_viewport_size({"width": width, "height": 900})
    opened.evaluate("location.hash = '#/run/none'")
    opened.wait_for_selector("h1:text-is('This run is not here')")
    opened.evaluate(f"location.hash = {json.dumps(where)}")
    opened.wait_for_selector(wait_for)
    opened.evaluate(NO_PATHS)
    opened.wait_for_timeout(300)  # a chart fits its width once it is laid out
    seen = smaller(opened.screenshot(full_page=True))
    file = PICTURES / f"{name}-{width}-{scheme}.webp"
    if not file.exists():
        PICTURES.mkdir(exist_ok=True)
        seen.save(file, quality=70, method=6)
        pytest.fail(f"{file.name} was not there, and is written: look at it")
    known = images.open(file).convert("RGB")
    assert seen.size == known.size
    apart = np.abs(np.asarray(seen, int) - np.asarray(known, int)).max(axis=2)
    assert (apart > MOST_DIFFERENT).mean() <= MOST_SHARE
