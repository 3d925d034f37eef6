"""Numbers between Arrow and NumPy: as pyarrow's own ways give them, and without pandas."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from instep.data.shards.views import from_numpy, to_numpy

KINDS = ["int8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64", "bool"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 3])
def test_numbers_of_an_arrow_array_are_pyarrows_own(kind, first):
    array = pa.array(np.arange(20) % 5).cast(kind) if kind != "float16" else None
    array = pa.array(np.arange(20, dtype=np.float16)) if array is None else array
    array = array.slice(first)
    found = to_numpy(array)
    assert found.dtype == np.dtype(kind)
    np.testing.assert_array_equal(found, array.to_numpy(zero_copy_only=False))


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_an_arrow_array_of_numbers_is_pyarrows_own(kind):
    numbers = np.arange(20).astype(kind)[::2]
    assert from_numpy(numbers).equals(pa.array(numbers))


def test_no_numbers_are_an_empty_array():
    assert to_numpy(pa.array([], pa.int16())).shape == (0,)
    assert len(from_numpy(np.empty(0, np.int64))) == 0


def test_preparing_does_not_import_pandas(tmp_path):
    code = """if True:
        import io, sys
        import numpy as np, pyarrow.json
        from instep.data.shards.arrow_in import encode_batch
        from instep.prepare.exchange import taken
        lines = b'{"n": 1, "l": [1.0]}\\n{"n": null, "l": []}\\n{"n": 3, "l": [1.0, 2.0]}'
        batch, = pyarrow.json.read_json(io.BytesIO(lines)).to_batches()
        found = encode_batch(batch, None)
        rows = list(taken([found.views], found.columns, np.array([1, 0])))
        assert rows[0][0].data.tolist() == [3, 1] and len(found.misfits) == 1
        assert "pandas" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
