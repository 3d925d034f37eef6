"""What a loss keeps in a table or a sparse matrix of a library is seen, and put back."""

import numpy as np
import pytest
import torch

from instep.usercode.counts import Counts
from lazily import Lazy

pandas, sparse = Lazy("pandas"), Lazy("scipy.sparse")


def frame():
    return pandas.DataFrame({"weight": np.ones(3), "class": ["a", "b", "c"]})


def change_frame(table):
    table.loc[1, "weight"] = 0.5


def change_matrix(matrix):
    matrix[1, 1] = 0.5


CASES = pytest.mark.parametrize(
    ("table", "read", "change"),
    [
        (frame, lambda table: table["weight"].max(), change_frame),
        (lambda: frame()["weight"], lambda table: table.max(), lambda table: table.update([0.5])),
        (lambda: sparse.lil_matrix((3, 2)), lambda m: m.nnz, change_matrix),
        (lambda: sparse.csr_array(np.eye(3)), lambda m: m.sum(), lambda m: m.data.fill(2.0)),
    ],
)


def kept_by(table, read, change):
    """A loss that keeps a table, and the table."""
    kept = table()

    def loss(model, batch, *, changes=True):
        if changes:
            change(kept)
        return float(read(kept))

    return loss, kept


@CASES
def test_a_table_that_passes_change_is_named_and_put_back(table, read, change):
    loss, kept = kept_by(table, read, change)
    before = [read(kept), pandas.DataFrame(kept if not sparse.issparse(kept) else kept.toarray())]
    before[1] = before[1].copy()
    counts = Counts([loss])
    loss(None, None)
    assert counts.changed() == "kept"
    counts.put_back()
    assert read(kept) == before[0]
    now = pandas.DataFrame(kept if not sparse.issparse(kept) else kept.toarray())
    assert now.equals(before[1])
    assert counts.changed() == ""


@CASES
def test_a_table_that_is_only_read_is_not(table, read, change):
    loss, _ = kept_by(table, read, change)
    counts = Counts([loss])
    loss(None, None, changes=False)
    assert counts.changed() == ""


def test_a_whole_data_set_in_a_table_is_not_looked_at():
    table = pandas.DataFrame(torch.zeros(1_000_001, 1).numpy())

    def loss():
        return table.iloc[0]

    counts = Counts([loss])
    table.iloc[0, 0] = 1.0
    assert counts.changed() == ""
