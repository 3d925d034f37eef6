"""Gradients go into buckets, and buckets on their way: what strategies have in common.

Where a bucket goes, and what comes back, is said by those that inherit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm, Work
from instep.comm.buckets import Bucket
from instep.comm.codecs.base import Codec
from instep.errors import SpecError, WorkerError
from instep.sync.sparse_rows import SparseRows
from instep.sync.sums import Plain, Sums

SPARSE = 2.0**-12
"""Added to a parameter's mark where its gradient is sparse; below 1 with up to 4,095 ranks."""


def sparse_mark(before: float) -> float:
    """What a rank tells of a sparse gradient, after what it told of the passes before: a sum with a
    dense one is dense."""
    return 1.0 if before == 1.0 else 1.0 + SPARSE


def sparse_of(marks: Sequence[float]) -> list[int]:
    """The parameters of which all gradients were sparse, by the sums of all ranks' marks."""
    return [
        slot for slot, each in enumerate(marks) if each % 1 and each == int(each) * (1 + SPARSE)
    ]


def check_switch(name: str, value: object) -> None:
    """Refuse an option that is neither on nor off.

    Raises:
        SpecError: it is one.
    """
    if not isinstance(value, bool):
        raise SpecError(f"sync.options.{name} = {value!r}: needs to be true or false.")


class Gathering(ABC):
    """Fills buckets, sends each as soon as it is full, and exchanges notes.

    Args:
        bucket_mb: megabytes at which a bucket is full and starts on its way.
        overlap: send during the backward pass; off, all is sent after it.
        codec: how gradients look on the wire; None sends them as they are.
        encode_vectors: encode also parameters of fewer than two dimensions.

    Raises:
        SpecError: an option is refused.
    """

    def __init__(
        self,
        *,
        bucket_mb: float,
        overlap: bool,
        codec: Codec | None = None,
        encode_vectors: bool = False,
    ) -> None:
        number = isinstance(bucket_mb, (int, float)) and not isinstance(bucket_mb, bool)
        if not (number and 0 < bucket_mb < math.inf):
            raise SpecError(f"sync.options.bucket_mb = {bucket_mb!r}: needs a number above 0.")
        check_switch("overlap", overlap)
        check_switch("encode_vectors", encode_vectors)
        self._bucket_bytes = int(bucket_mb * 1e6)
        self._overlap = overlap
        self.codec, self._encode_vectors = codec, encode_vectors
        self._sums: Sums = Plain()
        self._sparse_rows = SparseRows()
        self._loaded: Mapping[str, Tensor] | None = None  # until `start`
        self._comm: Comm

    @abstractmethod
    def _with_room(self, spare: int) -> list[Bucket]:
        """The buckets, and at the end of the last one room for so many notes."""

    @abstractmethod
    def _send(self, number: int, bucket: Bucket) -> Work:
        """A bucket is full: send it on its way."""

    def _is_encoded(self, parameter: Tensor) -> bool:
        return self.codec is not None and (self._encode_vectors or parameter.dim() > 1)

    def _encodes(self, bucket: Bucket) -> bool:
        """Whether it is encoded: all its members are, or none is."""
        return bool(bucket.views) and self._is_encoded(bucket.views[0])

    def _gather(self, parameters: Sequence[Parameter], comm: Comm, sums: Sums, notes: int) -> None:
        """A generation begins: lay out the buckets."""
        state, self._loaded = self.state(), None
        self._parameters, self._comm, self._sums = list(parameters), comm, sums
        if state:
            self._sums.load_state(state)
        self._buckets = self._with_room((1 + self._sums.flags) * len(self._parameters) + notes)
        self._home = {
            member: (number, view)
            for number, bucket in enumerate(self._buckets)
            for member, view in zip(bucket.members, bucket.views, strict=True)
        }
        self._seen = [0.0] * len(self._parameters)
        self._begin_step()

    def _begin_step(self) -> None:
        self._seen[:] = [0.0] * len(self._seen)
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._work: list[Work] = []
        self._weight, self._sending = 0.0, False
        self._agreed: list[float] = []  # of each parameter, whether a rank had a gradient

    def begin_pass(self, weight: float, *, last: bool, unit: int = 0) -> None:
        """Remember the weight; on the last pass, full buckets may leave."""
        self._weight = weight
        self._sums.begin_pass()
        self._sending = last and self._overlap and self._comm.size > 1

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Move a fresh gradient into its bucket, weighted; send what is full."""
        number, view = self._home[slot]
        if number < len(self._work):
            raise WorkerError(
                "a parameter received a second gradient in one backward pass, after its first "
                "was sent. Set sync.options.overlap = false for models that do so "
                "(re-entrant activation checkpointing)."
            )
        self._sums.add(slot, gradient, self._weight, view, not self._seen[slot])
        if gradient.is_sparse:
            self._seen[slot] = sparse_mark(self._seen[slot])
            self._sparse_rows.add(slot, gradient)
        else:
            self._seen[slot] = 1.0
        if self._sending:
            self._missing[number] -= 1
            self._send_full()

    def _send_full(self) -> None:
        """Start the buckets that are full, in order; the last one waits for the notes."""
        while len(self._work) < len(self._buckets) - 1 and not self._missing[len(self._work)]:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._work)]
        for member, view in zip(bucket.members, bucket.views, strict=True):
            if not self._seen[member]:
                view.zero_()  # what stands there is the step before
        self._work.append(self._send(len(self._work), bucket))

    def exchange(self, notes: Tensor) -> Tensor | None:
        """Send what is left, and wait for all of it; what was agreed on stays in the buckets."""
        told = [*self._seen, *self._sums.raised()]
        spare, count, length = self._buckets[-1].spare, len(self._parameters), len(told)
        spare.copy_(_doubles([*told, *notes.tolist()]))
        while len(self._work) < len(self._buckets):
            self._send_next()
        self._finish()
        agreed = spare.tolist()
        settled = self._sums.settle(agreed[count:length])
        self._begin_step()
        if not settled:
            return None
        self._agreed = agreed[:count]
        return _doubles(agreed[length:])

    def _finish(self) -> None:
        """Wait for all that is under way."""
        for work in self._work:
            work.wait()

    def _forget(self) -> None:
        self._begin_step()
        for parameter in self._parameters:
            parameter.grad = None
        self._sparse_rows.forget()

    def state(self) -> dict[str, Tensor]:
        """Memory of the sums: nothing, or how fine their lattices are."""
        return self._sums.state() if self._loaded is None else dict(self._loaded)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Kept until `start`."""
        self._loaded = state


def _doubles(values: list[float]) -> Tensor:
    """[n] float64, in a third of the time that `torch.tensor` takes."""
    return torch.from_numpy(np.array(values, np.float64))
