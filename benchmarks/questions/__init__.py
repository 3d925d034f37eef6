"""The questions of `benchmarks/README.md`: what each asks, and where its figure is in a result.

A file for each part of the page. To add a question, measure it with a script that writes
`results/DATE-NAME.json`, and add a `Question` to `QUESTIONS` of a part; then write the page anew:

    python docs/make_benchmarks.py
"""

from questions import data, failures, networks, plans, pool, private, replicas, speed, watching
from questions.base import Question

PARTS: dict[str, tuple[Question, ...]] = {
    "Speed": speed.QUESTIONS,
    "Failures": failures.QUESTIONS,
    "Slow networks": networks.QUESTIONS,
    "Large models and many workers": replicas.QUESTIONS,
    "Data": data.QUESTIONS,
    "Watching": watching.QUESTIONS,
    "Planning": plans.QUESTIONS,
    "A pool of machines": pool.QUESTIONS,
    "Privacy": private.QUESTIONS,
}
