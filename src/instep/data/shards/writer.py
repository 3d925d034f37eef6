"""Writes one file of samples: an Arrow IPC file, uncompressed, of record batches of a few MB.

The file has another name until it is whole. Way in: `ShardWriter`.
"""

from __future__ import annotations

import io
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from instep.data.shards.columns import Column
from instep.data.shards.views import View, batch_of, bytes_of, columns_of, schema_of, views_of
from instep.errors import DataError, one_line
from instep.plain_file import beside_of, plain

if TYPE_CHECKING:
    from typing_extensions import Buffer

BATCH_BYTES = 4 << 20
"""About so much has one record batch."""

MOST_MAPPED = 8 << 20
"""Bytes that are read of a file before it is let go: its pages count as memory until then."""


class _SummedFile(io.BufferedWriter):
    """A new file that is written from its first byte to its last, and its checksum."""

    crc32 = 0

    def write(self, data: Buffer) -> int:
        """Append bytes."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return super().write(data)


class ShardWriter:
    """Writes batches of samples into `path`, which is there when all are.

    Args:
        path: the file; another name beside it is used until it is whole.
        columns: of all samples.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """

    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
        self.path, self.columns = path, list(columns)
        self._beside = beside_of(path)
        self._file = _SummedFile(io.FileIO(self._beside, "w"))  # closed by close or discard
        self._writer = pa.ipc.new_file(self._file, schema_of(columns))
        self.samples, self.bytes = 0, 0
        self.crc32 = 0
        """Checksum of the file, once it is whole."""

    def write(self, views: Sequence[View]) -> None:
        """Append samples."""
        self._writer.write_batch(batch_of(self.columns, views))
        self.samples += views[0].rows

    def close(self, *, durable: bool = False) -> None:
        """Give the file its name.

        Args:
            durable: whether a crash of the machine cannot take it away any more.
        """
        self._writer.close()
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())
        self.bytes, self.crc32 = self._file.tell(), self._file.crc32
        self._file.close()
        self._beside.replace(self.path)

    def discard(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._beside.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()


class ShardFile:
    """A file of samples, mapped into memory.

    Args:
        path: of it.
        size: bytes that it has to have, if that is known.

    Raises:
        DataError: it is missing, has another size, or is no file of samples.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path = path
        try:
            with open(path, "rb", opener=plain) as file:
                found = os.fstat(file.fileno()).st_size
                if size is not None and found != size:
                    raise DataError(
                        f"{path} has {found:,} bytes, but {size:,} were written. Run the same "
                        "instep prepare again, which makes what is missing or damaged."
                    )
                with self._whole():  # an empty file cannot be mapped
                    self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
        with self._whole():
            self._reader = pa.ipc.open_file(pa.py_buffer(self._memory))
            columns = columns_of(self._reader.schema)
        if columns is None:
            raise DataError(
                f"{path} is an Arrow file of another program. Give it to instep prepare."
            )
        self.columns = columns
        self._views: dict[int, list[View]] = {}
        self._is_told = False
        rows = [self._batch(number).num_rows for number in range(self._reader.num_record_batches)]
        self.starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]).astype(np.int64)
        """[batches + 1]: the first sample of each batch."""
        self.let_go()

    def let_go(self) -> None:
        """Count none of its pages as memory of this process, until they are read again."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def reads_here_and_there(self) -> None:
        """Tell the system to read the pages that are asked for alone, and not those around them."""
        if not self._is_told:
            self._memory.madvise(mmap.MADV_RANDOM)
            self._is_told = True

    def __len__(self) -> int:
        return int(self.starts[-1])

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"{self.path} is damaged: {one_line(error)}. Run instep prepare again."
            ) from None

    def _batch(self, number: int) -> Any:
        with self._whole():
            return self._reader.get_batch(number)

    def views(self, number: int) -> list[View]:
        """The columns of one record batch, as views of the mapped file."""
        if number not in self._views:
            with self._whole():
                self._views[number] = views_of(self._batch(number), self.columns)
        return self._views[number]

    def between(self, first: int, stop: int) -> Iterator[list[View]]:
        """The samples of a range, in parts as they lie in the file."""
        number = int(np.searchsorted(self.starts, first, "right")) - 1
        while first < stop:
            begin, end = int(self.starts[number]), int(self.starts[number + 1])
            last = min(stop, end)
            if last > first:
                yield [view.between(first - begin, last - begin) for view in self.views(number)]
            first, number = max(first, last), number + 1


def read_through(path: Path, first: int, stop: int) -> Iterator[list[View]]:
    """The samples [first, stop) of a file, in parts; only some MB of it are in memory at a time."""
    file, read = ShardFile(path), 0
    for views in file.between(first, stop):
        yield views
        read += bytes_of(views)
        if read >= MOST_MAPPED:
            file.let_go()
            read = 0
