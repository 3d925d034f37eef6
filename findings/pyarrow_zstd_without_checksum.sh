#!/usr/bin/env bash
# pyarrow 26.0.1: the zstd frames that it writes carry no checksum of their content.
#
# Guessed: as the zstd program does by default, and as gzip always does, each frame ends with a checksum,
# so a reader of compressed JSON lines or CSV is told of a damaged byte.
# Seen: bit 2 of the frame header descriptor (RFC 8878, 3.1.1.1.1), the Content_Checksum_flag, is 0, from
# CompressedOutputStream and from compress() alike; there is no option to set it. The same text in gzip
# ends with its CRC-32. Who wants to know of damage keeps a checksum of the file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "pyarrow==26.0.1"
"$folder/venv/bin/python" - <<'PY'
import zlib

import pyarrow as pa

text = b'{"x": 1}\n' * 1000
sink = pa.BufferOutputStream()
with pa.CompressedOutputStream(sink, "zstd") as stream:
    stream.write(text)
for way, frame in (
    ("CompressedOutputStream", sink.getvalue().to_pybytes()),
    ("compress", pa.compress(text, "zstd", asbytes=True)),
):
    assert frame[:4] == b"\x28\xb5\x2f\xfd", "no zstd frame"
    flag = frame[4] >> 2 & 1
    print(f"pyarrow {pa.__version__} {way}: Content_Checksum_flag {flag}")
    assert flag == 0, "the behaviour has changed"
sink = pa.BufferOutputStream()
with pa.CompressedOutputStream(sink, "gzip") as stream:
    stream.write(text)
end = sink.getvalue().to_pybytes()[-8:-4]
print("gzip ends with the CRC-32 of the text:", int.from_bytes(end, "little") == zlib.crc32(text))
assert int.from_bytes(end, "little") == zlib.crc32(text)
PY
