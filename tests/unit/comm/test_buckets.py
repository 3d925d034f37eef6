"""Buckets hold every tensor once, end to end, and nothing else."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.comm.buckets import lay_out

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
SHAPES = st.lists(st.integers(0, 5), max_size=3)
TENSORS = st.lists(st.builds(lambda s, d: torch.zeros(s, dtype=d), SHAPES, DTYPES), max_size=12)
LIMITS = st.lists(st.integers(1, 400), min_size=1, max_size=3)


@given(tensors=TENSORS, limits=LIMITS, spare=st.integers(0, 7))
def test_views_tile_every_flat_tensor_exactly(tensors, limits, spare):
    buckets = lay_out(tensors, limits, spare)
    for bucket in buckets:
        at = 0
        for member, view in zip(bucket.members, bucket.views, strict=True):
            assert view.shape == tensors[member].shape
            assert view.dtype == tensors[member].dtype
            assert view.storage_offset() == at or view.numel() == 0
            assert view.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
            at += view.numel()
        assert at + bucket.spare.numel() == bucket.flat.numel()
        assert bucket.spare.numel() == (spare if bucket is buckets[-1] else 0)


@given(tensors=TENSORS, limits=LIMITS)
def test_every_tensor_is_a_member_once_in_reverse_order(tensors, limits):
    members = [member for bucket in lay_out(tensors, limits) for member in bucket.members]
    assert members == list(reversed(range(len(tensors))))


@given(tensors=TENSORS, limits=LIMITS)
def test_a_bucket_keeps_its_limit_unless_one_tensor_alone_is_larger(tensors, limits):
    for number, bucket in enumerate(lay_out(tensors, limits)):
        limit = limits[min(number, len(limits) - 1)]
        filled = [tensors[member] for member in bucket.members]
        assert sum(t.nbytes for t in filled) <= limit or sum(t.nbytes > 0 for t in filled) == 1


def test_what_is_written_to_a_view_is_in_the_flat_tensor():
    (bucket,) = lay_out([torch.zeros(2), torch.zeros(3)], [1000], spare=2)
    bucket.views[0].fill_(1)
    bucket.spare.fill_(7)
    assert bucket.flat.tolist() == [1, 1, 1, 0, 0, 7, 7]
    assert bucket.members == (1, 0)
