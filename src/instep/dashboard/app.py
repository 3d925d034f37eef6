"""The routes of the server: the page and its files, a session, data.

    GET  /                  the page, which has no data in it
    GET  /static/NAME       what it is made of
    POST /session           buys a cookie with the token
    GET  /api/stream        all runs, as server-sent events; with ?run=NAME one of them, with
                            ?search=NAME a search, with ?pool the pool
    GET  /api/alive         whether the session is known, and with one of these, that it is there
    GET  /api/compare       curves and settings of runs: ?run=A&run=B

All answers have the headers of `access.py`, which sees each request first. Way in: `make_app`.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from instep.dashboard.access import HEADERS, KNOWN, Access, Scope
from instep.dashboard.compared import MOST_RUNS, compare
from instep.dashboard.listing import RunList
from instep.dashboard.sections import encoded_json
from instep.dashboard.watch import Feed, Feeds
from instep.errors import InstepError

Send = Callable[[Any], Awaitable[None]]

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
OWN_FILES = ("page.css", "view.js", "stream.js", "page.js", "icon.svg", "index.html")
CHART_FILES = ("uplot.css", "charts.css", "uplot.js", "charts.js")
"""Those that the report has too."""

JSON = "application/json"
_MOST_BODY, _BODY_S = 4096, 10.0
"""Bytes of a token's message, and the seconds in which it has to come."""


class Guarded:
    """An application behind `Access`: refuses what is not allowed, and adds the headers."""

    def __init__(self, app: Any, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        if status := self._access.refusal(scope):
            await _refusal(status)(scope, receive, partial(_with_headers, send))
            return
        scope[KNOWN] = scope["path"].startswith("/api/")
        await self._app(scope, receive, partial(_with_headers, send))


async def _with_headers(send: Send, message: Any) -> None:
    if message["type"] == "http.response.start":
        own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        message["headers"] = [*message.get("headers", ()), *own]
    await send(message)


def _refusal(status: int) -> Response:
    return Response("refused\n", status, media_type="text/plain")


class RouteAnswers:
    """Answers of each route.

    Args:
        runs: which may be shown.
        access: where tokens are exchanged.
        executor: reads files.
    """

    def __init__(self, runs: RunList, access: Access, executor: Executor) -> None:
        self._runs, self._access, self._executor = runs, access, executor
        self._feeds = Feeds(runs, executor)
        self._files = page_files()

    async def index(self, request: Request) -> Response:
        """The page."""
        return self._answer("index.html", request)

    async def static(self, request: Request) -> Response:
        """A file that it is made of."""
        name = request.path_params["name"]
        return self._answer(name, request) if name in self._files else _refusal(404)

    def _answer(self, name: str, request: Request) -> Response:
        plain, packed = self._files[name]
        kind = TYPES[name.rpartition(".")[2]]
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type=kind, headers={"content-encoding": "gzip"})
        return Response(plain, media_type=kind)

    async def session(self, request: Request) -> Response:
        """Exchange a token."""
        body = b""
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > _MOST_BODY:
                        return _refusal(413)
        except TimeoutError:
            return _refusal(408)
        cookie = self._access.exchange(body)
        if not cookie:
            return _refusal(403)
        return Response(b"{}", media_type=JSON, headers={"set-cookie": cookie})

    async def stream(self, request: Request) -> Response:
        """Push what changes to a page."""
        try:
            feed = self._feed_of(request)
        except InstepError:
            return _refusal(404)
        return StreamingResponse(feed.messages(), media_type="text/event-stream")

    def _feed_of(self, request: Request) -> Feed:
        asked = request.query_params
        if "run" in asked:
            return self._feeds.of_run(asked["run"])
        if "search" in asked:
            return self._feeds.of_search(asked["search"])
        return self._feeds.of_pool() if "pool" in asked else self._feeds.listing

    async def alive(self, request: Request) -> Response:
        """Say what is not there, as a page that gets no stream cannot; who has no session does not
        come here."""
        try:
            self._feed_of(request)
        except InstepError as error:
            return Response(msgspec.json.encode({"error": str(error)}), 404, media_type=JSON)
        return Response(b"{}", media_type=JSON)

    async def compare(self, request: Request) -> Response:
        """Several runs beside each other."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 0 < len(names) <= MOST_RUNS:
            return _refusal(400)
        paths, missing = list[Path](), list[dict[str, str]]()
        for name in names:
            try:
                paths.append(self._runs.path_of(name))
            except InstepError as error:
                missing.append({"name": name, "error": str(error)})
        if not paths:
            return _refusal(404)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._executor, compare, paths)
        return _packed_json({**found, "unread": [*missing, *found["unread"]]}, request)


def _packed_json(value: Any, request: Request) -> Response:
    data, headers = encoded_json(value), {}
    if "gzip" in request.headers.get("accept-encoding", ""):
        data, headers = gzip.compress(data, 3), {"content-encoding": "gzip"}
    return Response(data, media_type=JSON, headers=headers)


@cache
def page_files() -> dict[str, tuple[bytes, bytes]]:
    """The files of the page by name, each plain and compressed."""
    found = {}
    for package, names in (("dashboard.static", OWN_FILES), ("report.charts", CHART_FILES)):
        for name in names:
            plain = files(f"instep.{package}").joinpath(name).read_bytes()
            found[name] = plain, gzip.compress(plain, 9, mtime=0)
    return found


def make_app(runs: RunList, access: Access, executor: Executor) -> Guarded:
    """The application, for an ASGI server."""
    pages = RouteAnswers(runs, access, executor)
    routes = [
        Route("/", pages.index, methods=["GET"]),
        Route("/static/{name}", pages.static, methods=["GET"]),
        Route("/session", pages.session, methods=["POST"]),
        Route("/api/stream", pages.stream, methods=["GET"]),
        Route("/api/alive", pages.alive, methods=["GET"]),
        Route("/api/compare", pages.compare, methods=["GET"]),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # an address that is nearly one of ours is none
    return Guarded(app, access)
