"""Each page looks as it did, on a phone and wide, light and dark: compared with a picture.

`pictures/` has what was looked at and found right: pictures, half as large, and in `boxes.json`
where each part of a page lies. Where one is missing it is written, and the test fails: look at it,
and commit it if it is right. After a change that is wanted, remove those that differ, and run the
test twice. Chromium sees no other fonts than DejaVu here, and does not fit them to pixels, so that
another machine draws the same.
"""

import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from instep.dashboard.serve import beside
from lazily import needs
from made_up_runs import make_run
from made_up_searches import make_pool, make_search

images = pytest.importorskip("PIL.Image")
pytestmark = [
    needs("playwright"),
    needs("starlette"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

PICTURES = Path(__file__).parent / "pictures"
BOXES = PICTURES / "boxes.json"
SMALLER, BLOCK = 2, 16
"""How much smaller pictures are kept; pixels of a block of these, down and to the right."""
MOST_DIFFERENT, MOST_OF_A_BLOCK, MOST_BLOCKS, MOST_MOVED = 48, 0.1, 0.002, 2
"""By how much a pixel may differ, of 255; in which share of a block by more, and in which share of
the blocks that may be passed; and by how many pixels of the page a part may have moved."""

FONTS = ("DejaVu Sans:bold", "DejaVu Sans:book", "DejaVu Sans Mono:bold", "DejaVu Sans Mono:book")
ONLY_THESE = """<?xml version="1.0"?><fontconfig><dir>{}</dir><cachedir>{}</cachedir>
<match target="pattern"><edit name="family" mode="append_last"><string>DejaVu Sans</string></edit>
</match></fontconfig>"""
SAME_EVERYWHERE = (
    *("--font-render-hinting=none", "--disable-lcd-text", "--force-color-profile=srgb"),
    *("--hide-scrollbars", "--disable-gpu"),
)
PAGES = {
    "runs": ("#/", "td.name a"),
    "run": ("#/run/one", "figure[data-drawn]"),
    "failed": ("#/run/failed", "figure[data-drawn]"),
    "compare": ("#/compare/one/other", "figure[data-drawn]"),
    "search": ("#/search/net-search", "figure[data-drawn]"),
    "pool": ("#/pool", "h1:text-is('Pool')"),
}
HIDE_PATHS_AND_TIMES = """() => {
  for (const each of document.querySelectorAll(".command code")) each.textContent = "instep ...";
  for (const each of document.querySelectorAll("td div"))
    if (!each.children.length)
      each.textContent = each.textContent.replace(/\\d\\d:\\d\\d/, "12:00");
}"""
FRAMES = """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"""
PARTS = """() => [...document.querySelectorAll(
  "h1, h2, .verdict, .tiles, .toolbar, section, figure, canvas, table, th, .workers > div, .legend"
)].map((part) => {
  const { x, y, width, height } = part.getBoundingClientRect();
  const name = part.tagName.toLowerCase() + [...part.classList].map((each) => "." + each).join("");
  return [name, ...[x + scrollX, y + scrollY, width, height].map(Math.round)];
})"""


@pytest.fixture(scope="module")
def still(launch, tmp_path_factory):
    """Chromium that draws the same on each machine."""
    folder = tmp_path_factory.mktemp("fonts")
    for font in FONTS if shutil.which("fc-list") else pytest.skip("needs fontconfig"):
        words = ["fc-list", font.replace(":", ":style="), "--format", "%{file}\\n"]
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")
        if not found[0]:
            pytest.skip(f"needs the font {font}")
        shutil.copy(found[0], folder)
    only = folder / "fonts.conf"
    only.write_text(ONLY_THESE.format(folder, folder))
    return launch(*SAME_EVERYWHERE, env={**os.environ, "FONTCONFIG_FILE": str(only)})


@pytest.fixture(scope="module")
def opened(tmp_path_factory, still):
    """A page with a session."""
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
        context = still.new_context(timezone_id="UTC", locale="en-US", reduced_motion="reduce")
        page = context.new_page()
        page.goto(links[0])
        page.wait_for_selector("td.name a")
        yield page
        context.close()


def show(page, name, width, scheme):
    where, wait_for = PAGES[name]
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("location.hash = '#/run/none'")
    page.wait_for_selector("h1:text-is('This run is not here')")
    page.evaluate(f"location.hash = {json.dumps(where)}")
    page.wait_for_selector(wait_for)


def at_rest(page):
    """A picture of the whole page, smaller, and where its parts are, once nothing moves."""
    before = None
    for _ in range(50):
        page.evaluate(HIDE_PATHS_AND_TIMES)
        taken = page.screenshot(full_page=True), page.evaluate(PARTS)
        if taken == before:
            image = images.open(io.BytesIO(taken[0])).convert("RGB")
            size = image.width // SMALLER, image.height // SMALLER
            return image.resize(size, images.Resampling.BOX), taken[1]
        before = taken
    pytest.fail("the page does not come to rest")


def looks_alike(seen, known):
    if seen.size != known.size:
        return False
    far = np.abs(np.asarray(seen, int) - np.asarray(known, int)).max(axis=2) > MOST_DIFFERENT
    down, right = (size // BLOCK for size in far.shape)
    blocks = far[: down * BLOCK, : right * BLOCK].reshape(down, BLOCK, right, BLOCK)
    return (blocks.mean(axis=(1, 3)) > MOST_OF_A_BLOCK).mean() <= MOST_BLOCKS


def moved(seen, known):
    """The first part that is not where it was."""
    if [each[0] for each in seen] != [each[0] for each in known]:
        return "there are other parts"
    for now, before in zip(seen, known, strict=True):
        if max(abs(a - b) for a, b in zip(now[1:], before[1:], strict=True)) > MOST_MOVED:
            return now, before
    return None


def known_boxes():
    return json.loads(BOXES.read_text()) if BOXES.exists() else {}


def keep_boxes(key, parts):
    lines = [f'"{k}": {json.dumps(v)}' for k, v in sorted({**known_boxes(), key: parts}.items())]
    BOXES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_looks_as_its_picture(opened, name, width, scheme):
    show(opened, name, width, scheme)
    seen, parts = at_rest(opened)
    file, key = PICTURES / f"{name}-{width}-{scheme}.webp", f"{name}-{width}"
    PICTURES.mkdir(exist_ok=True)
    if key not in known_boxes():
        keep_boxes(key, parts)
    if not file.exists():
        seen.save(file, lossless=True, quality=100, method=6)
        pytest.fail(f"{file.name} was not there, and is written: look at it")
    assert moved(parts, known_boxes()[key]) is None
    assert looks_alike(seen, images.open(file).convert("RGB"))


BROKEN = {
    "sections lie beside each other": ("run", 1600, ".grid { columns: 1 !important; }"),
    "rows of workers": ("run", 400, ".workers > div { grid-template-columns: 1fr !important; }"),
    "a table that is wider than its page": ("runs", 400, "td { padding-right: 60px !important; }"),
}
REPAINTED = {
    "a colour of a curve": ("compare", 1600, ":root { --run1: #2f6db5 !important; }"),
    "what is bad": ("failed", 400, ".events .bad span { color: inherit !important; }"),
    "parts of a step": ("run", 400, ".bar i { background: none !important; }"),
}


@pytest.mark.parametrize("what", [*BROKEN, *REPAINTED])
def test_a_page_that_is_broken_does_not_look_as_its_picture(opened, what):
    name, width, rule = {**BROKEN, **REPAINTED}[what]
    show(opened, name, width, "light")
    place = opened.evaluate("rule => document.styleSheets[2].insertRule(rule)", rule)
    try:
        for scheme in ("dark", "light"):  # curves are drawn again in other colours
            opened.emulate_media(color_scheme=scheme)
            opened.evaluate(FRAMES)  # what changes and changes back within one is never heard of
        if what in BROKEN:
            assert moved(at_rest(opened)[1], known_boxes()[f"{name}-{width}"])
        else:
            known = images.open(PICTURES / f"{name}-{width}-light.webp").convert("RGB")
            late = range(50)  # curves are drawn after the media have changed
            assert any(not looks_alike(at_rest(opened)[0], known) for _ in late)
    finally:
        opened.evaluate("place => document.styleSheets[2].deleteRule(place)", place)
