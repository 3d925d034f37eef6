#!/usr/bin/env bash
# pyarrow 26.0.1 with pandas 3.1.1: pa.Array.to_numpy of plain numbers imports pandas where it is installed.
#
# Guessed: the numbers of an int64 array without nulls go to NumPy without a look at pandas, since the result
# has nothing of it, so a worker that reads Parquet needs no second for that import.
# Seen: pandas is among sys.modules after to_numpy(), after np.asarray of the array, and after pa.array of a
# NumPy array; np.frombuffer of Array.buffers() and pa.Array.from_buffers do the same work without it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "pyarrow==26.0.1" "pandas==3.1.1" "numpy==2.4.6"
for way in "array.to_numpy()" "np.asarray(array)" "pa.array(np.arange(3))" \
    "np.frombuffer(array.buffers()[1], np.int64)" \
    "pa.Array.from_buffers(pa.int64(), 3, [None, pa.py_buffer(np.arange(3))])"; do
    WAY="$way" "$folder/venv/bin/python" - <<'PY'
import os
import sys

import numpy as np
import pyarrow as pa

way = os.environ["WAY"]
array = pa.Array.from_buffers(pa.int64(), 3, [None, pa.py_buffer(np.arange(3))])
assert "pandas" not in sys.modules
eval(way)
imported = "pandas" in sys.modules
print(f"pyarrow {pa.__version__}: {way}: pandas {'imported' if imported else 'not imported'}")
assert imported == ("buffers" not in way and "frombuffer" not in way), "the behaviour has changed"
PY
done
