"""Keys of a run's secret: one for each purpose, and what can be drawn from a key.

All that a run must keep from others follows from 256 bits (`secret_files.py`). Each use has a key
of its own (HKDF-SHA256), and a key gives words that nobody can tell from random ones without it
(AES-256 in counter mode). The library for both is loaded when it is first needed: most runs have no
secret.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import numpy as np

from instep.privacy.secret_files import SECRET_BYTES

Words = np.ndarray[Any, np.dtype[np.uint64]]


def derived(secret: bytes, purpose: str, *parts: int | bytes) -> bytes:
    """A key for one purpose.

    Args:
        secret: of the run, or a key that was derived from it.
        purpose: such as `noise`.
        parts: what the key is for, such as a commit's number and a digest. Each is written with its
            length, so that no two lists of parts give the same key.
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

    info = [b"instep privacy 1", purpose.encode()]
    info += [each if isinstance(each, bytes) else str(each).encode() for each in parts]
    packed = b"".join(len(each).to_bytes(8, "big") + each for each in info)
    # the label of an HKDF may be of any length, but is hashed for each block
    return HKDFExpand(SHA256(), SECRET_BYTES, hashlib.sha256(packed).digest()).derive(secret)


def words(key: bytes, first: int, count: int) -> Words:
    """Words [first, first + count) of a key's stream, [count] uint64; the same on every machine.

    Args:
        key: of 256 bits.
        first: an even number.
        count: how many.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    assert first % 2 == 0, "a block has two words"
    counter = (first // 2).to_bytes(16, "big")
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor()
    stream = np.empty(8 * count + 15, np.uint8)
    written = encryptor.update_into(np.zeros(8 * count, np.uint8).data, stream.data)
    return stream[:written].view("<u8").astype(np.uint64, copy=False)


def tag(key: bytes, content: bytes) -> bytes:
    """16 bytes that stand for a content, and say nothing of it without the key."""
    return hmac.new(key, content, hashlib.sha256).digest()[:16]
