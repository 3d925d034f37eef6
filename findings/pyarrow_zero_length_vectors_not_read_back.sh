#!/usr/bin/env bash
# pyarrow 26.0.1: a Parquet file with a column of vectors of length 0 is written, and cannot be read.
#
# Guessed: what write_table takes, read_table gives back, as it does for vectors of length 1; a model without
# extra features has such a column.
# Seen: writing says nothing; reading raises ArrowInvalid "Expected all lists to be of size=0 but index 1 had
# size=1". The other columns can be read if that one is not asked for. The same table as Arrow IPC comes back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "pyarrow==26.0.1"
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet


def vectors(length):
    values = [[1.0] * length, [2.0] * length]
    return pa.table({"label": [0, 1], "extra": pa.array(values, pa.list_(pa.float32(), length))})


for length in (1, 0):
    table = vectors(length)
    parquet.write_table(table, "table.parquet")
    feather.write_feather(table, "table.arrow", compression="uncompressed")
    assert feather.read_table("table.arrow") == table
    try:
        found = "equal" if parquet.read_table("table.parquet") == table else "different"
    except pa.ArrowInvalid as error:
        found = str(error)
    print(f"pyarrow {pa.__version__}, vectors of length {length}: {found}")
    assert (found == "equal") == (length == 1), "the behaviour has changed"
assert parquet.read_table("table.parquet", columns=["label"]).num_rows == 2
PY
