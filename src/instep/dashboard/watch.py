"""Messages to open pages: the whole once, then what has changed.

Each page has a stream. All pages that look at one thing share its reading and its messages. A page
that is slow misses messages and then gets the whole again: nothing waits in a queue for it. Nobody
looks at files while no page is open. Way in: `Feed`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from instep.dashboard.curves import Chart, changes, live_charts, plain, settled_charts
from instep.dashboard.listing import RunList, why_unread
from instep.dashboard.live import LiveRun
from instep.dashboard.pools import pool_brief, pool_key, pool_sections
from instep.dashboard.sections import encoded_json, live_sections, settled_sections
from instep.errors import RunError
from instep.store.folder import is_running
from instep.store.run_folder import RunFolder

LOOK_S, HEARTBEAT_S, REPEAT_S = 0.5, 15.0, 5.0
"""Seconds between two looks at the files, between signs of life on a stream, and after which the
time is shown anew though nothing has come."""

COSTS, MOST_LOOK_S = 70.0, 0.75
"""Looks are so many times apart what the server needed of the processor since the last one, so that
it is left to those who train, but at most so many seconds."""

SETTLED_BYTES = 1 << 24
"""Larger records of a run that has ended are folded as those of a running one."""


class Sight(NamedTuple):
    """A thing as it is now."""

    sections: dict[str, Any]
    """Plain data by name."""
    charts: list[Chart]


class Subject(Protocol):
    """A thing that a page shows."""

    def look(self) -> Sight | None:
        """See what there is; None if that is as it was.

        Raises:
            InstepError: it cannot be read; the text says why.
        """


class WatchedList:
    """The runs of a folder, and the searches and the pool that are there."""

    def __init__(self, runs: RunList) -> None:
        self._runs, self._last = runs, dict[str, Any]()
        self._beside: Any = None

    def look(self) -> Sight | None:
        """See which there are."""
        rows = self._runs.rows()
        pool = self._runs.pool
        beside = {
            "searches": self._runs.searches(),
            "pool": None if pool is None else pool_brief(pool),
        }
        same = rows.keys() == self._last.keys() and all(self._last[n] is r for n, r in rows.items())
        if same and self._beside == beside:
            return None
        self._last, self._beside = rows, beside
        about = {"folder": str(self._runs.folder), "single": self._runs.single}
        rows = {f"row {name}": row for name, row in rows.items()}
        return Sight({"about": about, **beside, **rows}, [])


class WatchedSearch:
    """One search.

    Args:
        runs: of the folder that it is in.
        name: of the search.
    """

    def __init__(self, runs: RunList, name: str) -> None:
        self._figures, self._trials = runs.search_of(name), runs.trials_of(name)
        self._prefix = f"{name}/"
        self._last: dict[str, Any] = {}

    def look(self) -> Sight | None:
        """See how it is."""
        sections = self._figures.sections(self._prefix, self._trials.row_of)
        if sections == self._last:
            return None
        self._last = sections
        return Sight(sections, [])


class WatchedPool:
    """A pool.

    Args:
        folder: of it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._last = folder, dict[str, Any]()
        self._key: Any = None
        self._at = 0.0

    def look(self) -> Sight | None:
        """See how it is; what is told of the time anew after a while."""
        key, now = pool_key(self._folder), time.monotonic()
        if key == self._key and now - self._at < REPEAT_S:
            return None
        self._key, self._at = key, now
        sections = pool_sections(self._folder)
        if sections == self._last:
            return None
        self._last = sections
        return Sight(sections, [])


class WatchedRun:
    """One run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._live: LiveRun | None = None
        self._known: Any = None
        self._at = 0.0

    def look(self) -> Sight | None:
        """See how it is. That it has ended is told before all of it is read again."""
        if not self._path.is_dir():
            raise RunError(f"{self._path} was removed or renamed.")
        running = is_running(self._path)
        if not running and self._known != "running" and self._settles():
            key = self._key()
            if key == self._known:
                return None
            self._live = None
            folder = RunFolder(self._path)
            seen = Sight(settled_sections(folder), settled_charts(folder))
            self._known = key
            return seen
        if self._live is None:
            self._live = LiveRun(self._path)
        state = "running" if running else str(self._live.ending.get("outcome") or "unfinished")
        again = running and time.monotonic() - self._at > REPEAT_S
        if not self._live.look() and not again and self._known == state:
            return None
        if not running:
            state = str(self._live.ending.get("outcome") or "unfinished")
        self._known, self._at = state, time.monotonic()
        return Sight(live_sections(self._live, state), live_charts(self._live))

    def _settles(self) -> bool:
        """Whether its records are few enough to be read at once."""
        sizes = [each[1] for each in self._key()]
        return sum(sizes) <= SETTLED_BYTES

    def _key(self) -> list[tuple[str, int, int]]:
        found = []
        for name in ("events.jsonl", "ledger.bin", "steps.bin", "summary.json", "job.toml"):
            try:
                about = (self._path / name).stat()
            except FileNotFoundError:
                continue
            found.append((name, about.st_size, about.st_mtime_ns))
        return found


class Feed:
    """Messages about one source, for all pages that show it.

    Args:
        source: read in `executor`, by one thread at a time.
    """

    def __init__(self, source: Subject, executor: Executor, look_s: float = LOOK_S) -> None:
        self._source, self._executor, self._look_s = source, executor, look_s
        self._version, self._delta = 0, b""
        self._whole: bytes | None = None
        self._sections: dict[str, Any] = {}
        self._encoded: dict[str, bytes] = {}
        self._charts: list[Chart] = []
        self._last: Sight | None = None
        self._failed = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.pages = 0
        """How many are open."""

    async def messages(self) -> AsyncIterator[bytes]:
        """Frames of a stream of server-sent events, until its page closes."""
        self.pages += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())
        sent = 0
        try:
            yield b"retry: 500\n\n"
            while True:
                changed, version = self._changed, self._version
                if version > sent:
                    data = self._delta if sent and sent == version - 1 else self._all()
                    sent = version
                    yield b"data: " + data + b"\n\n"
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), HEARTBEAT_S)
                except TimeoutError:
                    yield b": alive\n\n"
        finally:
            self.pages -= 1

    async def _follow(self) -> None:
        loop, used = asyncio.get_running_loop(), time.process_time()
        while self.pages:
            begun = loop.time()
            seen = await loop.run_in_executor(self._executor, self._look)
            if seen is not None:
                self.show(seen)
            before, used = used, time.process_time()  # what is sent after a look is in the next
            pause_s = max(self._look_s, min(COSTS * (used - before), MOST_LOOK_S))
            await asyncio.sleep(max(pause_s - (loop.time() - begun), self._look_s / 4))

    def _look(self) -> Sight | None:
        """Look at the source; after an error, what was there before is new too."""
        failed = self._failed
        try:
            seen = self._source.look()
        except Exception as error:  # a folder may hold anything, and others go on
            self._failed = True
            return Sight({"error": {"text": why_unread(error)}}, [])
        self._last, self._failed = seen or self._last, False
        return self._last if failed else seen

    def show(self, seen: Sight) -> None:
        """Tell the pages what there is now, if it differs from before."""
        known, before = self._encoded, self._sections
        encoded = {
            name: known[name] if name in known and value is before[name] else encoded_json(value)
            for name, value in seen.sections.items()
        }
        new = {n: msgspec.Raw(e) for n, e in encoded.items() if known.get(n) != e}
        gone = [name for name in known if name not in encoded]
        points = changes(self._charts, seen.charts)
        self._sections, self._encoded, self._charts = seen.sections, encoded, seen.charts
        if not (new or gone or points or points is None) and self._version:
            return
        self._version += 1
        message: dict[str, Any] = {"version": self._version, "sections": new, "gone": gone}
        if points is None:
            message["charts"] = msgspec.Raw(encoded_json(plain(seen.charts)))
        else:
            message["points"] = points
        self._delta, self._whole = msgspec.json.encode(message), None
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _all(self) -> bytes:
        if self._whole is None:
            sections = {name: msgspec.Raw(each) for name, each in self._encoded.items()}
            message = {"version": self._version, "whole": True, "sections": sections}
            charts = msgspec.Raw(encoded_json(plain(self._charts)))
            self._whole = msgspec.json.encode({**message, "charts": charts})
        return self._whole


class Feeds:
    """A feed for each thing that somebody looks at, and for a while after.

    Args:
        runs: which may be looked at.
        make: makes the source of a run by its path.
    """

    def __init__(
        self,
        runs: RunList,
        executor: Executor,
        make: Callable[[Path], Subject] = WatchedRun,
    ) -> None:
        self._runs, self._executor, self._make = runs, executor, make
        self._feeds: dict[tuple[str, str], Feed] = {}
        self.listing = Feed(WatchedList(runs), executor, 2 * LOOK_S)

    def of_run(self, name: str) -> Feed:
        """The feed of a run.

        Raises:
            InstepError: there is no such run.
        """
        path = self._runs.path_of(name)
        return self._feed("run", name, lambda: self._make(path))

    def of_search(self, name: str) -> Feed:
        """The feed of a search.

        Raises:
            InstepError: there is no such search.
        """
        self._runs.search_of(name)
        return self._feed("search", name, lambda: WatchedSearch(self._runs, name))

    def of_pool(self) -> Feed:
        """The feed of the pool.

        Raises:
            RunError: there is none.
        """
        folder = self._runs.pool
        if folder is None:
            raise RunError("there is no pool.")
        return self._feed("pool", "", lambda: WatchedPool(folder))

    def _feed(self, kind: str, name: str, make: Callable[[], Subject]) -> Feed:
        key = kind, name
        idle = [each for each, feed in self._feeds.items() if not feed.pages and each != key]
        for other in idle[:-4]:
            del self._feeds[other]
        if key not in self._feeds:
            self._feeds[key] = Feed(make(), self._executor)
        return self._feeds[key]
