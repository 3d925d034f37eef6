"""The n-th sample of a class is found by counts of blocks, as in a list of all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.data import class_codes
from instep.data.balance import ClassOrder, Members, planned_counts
from instep.data.class_codes import CountedCodes
from instep.data.splits.columns import Classes, Column

LABELS = st.lists(st.sampled_from([-3, 0, 1, 7, 10**12, -(10**15)]), min_size=1, max_size=60)


def found_by(codes):
    return [codes.find(n, np.arange(count)) for n, count in enumerate(codes.counts.tolist())]


@given(labels=LABELS, narrow=st.booleans())
def test_samples_of_a_class_are_those_of_the_list(labels, narrow):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(class_codes, "_BLOCK", 3)
        patch.setattr(class_codes, "_BLOCKS", 8)
        patch.setattr(class_codes, "_CELLS", 16)
        column = np.array(labels) % 5 if narrow else np.array(labels)
        listed = Classes.of(Column("labels", column), len(labels))
        wanted = [np.flatnonzero(listed.codes == n) for n in range(len(listed.names))]
        codes, names = CountedCodes.of_column(lambda indices: column[indices], len(labels))
        assert names == np.asarray(listed.names).tolist()
        for each in (codes, CountedCodes.of_array(listed.codes)):
            assert each.counts.tolist() == listed.counts.tolist()
            for found, mine in zip(found_by(each), wanted, strict=True):
                assert np.array_equal(found, mine)
            indices = np.arange(len(labels))[::-1]
            assert np.array_equal(each.of(indices), listed.codes[::-1])


@pytest.mark.slow
def test_classes_of_a_hundred_million_samples_take_no_memory_for_each():
    import time
    import tracemalloc

    samples, common = 10**8, np.random.default_rng(1).integers(0, 9, 1 << 16).astype(np.uint8)
    common[::1000] = 9  # repeated: no file of labels
    tracemalloc.start()
    began = time.perf_counter()
    codes, names = CountedCodes.of_column(lambda indices: common[indices & 0xFFFF], samples)
    read = time.perf_counter() - began
    members = Members(codes)
    order = ClassOrder(members, planned_counts(members.counts, "inverse"), 3)
    began = time.perf_counter()
    assert len(order.indices(4, order.samples // 2, order.samples // 2 + 64)) == 64
    print(f"labels read in {read:.1f} s, a batch found in {time.perf_counter() - began:.3f} s")
    assert len(names) == 10
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()
