"""Who may read the page: checks of each request, before anything else sees it.

A page of another site may make this browser send requests here (cross-site), or give its own name
this machine's address (DNS rebinding). So the `Host` has to be one of ours, `Origin` and
`Sec-Fetch-Site` have to say that the request is from our own page, and data need a session. A
session is bought with a token that is used up; the token is in the fragment of the link, which no
browser sends. Way in: `Access`.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any

import msgspec

Scope = dict[str, Any]

KNOWN = "instep.known"
"""In the scope of a request: whether it has shown a session."""

POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), usb=()",
    "cache-control": "no-store",
}
"""Headers of every answer."""


class Access:
    """Tokens and sessions of one server.

    Args:
        hosts: names with port by which it may be called, such as `127.0.0.1:8600`.
        scheme: `http` or `https`.
        port: part of the cookie's name, as cookies do not tell ports apart.
        token: the first one; a random one if it is left out.
        used: called with the next token when one was used up.
        secret: signs sessions; with the same one, a server that takes the place of another knows
            those who were logged in there.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        scheme: str,
        port: int,
        token: str = "",
        used: Callable[[str], object] = lambda token: None,
        secret: str = "",
    ) -> None:
        self._hosts, self._scheme, self._used = frozenset(hosts), scheme, used
        self.cookie = f"instep-{port}"
        self.token = token or new_token()
        self._secret = (secret or new_token()).encode()

    def refusal(self, scope: Scope) -> int:
        """Why a request is refused, as a status code; 0 if it may go on to its route."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = _values(headers, b"host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return 421
        method, path = scope["method"], scope["path"]
        if method not in ("GET", "HEAD", "POST"):
            return 405
        origins = _values(headers, b"origin")
        ours = f"{self._scheme}://{hosts[0].lower()}"
        if any(origin.lower() != ours for origin in origins) or len(origins) > 1:
            return 403
        site = _values(headers, b"sec-fetch-site")
        if site and site != ["same-origin"] and not _opens_page(scope, site):
            return 403
        if method == "POST":
            kind = _values(headers, b"content-type")
            known = path == "/session" and kind == ["application/json"]
            return 0 if known and origins and site in ([], ["same-origin"]) else 403
        if path.startswith("/api/") and not self._is_known(headers):
            return 401
        return 0

    def _is_known(self, headers: list[tuple[bytes, bytes]]) -> bool:
        for text in _values(headers, b"cookie"):
            try:
                cookies = SimpleCookie(text)
            except CookieError:
                continue
            given = cookies[self.cookie].value if self.cookie in cookies else ""
            name, _, signature = given.partition(".")
            if hmac.compare_digest(signature.encode(), self._signature(name).encode()):
                return True
        return False

    def _signature(self, session: str) -> str:
        text = f"{self.cookie}={session}"
        return hmac.new(self._secret, text.encode(errors="replace"), "sha256").hexdigest()

    def exchange(self, body: bytes) -> str:
        """The cookie that a token buys, as the value of `Set-Cookie`; empty for a wrong one."""
        try:
            given = msgspec.json.decode(body, type=dict[str, str]).get("token", "")
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return ""
        if not hmac.compare_digest(given.encode(errors="replace"), self.token.encode()):
            return ""
        self.token = new_token()
        self._used(self.token)
        session = secrets.token_urlsafe(16)
        session = f"{session}.{self._signature(session)}"
        secure = "; Secure" if self._scheme == "https" else ""
        return f"{self.cookie}={session}; Path=/; HttpOnly; SameSite=Strict{secure}"


def new_token() -> str:
    """A token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def _opens_page(scope: Scope, site: list[str]) -> bool:
    """Whether somebody opens the page itself: by its address, or a link in another one."""
    kinds = {
        name: _values(scope["headers"], f"sec-fetch-{name}".encode()) for name in ("mode", "dest")
    }
    if site == ["none"]:  # the browser's own doing: an address that was typed, a bookmark, an icon
        return scope["method"] == "GET" and not scope["path"].startswith("/api/")
    opens = kinds["mode"] == ["navigate"] and kinds["dest"] == ["document"]
    return opens and scope["method"] == "GET" and scope["path"] == "/"


def _values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in headers if key.lower() == name]
