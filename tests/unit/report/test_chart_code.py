"""What draws charts, in the report and in the dashboard, without a browser."""

import json
import shutil
import subprocess

import pytest

from instep.report.page.page import chart_file, write_report
from instep.store.run_folder import RunFolder
from made_up_runs import make_run

NODE = shutil.which("node")


def evaluated(words):
    """The value of an expression of JavaScript, with the chart code before it."""
    script = f"{chart_file('charts.js')}\nconsole.log(JSON.stringify({words}))"
    done = subprocess.run([NODE, "-"], input=script, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_a_smoothed_line_is_a_moving_average_and_keeps_gaps():
    noisy = [1.0 + (-1) ** at for at in range(400)]
    gap = [*noisy[:100], None, *noisy[101:]]
    calm, found, broken = evaluated(
        f"[{[2.0] * 80}, {noisy}, {json.dumps(gap)}].map(Charts.smoothed)"
    )
    assert calm == pytest.approx([2.0] * 80)
    assert all(abs(value - 1.0) < 0.12 for value in found[40:])
    assert [at for at, value in enumerate(broken) if value is None] == [100]


def test_a_report_has_the_chart_code_and_its_licence_and_a_page_without_curves_has_neither(
    tmp_path,
):
    texts = []
    for name, steps in (("whole", 48), ("none", 0)):
        path = make_run(tmp_path / name, steps=steps, metrics=steps > 0)
        write_report(RunFolder(path), path / "report.html")
        texts.append((path / "report.html").read_text())
    parts = [chart_file(name) for name in ("charts.js", "charts.css", "uplot.LICENSE")]
    assert all(part in texts[0] for part in parts)
    assert not any(part in texts[1] for part in parts)
