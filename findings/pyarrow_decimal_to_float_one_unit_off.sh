#!/usr/bin/env bash
# pyarrow 26.0.1: a cast of decimals to float64 does not give the nearest float.
#
# Guessed: decimal128(20, 2) with the value 0.35 becomes 0.35, as float(Decimal("0.35")) and a cast by way
# of text do.
# Seen: one value of eight or so between 0 and 100 is one unit in the last place off (0.35 becomes
# 0.35000000000000003), so prices read from Parquet are not those read from CSV, and equality and
# group-bys on them fail. A cast to string and from there to float64 is exact.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "pyarrow==26.0.1"
"$folder/venv/bin/python" - <<'PY'
from decimal import Decimal

import pyarrow as pa

values = [Decimal(number) / 100 for number in range(10_000)]
array = pa.array(values, pa.decimal128(20, 2))
nearest = [float(value) for value in values]
cast = array.cast(pa.float64()).to_pylist()
off = [at for at in range(len(values)) if cast[at] != nearest[at]]
print(f"pyarrow {pa.__version__}: {len(off)} of {len(values)} differ, such as {cast[35]!r}")
assert cast[35] == 0.35000000000000003, "the behaviour has changed"
assert len(off) > 1000, "the behaviour has changed"
by_text = array.cast(pa.string()).cast(pa.float64()).to_pylist()
print("by way of text:", sum(a != b for a, b in zip(by_text, nearest)), "differ")
assert by_text == nearest
PY
