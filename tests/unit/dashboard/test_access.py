"""Who is refused: other sites, other names of this machine, and whoever has no session."""

import asyncio
import gzip
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from instep.cli import main
from instep.dashboard.access import Access
from instep.errors import SpecError
from made_up_runs import make_run

pytest.importorskip("starlette")

from instep.dashboard.app import make_app, page_files
from instep.dashboard.listing import RunList
from instep.dashboard.serve import is_loopback, listen

HOST = "127.0.0.1:8600"
OURS = {"host": HOST, "origin": f"http://{HOST}", "content-type": "application/json"}


class Server:
    """The application without a network."""

    def __init__(self, folder, executor):
        self.links = []
        self.access = Access([HOST, "localhost:8600"], "http", 8600, used=self.links.append)
        self.app = make_app(RunList(folder), self.access, executor)

    def ask(self, path, method="GET", body=b"", **headers):
        """Status, headers and the first 64 kB of the answer."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        given.setdefault("host", HOST)
        raw = [(k.encode(), v.encode("latin-1")) for k, v in given.items() if v is not None]
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": raw,
            "scheme": "http",
            "server": ("127.0.0.1", 8600),
            "client": ("127.0.0.1", 9),
        }
        sent = []

        async def go():
            told, over = [{"type": "http.request", "body": body}], asyncio.Event()

            async def receive():
                if told:
                    return told.pop()
                await over.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                sent.append(message)
                if sum(len(each.get("body", b"")) for each in sent) > 40:
                    over.set()

            await asyncio.wait_for(self.app(scope, receive, send), 60)

        asyncio.run(go())
        answer = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return sent[0]["status"], answer, b"".join(each.get("body", b"") for each in sent)

    def log_in(self):
        """A cookie."""
        body = json.dumps({"token": self.access.token}).encode()
        status, headers, _ = self.ask("/session", "POST", body, **OURS)
        assert status == 200
        return headers["set-cookie"].partition(";")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("dashboard")
    runs = base / "runs"
    for name in ("whole", "<img src=x onerror=alert(1)>"):
        (make_run(runs / name, name="digits") / "run.id").write_text(name)
    (make_run(base / "secret") / "run.id").write_text("secret")
    (runs / "away").symlink_to(base / "secret")
    inner = make_run(runs / "inner")
    (inner / "run.id").write_text("inner")
    (inner / "logs" / "worker-0.log").symlink_to("/etc/passwd")
    swapped = make_run(runs / "swapped")
    (swapped / "job.toml").unlink()
    (swapped / "job.toml").symlink_to("/etc/passwd")
    return runs


@pytest.fixture
def server(folder):
    with ThreadPoolExecutor(1) as executor:
        yield Server(folder, executor)


def test_a_token_buys_a_session_once_and_then_another_link_is_told(server):
    assert server.ask("/api/alive")[0] == 401
    token = server.access.token
    cookie = server.log_in()
    assert server.ask("/api/alive", cookie=cookie)[0] == 200
    assert server.links == [server.access.token]
    assert server.access.token != token
    body = json.dumps({"token": token}).encode()
    assert server.ask("/session", "POST", body, **OURS)[0] == 403
    server.log_in()
    assert server.ask("/api/alive", cookie=cookie)[0] == 200
    for altered in (cookie[:-1] + "0", cookie[:-1] + "1", cookie.replace("=", "=a", 1)):
        assert altered == cookie or server.ask("/api/alive", cookie=altered)[0] == 401


def test_the_cookie_is_for_this_site_alone_and_no_script_reads_it(server):
    body = json.dumps({"token": server.access.token}).encode()
    _, headers, _ = server.ask("/session", "POST", body, **OURS)
    name, *flags = headers["set-cookie"].split("; ")
    assert name.startswith("instep-8600=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {*flags}


CROSS = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "empty"}
ATTACKS = {
    "without a session": ("/api/stream", {"cookie": None}, 401),
    "with a wrong session": ("/api/stream", {"cookie": "instep-8600=AAAA"}, 401),
    "with an empty session": ("/api/stream", {"cookie": "instep-8600="}, 401),
    "with a cookie of another port": ("/api/stream", {"cookie": "instep-8601={}"}, 401),
    "with a cookie that is none": ("/api/stream", {"cookie": "\x7f=;;;[={}"}, 401),
    "by another name of this machine": ("/api/stream", {"host": "evil.example:8600"}, 421),
    "by our name on another port": ("/api/stream", {"host": "127.0.0.1:80"}, 421),
    "by our name within another": ("/", {"host": "127.0.0.1:8600.evil.example"}, 421),
    "without a name": ("/", {"host": None}, 421),
    "by a script of another site": ("/api/stream", {"origin": "http://evil.example"}, 403),
    "by a page without an origin": ("/api/stream", {"origin": "null"}, 403),
    "by a picture of another site": ("/api/compare?run=whole", CROSS, 403),
    "by a script tag of another site": ("/static/page.js", CROSS, 403),
    "by a neighbour on this machine": ("/api/stream", {"sec_fetch_site": "same-site"}, 403),
    "by an address that is typed": ("/api/stream", {"sec_fetch_site": "none"}, 403),
    "in a frame": ("/", {**CROSS, "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"}, 403),
    "a path upwards": ("/static/../app.py", {}, 404),
    "a path upwards, encoded": ("/static/..%2fapp.py", {}, 404),
    "a run upwards": ("/api/stream?run=../secret", {}, 404),
    "a run by its whole path": ("/api/stream?run=/etc", {}, 404),
    "a run by a link": ("/api/stream?run=away", {}, 404),
    "a run whose file is a link": ("/api/stream?run=swapped", {}, 404),
    "a run with a zero in its name": ("/api/compare?run=whole%00", {}, 404),
    "no run": ("/api/compare", {}, 400),
    "what is not there": ("/api/delete", {}, 404),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_is_served(server, attack):
    path, headers, status = ATTACKS[attack]
    cookie = server.log_in()
    given = {"cookie": cookie, **headers}
    if given["cookie"]:
        given["cookie"] = given["cookie"].replace("{}", cookie.partition("=")[2])
    found, answer, body = server.ask(path, **given)
    assert found == status
    assert len(body) < 40
    assert "frame-ancestors 'none'" in answer["content-security-policy"]


@pytest.mark.parametrize(
    "change",
    [
        {"origin": None},
        {"origin": "http://evil.example"},
        {"origin": f"https://{HOST}"},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "none"},
    ],
)
def test_a_form_of_another_site_buys_no_session(server, change):
    body = json.dumps({"token": server.access.token}).encode()
    assert server.ask("/session", "POST", body, **{**OURS, **change})[0] == 403
    assert server.links == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"token": 3}', b"\xff", b"[" * 4000, b'{"token": ""}', b" " * 9999]
)
def test_what_is_no_token_buys_nothing(server, body):
    assert server.ask("/session", "POST", body, **OURS)[0] in (403, 413)
    assert server.links == []


def test_nothing_can_be_changed(server):
    cookie = server.log_in()
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "POST"):
        for path in ("/", "/api/stream", "/api/alive", "/static/page.js"):
            assert server.ask(path, method, **OURS, cookie=cookie)[0] in (403, 405)


def test_the_page_can_be_opened_by_a_link_and_has_no_data_in_it(server):
    opens = {"sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    for site in ("cross-site", "none", "same-origin"):
        status, headers, body = server.ask("/", sec_fetch_site=site, **opens)
        assert status == 200
        assert b"whole" not in body
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["content-security-policy"].startswith("default-src 'none'")


def test_a_session_sees_runs_but_nothing_that_a_link_leads_to(server):
    cookie = server.log_in()
    _, _, body = server.ask("/api/stream", cookie=cookie)
    assert b"row whole" in body
    assert b"secret" not in body
    assert b"root:" not in body
    assert b"a file of it is a link" in body
    _, _, body = server.ask("/api/stream?run=inner", cookie=cookie)
    assert b"root:" not in body


def test_a_page_is_told_what_is_not_there_and_runs_beside_it_are_compared(server):
    cookie = server.log_in()
    for asked in ("run=none", "search=none", "pool"):
        status, _, body = server.ask(f"/api/alive?{asked}", cookie=cookie)
        assert status == 404
        assert json.loads(body)["error"].startswith("there is no ")
    assert server.ask("/api/alive?run=whole", cookie=cookie)[0] == 200
    status, _, body = server.ask("/api/compare?run=whole&run=none&run=../secret", cookie=cookie)
    found = json.loads(body)
    assert found["runs"] == ["whole"]
    assert [each["name"] for each in found["unread"]] == ["none", "../secret"]


def test_names_are_data_and_the_scripts_never_make_markup_of_them(server):
    cookie = server.log_in()
    _, headers, body = server.ask("/api/stream", cookie=cookie)
    assert headers["content-type"].startswith("text/event-stream")
    assert b"<img src=x onerror=alert(1)>" in body
    for name, (text, _) in page_files().items():
        if not name.endswith(".js") or name == "uplot.js":
            continue
        for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
            assert word.encode() not in text


def test_random_requests_are_refused_and_do_no_harm(server):
    draw = random.Random(7)
    words = ["/", "..", "%2e", "api", "static", "session", "stream", "?run=", "\x00", "é", "{", "x"]
    cookie = server.log_in()
    for _ in range(500):
        path = "/" + "".join(draw.choices(words, k=draw.randint(0, 6)))
        method = draw.choice(["GET", "POST", "HEAD", "PUT", "TRACE", "ÿ"])
        headers = {
            draw.choice(["origin", "cookie", "sec_fetch_site", "x"]): "".join(
                chr(draw.randint(32, 255)) for _ in range(draw.randint(0, 30))
            )
        }
        status, _, body = server.ask(path, method, draw.randbytes(9), **headers)
        assert status >= 400 or (
            status == 200 and path[1:2] in ("", "?", "s") and b"row " not in body
        )
    assert server.ask("/api/alive", cookie=cookie)[0] == 200


def test_the_page_is_small_and_is_all_there(server):
    total = 0
    for name in ("", *(f"static/{file}" for file in page_files())):
        status, headers, body = server.ask(f"/{name}", accept_encoding="gzip")
        assert (status, headers["content-encoding"]) == (200, "gzip")
        total += len(body)
        assert gzip.decompress(body) == server.ask(f"/{name}")[2]
    assert total < 120_000


def test_other_machines_are_refused_without_certificates(tmp_path, capsys):
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    for address in ("0.0.0.0", "::", "node1", "10.0.0.1", ""):
        assert not is_loopback(address)
        if address:
            with pytest.raises(SpecError, match="other machines could read along"):
                listen(0, address)
    assert main(["dashboard", str(tmp_path), "--address", "0.0.0.0"]) == SpecError.exit_code
    assert "--certificates FOLDER" in capsys.readouterr().err
    assert main(["dashboard", str(tmp_path / "nowhere")]) == 6
    assert not os.path.exists(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "70000"], "--port 70000: needs a number from 1 to 65535"),
        (["--port", "-1"], "--port -1: needs"),
        (["--certificates", "keys"], "--certificates keys: there is no such folder"),
    ],
)
def test_wrong_words_are_refused_and_nothing_is_made(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["dashboard", ".", *words]) == SpecError.exit_code
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
