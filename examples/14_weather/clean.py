"""From a row of the file to a sample."""

import datetime

import numpy as np

CLASSES = ("sun", "rain", "fog", "drizzle", "snow")


def day(row):
    """The measurements of one day, its class, and when it was, in seconds since 1970."""
    date = row["date"]
    if isinstance(date, str):
        date = datetime.date.fromisoformat(date.replace("/", "-"))
    at = datetime.datetime(date.year, date.month, date.day, tzinfo=datetime.UTC)
    measured = [row[name] for name in ("precipitation", "temp_max", "temp_min", "wind")]
    return {
        "x": np.asarray(measured, np.float32),
        "y": CLASSES.index(row["weather"]),
        "when": int(at.timestamp()),
    }
