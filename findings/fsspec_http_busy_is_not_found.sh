#!/usr/bin/env bash
# fsspec 2026.9.0 with aiohttp 3.14.5: a web server that is busy is reported as a file that does not exist.
#
# Guessed: HTTPFileSystem.info raises FileNotFoundError for 404 and 410, and another OSError where the
# server answers 503 or refuses the connection, so a reader can tell "not there" from "try again".
# Seen: FileNotFoundError in all of these cases; only its __cause__ (aiohttp's ClientResponseError with a
# status, ClientConnectorError) tells them apart. A loader that does not look at the cause skips a shard
# for good because a server was busy once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "fsspec==2026.9.0" "aiohttp==3.14.5"
"$folder/venv/bin/python" - <<'PY'
import http.server
import threading

import aiohttp
import fsspec


class Busy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404 if self.path == "/none" else 503)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy)
threading.Thread(target=server.serve_forever, daemon=True).start()
at = f"http://127.0.0.1:{server.server_port}"
files = fsspec.filesystem("http", skip_instance_cache=True)
for url, wanted in ((f"{at}/none", 404), (f"{at}/busy", 503), ("http://127.0.0.1:9/a", None)):
    try:
        files.info(url)
    except FileNotFoundError as error:
        cause = error.__cause__
        status = getattr(cause, "status", None)
        print(f"fsspec {fsspec.__version__}: FileNotFoundError, cause {type(cause).__name__} {status}")
        assert status == wanted, "the behaviour has changed"
        assert isinstance(cause, aiohttp.ClientError), "the behaviour has changed"
    else:
        raise SystemExit("the behaviour has changed")
server.shutdown()
PY
