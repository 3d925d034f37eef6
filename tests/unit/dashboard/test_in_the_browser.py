"""The page in Chromium: what it shows, to whom, and that nothing leaves the machine."""

import json
import os
import re
from urllib.parse import quote

import pytest

from instep.cli import main
from instep.dashboard.serve import beside
from instep.events import read_events
from instep.report.figures.summary import summarise
from instep.report.page.page import write_report
from instep.store.run_folder import RunFolder
from lazily import needs
from made_up_runs import BEGIN_S, make_run, write_events
from made_up_searches import make_pool, make_search

pytestmark = [
    needs("playwright"),
    needs("starlette"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
ATTACK = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched") / "runs"
    for name, more in (("one", {}), ("other", {"workers": 3}), ("failed", {"outcome": "failed"})):
        (make_run(folder / name, **more) / "run.id").write_text(name)
    path = make_run(folder / ATTACK.replace("/", "-")[:80], name="attack")
    (path / "run.id").write_text("attack")
    (path / "logs" / "worker-0.log").write_text(f"\x1b[31m{ATTACK}\x1b[0m\n")
    events = list(read_events(path / "events.jsonl"))
    told = {"time": BEGIN_S + 4, "event": "validated", "step": 9, "metrics": {ATTACK: 1.0}}
    told |= {"seconds": 0.1, "epoch": 0, "samples": 9}
    warned = {"time": BEGIN_S + 4, "event": "warning", "text": ATTACK}
    for event in events:
        event.update({"parameters_sha256": "5" * 64} if event["event"] == "model_saved" else {})
    write_events(path, [*events[:-1], told, warned, events[-1]])
    make_search(folder / "net-search")
    make_pool(folder.parent / "pool")
    return folder


@pytest.fixture(scope="module")
def opened(runs, browser):
    """A page with a session, what it asked for, and what it complained of."""
    links = []
    with beside(runs, links.append):
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.asked, page.said = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.goto(links[0])
        page.wait_for_selector("td.name a")
        yield page
        page.close()


def go(page, where, wait_for):
    page.evaluate(f"location.hash = {json.dumps(where)}")
    page.wait_for_selector(wait_for)


def test_runs_are_listed_filtered_opened_and_compared(opened, runs):
    go(opened, "#/", "td.name a")
    assert opened.locator("table.runs tbody tr").count() == 4
    opened.fill("input[type=search]", "accuracy>0.8")
    assert opened.locator("table.runs tbody tr").count() == 3
    opened.fill("input[type=search]", "failed")
    assert opened.locator("table.runs tbody tr").count() == 1
    for condition, wanted in (("state=failed", 1), ("workers!=2", 1), ("state!=failed", 3)):
        opened.fill("input[type=search]", condition)
        assert opened.locator("table.runs tbody tr").count() == wanted
    opened.fill("input[type=search]", "train.epochs=3")
    assert 'instep list --where "train.epochs=3"' in opened.locator("main").inner_text()
    opened.fill("input[type=search]", "")
    shown = {}
    for metric in ("accuracy", "accuracy:min"):  # as `instep list --best` says it
        opened.select_option("select", metric)
        shown[metric] = opened.locator("tr", has_text="other").locator("td").nth(4).inner_text()
    assert shown == {"accuracy": "0.8667 at 48", "accuracy:min": "0.6 at 16"}
    opened.select_option("select", "accuracy")
    opened.fill("input[type=search]", "o")
    opened.get_by_role("link", name="one", exact=True).click()
    opened.wait_for_selector("figure[data-drawn]")
    assert opened.locator("h1").inner_text() == "one"
    assert "#/run/one" in opened.url
    go(opened, "#/compare/one/other", "figure[data-drawn]")
    settings, hashes = opened.locator("table").all_inner_texts()
    assert "workers" in settings
    for name in ("one", "other"):
        digest = RunFolder(runs / name).last("model_saved")["parameters_sha256"]
        assert re.search(rf"{name}\s.*{digest[:16]}", hashes)
    assert opened.get_by_text("parameters: all the same").count() == 1
    attack = next(each.name for each in runs.iterdir() if "img" in each.name)
    names = "/".join(quote(name, safe="") for name in ("one", "other", attack))
    go(opened, f"#/compare/{names}", "text=parameters: 2 different")
    assert opened.said == []


def test_each_figure_of_a_run_is_the_one_that_status_and_summary_have(opened, runs, capsys):
    assert main(["status", str(runs / "failed"), "--json"]) == 0
    told, summary = json.loads(capsys.readouterr().out), summarise(RunFolder(runs / "failed"))
    go(opened, "#/run/failed", "figure[data-drawn]")
    names, values = (opened.locator(f"dl.tiles {each}").all_inner_texts() for each in ("dt", "dd"))
    shown = {
        name: float(value.replace(",", "").split(" ")[0])
        for name, value in zip(names, values, strict=True)
    }
    wanted = {
        "step": told["step"],
        "training loss": summary["loss"],
        **{f"validation {name}": value for name, value in told["validation"].items()},
        "samples per second": summary["samples_per_second"],
        "took": summary["seconds"],
        "workers": summary["workers"],
    }
    assert shown == pytest.approx(wanted, rel=1e-2)
    assert (told["step"], told["validation"]) == (summary["steps"], summary["metrics"])
    go(opened, "#/", "td.name a")
    row = opened.locator("tr", has=opened.get_by_role("link", name="failed", exact=True))
    assert row.locator(".steps").inner_text().startswith(str(told["step"]))
    assert row.locator(".state").inner_text().endswith(told["state"])


def test_a_search_and_the_pool_have_pages_that_lead_to_their_runs(opened):
    go(opened, "#/", "td.name a")
    opened.get_by_role("link", name="net-search").click()
    opened.wait_for_selector("figure[data-drawn]")
    assert [each.split("\n")[0] for each in opened.locator("figcaption b").all_inner_texts()] == [
        "accuracy",
        "arguments.lr",
        "train.global_batch",
    ]
    table = opened.locator("section:has(h2:text-is('Trials')) table")
    assert table.locator("tbody tr").count() == 6
    text = table.inner_text()
    assert "the bound was 0.3500" in text
    assert "the loss is nan" in text
    assert opened.locator("figure.chart").nth(1).get_attribute("data-drawn")
    opened.get_by_role("link", name="trial-002").click()
    opened.wait_for_selector("h1:text-is('trial-002')")
    go(opened, "#/search/net-search", "figure[data-drawn]")
    opened.get_by_role("link", name="Compare the best 3").click()
    opened.wait_for_selector("h1:text-is('Compare')")
    opened.wait_for_selector("figure[data-drawn]")
    go(opened, "#/", "td.name a")
    opened.get_by_role("link", name="Pool", exact=True).click()
    opened.wait_for_selector("h1:text-is('Pool')")
    text = opened.locator("main").inner_text()
    assert "4 of 4 cores are busy" in text
    assert "others come first" in text
    assert opened.said == []


def test_the_hosts_of_a_pool_have_a_table_with_their_state_and_jobs(opened):
    host = {"host": ATTACK, "cores": 4, "busy": 3, "memory": 8_000_000_000, "workers": {"net": 3}}
    host |= {"memory_used": 6_000_000_000, "state": "drained", "out_of_reach_since": 1.7e9}
    opened.evaluate("host => document.body.append(View.hosts([host]))", host)
    table = opened.locator("table").last
    assert table.locator("th").all_inner_texts()[:3] == ["host", "state", "busy"]
    cells = table.locator("tbody td").all_inner_texts()
    assert (cells[0], cells[2], cells[4:]) == (ATTACK, "3 of 4", ["6 GB of 8 GB", "net 3"])
    assert re.fullmatch(r"drained since 2023-11-1\d \d\d:\d\d:\d\d", cells[1])
    opened.evaluate("document.body.lastChild.remove()")


def test_a_run_that_is_not_there_is_said_and_shown_as_soon_as_it_is(opened, runs):
    go(opened, "#/run/late", "h1:text-is('This run is not here')")
    assert "There is no such run." in opened.locator("main").inner_text()
    (make_run(runs / "late") / "run.id").write_text("late")
    opened.wait_for_selector("h1:text-is('late')")
    opened.wait_for_selector("figure[data-drawn]")
    os.rename(runs / "late", runs.parent / "away")
    opened.wait_for_selector("h1:text-is('This run cannot be read')")
    os.rename(runs.parent / "away", runs / "late")
    opened.wait_for_selector("figure[data-drawn]")
    os.rename(runs / "late", runs.parent / "away")
    go(opened, "#/compare/one/late", "figure[data-drawn]")
    assert "late: there is no such run." in opened.locator("main").inner_text()
    go(opened, "#/compare/late/later", ".cause")
    assert "None of these runs is here." in opened.locator(".cause").inner_text()
    for what in ("search/none", "run/none", "run/%"):  # the last one is cut within a character
        kind = what.partition("/")[0]
        go(opened, f"#/{what}", f"h1:text-is('This {kind} is not here')")
    opened.get_by_role("link", name="All runs").click()
    opened.wait_for_selector("td.name a")
    opened.said[:] = [text for text in opened.said if "404" not in text]


NAME_OF_THE_FOCUSED = """() => {
  const focused = document.activeElement;
  return focused.getAttribute("aria-label") || focused.innerText;
}"""


def test_all_can_be_done_with_the_keyboard(opened):
    go(opened, "#/", "td.name a")
    keys = opened.keyboard
    opened.locator("a.mark").focus()
    passed = []
    for _ in range(40):
        keys.press("Tab")
        passed.append(opened.evaluate(NAME_OF_THE_FOCUSED))
        outline = opened.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", passed[-1]
        if passed[-1] == "select other":
            break
        if passed[-1] == "Filter runs":
            keys.type("o")
        if passed[-1] == "select one":
            keys.press("Space")
        if passed[-1] == "run":
            keys.press("Enter")
    assert passed[-1] == "select other"
    assert opened.locator("th[aria-sort] button").inner_text() == "run"
    keys.press("Space")
    opened.locator("button", has_text="Compare 2").focus()
    keys.press("Enter")
    opened.wait_for_selector("figure[data-drawn]")
    assert opened.url.endswith("#/compare/one/other")
    opened.locator("input[name=x]").first.focus()
    before = opened.locator("figure.chart").first.get_attribute("data-drawn")
    keys.press("ArrowRight")
    assert opened.locator("input[name=x]:checked").get_attribute("value") == "samples"
    assert opened.locator("figure.chart").first.get_attribute("data-drawn") != before


def test_no_request_leaves_the_machine_and_the_token_is_in_no_address(opened):
    own = opened.url.partition("#")[0]
    assert all(url.startswith(own) for url in opened.asked)
    assert not any("token" in url for url in opened.asked)
    assert opened.url.partition("#")[2].startswith("/")


def test_markup_in_names_metrics_logs_and_warnings_is_text(opened):
    go(opened, "#/", "td.name a")
    opened.locator("td.name a", has_text="<img").click()
    opened.wait_for_selector("figure[data-drawn]")
    opened.wait_for_selector("summary:has-text('worker-0')")
    text = opened.locator("main").inner_text()
    assert text.count("onerror") >= 4
    assert opened.title() != "hacked"
    assert opened.locator("img, main script").count() == 0
    assert "\x1b" not in text
    assert opened.said == []


def test_curves_are_read_with_the_keyboard(opened):
    go(opened, "#/run/one", "figure[data-drawn]")
    opened.locator("figure.chart").first.focus()
    for _ in range(3):
        opened.keyboard.press("ArrowRight")
    assert "step 3" in opened.locator("figure.chart figcaption .at").first.inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_axe_finds_nothing_serious_and_nothing_is_wider_than_the_page(opened, axe, scheme, width):
    opened.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    opened.set_viewport_size({"width": width, "height": 900})
    for where, wait_for in (
        ("#/", "td.name a"),
        ("#/run/failed", "figure[data-drawn]"),
        ("#/compare/one/other", "figure[data-drawn]"),
        ("#/search/net-search", "figure[data-drawn]"),
        ("#/pool", "h1:text-is('Pool')"),
        ("#/run/none", "h1:text-is('This run is not here')"),
    ):
        go(opened, where, wait_for)
        opened.context.new_cdp_session(opened).send("Page.setBypassCSP", {"enabled": True})
        opened.evaluate(axe)
        found = opened.evaluate("axe.run().then(found => found.violations)")
        bad = [each for each in found if each["impact"] in ("serious", "critical")]
        assert not bad, [(each["id"], each["nodes"][0]["html"][:200]) for each in bad]
        assert opened.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_draws_its_curves_without_a_server_on_a_phone_and_on_paper(
    tmp_path, browser, axe, scheme
):
    path = make_run(tmp_path / "one", epochs=8)
    write_report(RunFolder(path), tmp_path / "report.html", RunFolder(make_run(tmp_path / "two")))
    said, asked = [], []
    page = browser.new_page(viewport={"width": 420, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector("figure[data-drawn]")
    assert page.locator("figure.chart").first.get_attribute("data-drawn").split() == [
        *("128", "128", "48", "48")
    ]
    caption = page.locator("figure.chart figcaption").first.inner_text()
    assert "one training" in caption
    assert "smoothed" in caption
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    page.locator("figure.chart").first.focus()
    page.keyboard.press("ArrowRight")
    assert "step" in page.locator("figure.chart figcaption .at").first.inner_text()
    page.locator("#curves input[value=seconds]").check()
    assert page.locator("figure.chart").first.get_attribute("data-drawn") != "128 128 48 48"
    page.evaluate(axe)
    found = page.evaluate("axe.run('#curves').then(found => found.violations)")
    bad = [each for each in found if each["impact"] in ("serious", "critical")]
    assert not bad, [(each["id"], each["nodes"][0]["html"][:200]) for each in bad]
    page.emulate_media(media="print", color_scheme=scheme)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    ink = "getComputedStyle(document.documentElement).getPropertyValue('--run0').trim()"
    assert page.evaluate(ink) == "#2f6db5"
    wide = "Math.max(...[...document.querySelectorAll('canvas')].map(c => c.clientWidth)) "
    assert page.evaluate(wide + "<= document.querySelector('figure').clientWidth")
    assert (said, len(asked)) == ([], 1)
    page.close()


def test_a_new_link_may_be_opened_in_the_page_that_asks_for_it(runs, browser):
    links = []
    with beside(runs, links.append):
        context = browser.new_context()
        page = context.new_page()
        page.goto(links[0].partition("#")[0])
        page.wait_for_selector("text=session")
        page.goto(links[0])  # only what is behind # differs, so that nothing is loaded
        page.wait_for_selector("td.name a")
        assert links[0].partition("#")[2] not in page.url
        context.close()
