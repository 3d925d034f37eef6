"""What makes samples of raw records: the user's function, a tokenizer, or nothing.

A function may draw from the global generators of random, numpy and torch: then they are seeded for
each record, from the job's seed, the file's name and the record's place. It may give what it gave
before, changed: then its samples are copied. Of one record of `ONE_IN` the samples are kept as a
digest too, which another process compares with its own. Way in: `mapper_of`.
"""

from __future__ import annotations

import copy
import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from instep.data.order import key
from instep.data.shards.encode import encode
from instep.errors import RecipeError, SpecError, one_line, own_line
from instep.prepare.asked import Asked
from instep.recipe.source_file import load_function

ONE_IN = 256
"""One record of so many is tried twice."""

_OF_DRAWS, _OF_TRIALS = 61, 63

_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))


class Bad(NamedTuple):
    """A record that no sample was made of."""

    text: str


def mapper_of(asked: Asked) -> Function | Tokens | None:
    """What makes samples of records; None where records are samples.

    Raises:
        InstepError: the function or the tokenizer cannot be loaded.
    """
    if asked.map is not None:
        return _loaded("--map", asked.map, "map", asked.seed)
    if asked.tokens is not None:
        return Tokens(asked.tokens, asked.length)
    return None


def reducer_of(asked: Asked) -> Function | None:
    """What makes samples of all samples of a key.

    Raises:
        InstepError: it cannot be loaded.
    """
    if asked.reduce is None:
        return None
    file = asked.reduce.rpartition(":")[0]
    what = "map" if asked.map and asked.map.rpartition(":")[0] == file else "reduce"
    return _loaded("--reduce", asked.reduce, what, asked.seed)


def _loaded(option: str, reference: str, what: str, seed: int) -> Function:
    """The function of `file.py:name`, whose file is called `what` as a module.

    Raises:
        RecipeError: the file cannot be imported.
        SpecError: it has no such function.
    """
    file, _, name = reference.rpartition(":")
    here, path = os.getcwd(), os.path.abspath(file)
    try:
        function = load_function(f"{path}:{name}", what)
    except RecipeError as error:
        if getattr(sys.modules.get(f"instep_{what}"), "__file__", None) != path:
            raise
        raise SpecError(f"{option} {reference!r}: {error}") from None
    os.chdir(here)
    return Function(function, name, seed)


def next_trial(records: int) -> int:
    """The next record to try twice, behind so many: the first, then one of each `ONE_IN`.

    Which one is drawn, so that data that repeat do not hide what the function makes of some.
    """
    block = records // ONE_IN
    while (place := block * ONE_IN + key(_OF_TRIALS, block) % ONE_IN) < records:
        block += 1
    return place if records else 0


class Draws(Exception):
    """The function draws random numbers, and the generators were not seeded for each record."""


class Reuses(Exception):
    """The function gives an object again that it gave before, and samples were not copied."""


class Function:
    """The user's function.

    Args:
        function: of one record.
        name: of it, for messages.
        seed: of the job.
    """

    def __init__(self, function: Callable[[Any], Any], name: str, seed: int) -> None:
        self._function, self._name, self._seed = function, name, seed
        self._here = os.getcwd()
        self.copies = False
        """Whether samples are copied as soon as they are given."""

    def seed(self, file: int, place: int) -> None:
        """Seed the generators for a record of the file with this number."""
        number = key(self._seed, _OF_DRAWS, file, place)
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)
        if (torch := sys.modules.get("torch")) is not None:
            torch.manual_seed(number)

    def state(self) -> list[Any]:
        """What the generators are like; that of torch last, if it is imported."""
        _, words, *rest = np.random.get_state(legacy=True)
        found = [random.getstate(), np.asarray(words).tobytes(), rest]
        if (torch := sys.modules.get("torch")) is not None:
            found.append(torch.get_rng_state().numpy().tobytes())
        return found

    def has_drawn(self, before: list[Any]) -> bool:
        """Whether one of the generators has changed since, or torch was imported meanwhile."""
        return before != self.state()

    def many(self, records: Sequence[Any], given: list[Any]) -> None:
        """Append what the function gives of each record; `Bad` where it raises ValueError.

        The function may go to another folder, and does not stay there.

        Raises:
            RecipeError: it raised something else, for the record after the last in `given`.
        """
        call, left = self._function, iter(records)
        while True:
            try:
                for record in left:
                    made = call(record)
                    if made is not None and (self.copies or type(made) is not dict):
                        made = several(made, self.copies)  # a generator may raise
                    given.append(made)
                return
            except ValueError as error:
                given.append(Bad(one_line(error) or "ValueError"))
            except Exception as error:
                place, _ = own_line(error)
                at = f" ({place})" if place else ""
                raise RecipeError(
                    f"{self._name} raised {type(error).__name__}: {one_line(error)}{at}. A "
                    "function that raises ValueError leaves the record out."
                ) from None
            finally:
                os.chdir(self._here)


def several(given: Any, copies: bool = False) -> Sequence[Any]:
    """The samples that a function gave of one record."""
    if given is None:
        return ()
    if isinstance(given, Mapping) or not isinstance(given, Iterable) or isinstance(given, str):
        given = (given,)
    return [copy.deepcopy(sample) for sample in given] if copies else list(given)


def add_parts(sample: Any, parts: set[int]) -> bool:
    """Add ids of all that a sample has, and that a function might change and give again.

    Returns:
        Whether one of them was there already.
    """
    before, added = len(parts), 1
    parts.add(id(sample))
    is_dict = type(sample) is dict or isinstance(sample, Mapping)
    for value in sample.values() if is_dict else ():
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is np.ndarray:
            base = value.base
            parts.add(id(value) if base is None else id(base))
        elif isinstance(value, np.generic):
            continue
        elif hasattr(value, "untyped_storage"):
            parts.add(value.untyped_storage().data_ptr())
        else:
            parts.add(id(value))
        added += 1
    return len(parts) < before + added


class Tokens:
    """A tokenizer: of each text, samples of at most `length` tokens.

    A sample has `tokens` [n] int32, `document` (a number of the text) and `start` (of its first
    token in the text), so documents are never joined.

    Raises:
        SpecError: there is no such tokenizer.
    """

    def __init__(self, path: str, length: int | None) -> None:
        self._length, self._tokenizer = length, None
        if path != "bytes":
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are as many as there are cores
            try:
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_file(path)
                self._tokenizer.no_truncation()  # which a file may hold: all of a text is wanted,
                self._tokenizer.no_padding()  # and nothing else
            except ImportError:
                raise SpecError(
                    "--tokens needs the package tokenizers: pip install 'instep[data]'."
                ) from None
            except Exception as error:
                raise SpecError(
                    f"--tokens {path!r} cannot be read: {one_line(error)}. Wanted: a file that "
                    "tokenizers saved, as tokenizer.json, or the word bytes."
                ) from None

    def of_file(self, file: int, records: Sequence[Any], places: Sequence[int]) -> list[Any]:
        """The samples of each record of the file with this number, or a `Bad`."""
        texts = [_text(record) for record in records]
        good = [text for text in texts if not isinstance(text, Bad)]
        if self._tokenizer is None:
            encoded = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in good]
        else:
            encoded = [
                np.asarray(found.ids, np.int32)
                for found in self._tokenizer.encode_batch_fast(good, add_special_tokens=False)
            ]
        left = iter(encoded)
        return [
            text if isinstance(text, Bad) else self._cut(next(left), key(file, place))
            for text, place in zip(texts, places, strict=True)
        ]

    def _cut(self, tokens: Any, document: int) -> list[Any]:
        length = self._length or max(1, len(tokens))
        return [
            {"tokens": tokens[at : at + length], "document": document, "start": at}
            for at in range(0, len(tokens), length)
        ]


def _text(record: Any) -> str | Bad:
    text = record.get("text") if isinstance(record, dict) else record
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return text if isinstance(text, str) else Bad("the record has no text in a column 'text'")


def digest_of(given: Any) -> bytes:
    """A digest of what a function gave of one record, for comparing with another process."""
    samples, found = several(given), hashlib.blake2b(digest_size=16)
    found.update(str(len(samples)).encode())
    for sample in samples:
        encoded = encode([sample], None)
        found.update(repr([(c.name, c.kind, c.dtype, c.shape) for c in encoded.columns]).encode())
        found.update(repr(encoded.misfits).encode())
        for view in encoded.views:
            found.update(view.elements.tobytes())
    return found.digest()
