"""One part of a stream: an iterator that is read window by window, and can be put anywhere.

It goes forward by reading. To go anywhere else it begins anew: from the last window of which the
dataset gave a state, or from its start. Whatever it read before must come again: the contents of
windows are compared with those that were read the first time. It knows no steps and no workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch.utils.data._utils import worker as torch_worker

from instep.data.order import key
from instep.data.reading.generators import preserved, seed_all
from instep.data.reading.streams.given import GivenStream, digest_of, hash_of
from instep.data.reading.streams.kept import KeptWindows, StreamWindow
from instep.data.reading.streams.state import has_state, packed, unpacked
from instep.data.reading.streams.turns import READ_AHEAD, StreamPlan
from instep.data.samples import last_read
from instep.errors import DataError
from instep.words import a_or_an

_OF_GLOBALS, _OF_INFO = 42, 43
"""Purposes of keys: the global generators while a window is read; a loader's seed."""

_HELD = 2
"""Windows whose samples stay in memory."""

_END = object()


class OpenWindow(NamedTuple):
    """A window that is being read."""

    passes: int
    state: bytes | None
    rows: list[Any]


class OtherSamples(Exception):
    """A window has other samples than when it was read before."""


class StreamPart:
    """One part.

    Args:
        given: the stream.
        plan: how it is divided.
        number: of the part.
        seed: of the job.
        kept: windows that are known.
    """

    def __init__(
        self, given: GivenStream, plan: StreamPlan, number: int, seed: int, kept: KeptWindows
    ) -> None:
        self._given, self._plan, self._number, self._seed = given, plan, number, seed
        self._kept, self._reads = kept, last_read.current_read(last_read.DATASETS[0])
        self._held: dict[tuple[int, int], list[Any]] = {}
        self._dataset: Any = None
        self._samples: Iterator[Any] = iter(())
        self._at = (-1, 0)  # epoch and window that come next
        self._put_at: tuple[int, int] | None = None  # by a state
        self._begun: OpenWindow | None = None
        self._serves, self._served = (-1, 0), 0
        """The window that is used, and how many samples of it were."""
        self._passes, self._in_pass, self._believes = 0, 0, True  # in states
        self._wrong: DataError | None = None  # that will not go away

    def sample(self, epoch: int, count: int) -> Any:
        """A sample.

        Raises:
            DataError: the stream has another one there than before, or none.
        """
        if self._wrong is not None:
            raise self._wrong
        number, place = divmod(count, self._plan.window)
        if (rows := self._held.get((epoch, number))) is None:
            try:
                rows = self._window(epoch, number)
            except BaseException as error:
                self._leave()
                if isinstance(error, DataError):
                    self._wrong = error
                raise
        self._read_ahead(epoch, number)
        return rows[place]

    def head(self, most: int) -> list[Any]:
        """The first samples of epoch 0, of a copy of its own; `most` at most.

        Raises:
            DataError: one is changed by reading on.
        """
        other = StreamPart(self._given, self._plan, self._number, self._seed, self._kept)
        other._kept = KeptWindows(None, self._number, 0)
        other._begin(0, None)
        rows: list[Any] = []
        read: list[int] = []  # hashes, when each had just come
        while len(rows) < most:
            with other._as_loader(0, 0, len(rows)):
                rows += (found := other._some(1))
            if not found:
                break
            read.append(hash_of(found[0]))
        for number, (row, before) in enumerate(zip(rows, read, strict=True)):
            if hash_of(row) != before:
                raise DataError(
                    f"{self._given.named} changes sample {number} of part {self._number} while it "
                    "gives later ones: it gives one buffer again and again, and a batch would have "
                    "its last content several times. Have __iter__ give a copy of it."
                )
        return rows

    def length(self) -> Iterator[int]:
        """Read an epoch on a copy of its own, and give how many samples there were so far."""
        other = StreamPart(self._given, self._plan, self._number, self._seed, self._kept)
        count, window = 0, 0
        other._begin(0, None)
        while True:
            with other._as_loader(0, window):
                found = len(other._some(self._plan.window))
            count, window = count + found, window + 1
            yield count
            if found < self._plan.window:
                return

    def begin(self) -> None:
        """Put an iterator at the start, for `next`."""
        self._begin(0, None)

    def next(self, window: int, place: int) -> Any:
        """Read the sample that comes next, as one of a window; a part that ends begins again."""
        with self._as_loader(0, window, place):
            (sample,) = self._some(1)
        return sample

    def _leave(self) -> None:
        """Let go of the iterator: one that raised has ended."""
        self._samples, self._at, self._begun = iter(()), (-1, 0), None

    def _window(self, epoch: int, number: int) -> list[Any]:
        try:
            self._go_to(epoch, number)
            return self._read()
        except Exception as error:
            if not self._of_state(error) and isinstance(error, OtherSamples):
                raise self._not_the_same(epoch, number) from None
            if not self._of_state(error):
                raise
        # a state that does not lead to the same samples, such as of a shuffle buffer
        self._believes = False
        self._leave()
        return self._window(epoch, number)

    def _of_state(self, error: Exception) -> bool:
        """Whether a state may be the cause: one that leads elsewhere, or nowhere."""
        if not self._believes or isinstance(error, OtherSamples):
            return self._believes
        first = self._put_at == self._at
        return self._put_at is not None and (first or isinstance(error, DataError))

    def _go_to(self, epoch: int, number: int) -> None:
        here = self._at[1] if self._at[0] == epoch else -1
        if here == number:
            return
        self._kept.look()
        known = self._kept.nearest(epoch, number) if self._believes else None
        if here > number or here < (known.number if known else 0):
            self._begin(epoch, known)
        while self._at[1] < number:
            self._read()

    def _read_ahead(self, epoch: int, number: int) -> None:
        """Read some of the next window while this one is used: as much of it as of this."""
        self._served = self._served + 1 if self._serves == (epoch, number) else 1
        self._serves = epoch, number
        if self._at != (epoch, number + 1):
            return
        begun = len(self._begun.rows) if self._begun is not None else 0
        if begun + READ_AHEAD <= min(self._served, self._plan.window_of(self._number, number + 1)):
            try:
                self._read_some()
            except Exception:  # that comes when the window is wanted
                self._leave()

    def _begin(self, epoch: int, known: StreamWindow | None) -> None:
        """Put an iterator at a window, or at the start of an epoch."""
        self._leave()
        self._dataset = self._given.copied()
        self._passes = known.passes if known is not None else 0
        number = known.number if known is not None else 0
        self._at, self._in_pass = (epoch, number), number
        self._put_at = known.at if known is not None else None
        with self._as_loader(epoch, number):
            if self._given.worker_init is not None:
                self._given.worker_init(self._number)
            self._set_epoch(epoch if self._plan.sizes is not None else self._passes)
            if known is None or known.state is None:
                self._samples = self._anew()
            else:
                self._samples = self._restored(unpacked(known.state))

    def _restored(self, state: Any) -> Iterator[Any]:
        """An iterator that continues from a state."""
        if has_state(self._dataset):
            self._dataset.load_state_dict(state)
            return self._anew()
        samples: Any = self._anew()
        samples.load_state_dict(state)
        return samples  # type: ignore[no-any-return]

    def _anew(self) -> Iterator[Any]:
        samples: Any = type(self._dataset).__iter__(self._dataset)
        if not hasattr(samples, "__next__"):
            raise DataError(
                f"__iter__ of {self._given.named} ({type(self._dataset).__name__}) returned "
                f"{a_or_an(samples)}, and an iterator is wanted: let it yield each sample, or "
                "return iter(...) of that."
            )
        return samples  # type: ignore[no-any-return]

    def _set_epoch(self, epoch: int) -> None:
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)

    def _read(self) -> list[Any]:
        """The next window."""
        while (rows := self._read_some()) is None:
            pass
        return rows

    def _read_some(self) -> list[Any] | None:
        """Read on in the next window; returns its samples when it has all."""
        (epoch, number), begun = self._at, self._begun
        size = self._plan.window_of(self._number, number)
        done = len(begun.rows) if begun is not None else 0
        with self._as_loader(epoch, number, done):
            if begun is None:
                begun = self._begun = OpenWindow(
                    self._passes, self._state() if number else None, []
                )
            begun.rows.extend(found := self._some(wanted := min(READ_AHEAD, size - done)))
            if done + wanted < size and len(found) == wanted:
                return None
            is_last = not self._plan.window_of(self._number, number + 1)
            if len(begun.rows) < size or (is_last and self._some(1)):
                raise self._of_other_length(epoch, number, len(begun.rows), size)
        content = digest_of(begun.rows)
        if (known := self._kept.get(epoch, number)) and known.content != content:
            raise OtherSamples
        self._kept.add(StreamWindow(epoch, number, content, begun.state, begun.passes))
        self._held = {at: self._held[at] for at in [*self._held][1 - _HELD :]}
        self._held[epoch, number] = begun.rows
        self._at, self._begun = (epoch, number + 1), None
        return begun.rows

    def _some(self, count: int) -> list[Any]:
        """The next samples: fewer where the epoch ends, unless the part begins again."""
        rows: list[Any] = []
        while len(rows) < count:
            sample = next(self._samples, _END)
            if sample is not _END:
                rows.append(sample)
                self._reads.start(self._next_number(len(rows)))  # whoever watches sees progress
                self._in_pass += 1
                continue
            if self._plan.sizes is not None:
                break
            if not self._in_pass:
                raise self._without_samples()
            self._passes, self._in_pass = self._passes + 1, 0
            self._set_epoch(self._passes)
            self._samples = self._anew()
        self._reads.clear()
        return rows

    def _next_number(self, more: int) -> int:
        """The number of a sample that comes after those that were read."""
        (epoch, number), plan = self._at, self._plan
        count = number * plan.window + more + (len(self._begun.rows) if self._begun else 0)
        return plan.number(self._number, epoch, count)

    def _state(self) -> bytes | None:
        owner = self._dataset if has_state(self._dataset) else self._samples
        if not has_state(owner):
            return None
        with suppress(Exception):  # a method of the user's may raise anything
            return packed(owner.state_dict())  # type: ignore[union-attr]
        return None

    @contextmanager
    def _as_loader(self, epoch: int, number: int, place: int = 0) -> Iterator[None]:
        """Look to the dataset like a loader process, with draws that follow from the window."""
        before = torch_worker._worker_info
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._number,
            num_workers=self._plan.parts,
            seed=key(self._seed, _OF_INFO, self._number, epoch),
            dataset=self._dataset,
        )
        try:
            with preserved():
                seed_all(key(self._seed, _OF_GLOBALS, self._number, epoch, number, place))
                yield
        finally:
            torch_worker._worker_info = before

    def _without_samples(self) -> DataError:
        if (parts := self._plan.parts) == 1:
            return DataError(
                f"{self._given.named} of Recipe.train has no sample: there is nothing to learn "
                "from. See whether __iter__ finds its files."
            )
        return DataError(
            f"part {self._number} of {parts} of {self._given.named} has no sample, and with "
            "train.steps a part that ends begins again. Set data.parts to a number of parts that "
            "all have samples (at most the shards of the dataset)."
        )

    def _not_the_same(self, epoch: int, number: int) -> DataError:
        first = number * self._plan.window
        return DataError(
            f"part {self._number} of {self._given.named} gives other samples than when it was read "
            f"before (from sample {first:,} of epoch {epoch + 1} on), so a run that has lost a "
            "process cannot continue with what comes next. Let what __iter__ gives follow from the "
            "arguments of the dataset, get_worker_info() and set_epoch(epoch) alone."
        )

    def _of_other_length(self, epoch: int, number: int, found: int, size: int) -> DataError:
        first = number * self._plan.window
        known = self._plan.sizes[self._number] if self._plan.sizes else 0
        more = f"{first + found:,}" if found < size else f"more than {first + found:,}"
        return DataError(
            f"part {self._number} of {self._given.named} has {more} samples in epoch {epoch + 1}, "
            f"and had {known:,} when they were counted: an epoch has as many each time. Set "
            "train.steps for a stream whose length changes."
        )
