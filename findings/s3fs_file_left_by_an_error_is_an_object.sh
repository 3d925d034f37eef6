#!/usr/bin/env bash
# s3fs 2026.9.0 (fsspec): a file that is left by an exception becomes an object of what was written so far.
#
# Guessed: `with files.open(url, "wb")` makes the object when the block ends well, since S3 shows no object
# before an upload is complete; an exception gives the upload up.
# Seen: leaving the block closes the file, and closing completes the upload: a checkpoint that was half written
# when its process ran into an error is there, with a size and an ETag, and replaces the whole one of that
# name. Who writes has to call discard() and mark the file as closed.
set -euo pipefail
folder=$(mktemp -d)
trap '[ -z "${server:-}" ] || kill "$server"; rm -rf "$folder"' EXIT
for part in server client; do python3 -m venv "$folder/$part"; done
"$folder/server/bin/pip" install --quiet "moto==5.1.15" "flask==3.1.2" "flask-cors==6.0.1"
"$folder/client/bin/pip" install --quiet "s3fs==2026.9.0"
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$folder/server/bin/moto_server" -H 127.0.0.1 -p "$port" >"$folder/log" 2>&1 &
server=$!
export AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test AWS_DEFAULT_REGION=us-east-1 PORT="$port"
"$folder/client/bin/python" - <<'PY'
import os
import socket
import time

import fsspec
import s3fs

port = int(os.environ["PORT"])
while True:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        break
    except OSError:
        time.sleep(0.1)
files = s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{port}", use_listings_cache=False)
files.mkdir("models")
with files.open("models/step.bin", "wb") as whole:
    whole.write(bytes(1000))
try:
    with files.open("models/step.bin", "wb") as half:
        half.write(bytes(10))
        raise RuntimeError("the writer fails")
except RuntimeError:
    pass
size = files.info("models/step.bin")["size"]
print(f"s3fs {s3fs.__version__}, fsspec {fsspec.__version__}: the object has {size} of 1000 bytes")
assert size == 10, "the behaviour has changed"
PY
