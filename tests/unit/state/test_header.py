"""The head of a safetensors file says where each tensor lies, without torch."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from instep.errors import CheckpointError
from instep.state.header import check_header, spans

TENSORS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.array([7], dtype=np.int64),
    "empty": np.zeros((0, 3), dtype=np.float64),
}


def test_each_span_has_the_bytes_and_the_type_of_its_tensor(tmp_path):
    save_file(TENSORS, tmp_path / "some.safetensors", metadata={"format": "pt"})
    data = (tmp_path / "some.safetensors").read_bytes()
    found = spans(tmp_path / "some.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, span in found.items():
        assert data[span.start : span.stop] == TENSORS[name].tobytes()
    assert {name: span.kind for name, span in found.items()} == {
        "b": "F32",
        "a": "I64",
        "empty": "F64",
    }


@pytest.mark.parametrize(
    "head",
    [
        b"[]",
        b'{"a": 3}',
        b'{"a": {"data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0, 0, 0]}}',
        b'{"a": {"dtype": "F32", "data_offsets": "no"}}',
    ],
)
def test_a_list_of_tensors_that_makes_no_sense_is_refused(tmp_path, head):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(CheckpointError, match="does not begin like one"):
        check_header(path)
