"""The report of a run, or of two compared: one HTML file, no network.

`page.html` is the frame, `page.css` the look; the curves are drawn by `charts/`, which the
dashboard has too; `sections.py`, `bars.py` and `comparison.py` write the rest. The file carries a
content security policy that forbids it to load anything, so it is the same page offline and in an
e-mail.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from instep.plain_file import replace_plain
from instep.report.figures.curves import charts
from instep.report.figures.dataset import DataFigures
from instep.report.figures.summary import summarise
from instep.report.page import bars, sections
from instep.report.page.comparison import comparison, run_names
from instep.report.page.dataset import as_sections, data_of, tiles_of
from instep.report.page.markup import Html, embedded_json, join, section, tag
from instep.report.page.participants import participants
from instep.report.page.privacy import privacy
from instep.store.run_folder import RunFolder
from instep.words import of_what


def write_report(folder: RunFolder, path: Path, other: RunFolder | None = None) -> None:
    """Write the page to `path`, under 2 MB for any length of run.

    Args:
        folder: the run that the page is about.
        path: the file to write; replaced if it exists, whole or not at all.
        other: a second run to compare with; its curves share the charts.
    """
    replace_plain(path, render(folder, other))


def render(folder: RunFolder, other: RunFolder | None = None) -> str:
    """The page as text; see `write_report`."""
    runs = [folder] if other is None else [folder, other]
    names, drawn = run_names(runs), charts(runs)
    return _page(names, drawn, _body(runs, names, drawn))


def write_comparison(
    path: Path, title: str, runs: list[RunFolder], names: list[str], first: Sequence[Html]
) -> None:
    """Write a page about several runs, none of which is more than the others.

    Args:
        path: the file to write; replaced if it exists, whole or not at all.
        title: the heading.
        runs: whose curves, figures and settings are shown.
        names: what to call each.
        first: what stands under the heading.
    """
    drawn, summaries = charts(runs), [summarise(each) for each in runs]
    head = tag("header", tag("p", "instep", class_="mark"), tag("h1", title))
    beside = comparison(runs, summaries, names)
    body = [head, *first, _curves(drawn), beside, bars.time_spent(runs, names)]
    replace_plain(path, _page(names, drawn, join(body), title=title))


def write_data(path: Path, title: str, data: DataFigures) -> None:
    """Write a page about some data.

    Args:
        path: the file to write; replaced if it exists, whole or not at all.
        title: the heading.
        data: what is drawn.
    """
    head = [tag("p", "instep data", class_="mark"), tag("h1", title)]
    body = [tag("header", *head), tiles_of(data), *as_sections(data)]
    replace_plain(path, _page([title], [], join(body), title=title))


def _page(names: list[str], drawn: list[dict[str, Any]], body: Html, *, title: str = "") -> str:
    style, script = _file("page.css"), _file("page.js")
    if drawn:
        style, script = join_charts(style, script)
    return Template(_file("page.html")).substitute(
        title=join([title or " and ".join(names)]),
        style=style,
        body=body,
        data=embedded_json({"runs": names, "charts": drawn}),
        script=script,
    )


def join_charts(style: str, script: str) -> tuple[str, str]:
    """The look and the script of a page with what draws charts before it, and its licence."""
    uplot = chart_file("uplot.js").partition("\n")[2]  # the first line has an address in it
    licence = f"/* uPlot\n{chart_file('uplot.LICENSE')}\n*/"
    looks = [chart_file("uplot.css"), chart_file("charts.css"), style]
    return "\n".join(looks), "\n".join([licence, uplot, chart_file("charts.js"), script])


def _body(runs: list[RunFolder], names: list[str], drawn: list[dict[str, Any]]) -> Html:
    summaries = [summarise(each) for each in runs]
    head = [tag("p", "instep", class_="mark"), tag("h1", " and ".join(names))]
    if len(runs) == 1:
        ends = [sections.verdict_line(summaries[0], runs[0])]
        top = sections.tiles(summaries[0], of_what(runs[0].spec.train.steps))
    else:
        ends = list(map(sections.verdict_line, summaries, runs, names))
        top = comparison(runs, summaries, names)
    shared = [tag("header", *head, *ends), top, _curves(drawn)]
    spent = bars.time_spent(runs, names)
    strips = bars.throughput_strips(runs[0])
    if len(runs) == 1:
        return join([*shared, strips, spent, *_details(runs[0], summaries[0])])
    alone = tag("p", f"The rest is about {names[0]} alone.", class_="alone")
    return join([*shared, spent, alone, strips, *_details(runs[0], summaries[0])])


def _details(folder: RunFolder, summary: dict[str, Any]) -> list[Html]:
    return [
        bars.start_up(folder),
        sections.who_did_what(folder),
        participants(folder),
        data_of(folder),
        privacy(summary),
        sections.audit_of_samples(folder),
        sections.skipped_samples(folder),
        sections.changes_and_failures(folder),
        sections.checkpoints(folder),
        sections.profiles(folder),
        sections.configuration(folder),
        sections.reproduce(folder),
    ]


def _curves(drawn: list[dict[str, Any]]) -> Html:
    if not drawn:
        return section("Curves", tag("p", "No curves: no step was committed.", class_="note"))
    without = tag(
        "noscript", tag("p", "The curves need JavaScript: a script in this page draws them.")
    )
    return section("Curves", without, id_="curves")


def chart_file(name: str) -> str:
    """A file of what draws charts, as text."""
    return files("instep.report.charts").joinpath(name).read_text(encoding="utf-8")


def _file(name: str) -> str:
    return files("instep.report.page").joinpath(name).read_text(encoding="utf-8")
