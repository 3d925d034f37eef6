"""One member of a secure sum: its keys, its shares, its masks, and what it answers, each once.

A member has two key pairs of X25519 for one sum alone, and a seed of its own mask. It cuts its
private key and its seed into shares, and seals one of each for every other. What it adds is masked
by a mask for each other member, which cancels in the sum, and by its own. Once it is known whose
parts have come, members give the shares of the seeds of these, and of the keys of those whose parts
have not come; of nobody both. So what came too late stays masked.

All keys are bound to a context: who has another one has masks that do not cancel.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Mapping
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from instep.errors import WorkerError
from instep.privacy.keys import derived
from instep.privacy.secure.masks import Mask
from instep.privacy.secure.shamir import SHARE_BYTES, split

KEYS_BYTES = 96
SEALED_BYTES = 2 * SHARE_BYTES + 16
_NONCE = bytes(12)


class SumKeys(NamedTuple):
    """Public keys of a member, which it tells all."""

    seals: bytes
    """Public key by which shares are sealed."""
    masks: bytes
    """Public key of its masks."""
    seed: bytes
    """Hash of the seed of its own mask, so that a wrong one is seen."""

    def packed(self) -> bytes:
        """[KEYS_BYTES]."""
        return b"".join(self)

    @classmethod
    def unpacked(cls, data: bytes) -> SumKeys:
        """The opposite of `packed`."""
        return cls(data[:32], data[32:64], data[64:KEYS_BYTES])


class SumMember:
    """A member, from its keys to its answer.

    Args:
        number: among the members.
        context: what the sum is of: model, job, round, attempt; 32 bytes.
        least: members whose parts a sum has at least; more than half of all.
        shares: of how many members shares together open a sum; `least` if it is left out.
    """

    def __init__(self, number: int, context: bytes, least: int, shares: int | None = None) -> None:
        self.number, self._context, self._least = number, context, least
        self._needed = least if shares is None else shares
        self._seals, self._private = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(32)
        self._keys: Mapping[int, SumKeys] = {}
        self._shared: Mapping[int, bytes] = {}  # what was sealed for this one, by member
        self._answered = False

    def keys(self) -> SumKeys:
        """The first message."""
        seals, masks = (each.public_key().public_bytes_raw() for each in self._pairs)
        return SumKeys(seals, masks, seed_hash(self._seed))

    @property
    def _pairs(self) -> tuple[X25519PrivateKey, X25519PrivateKey]:
        return self._seals, self._private

    def shares(self, keys: Mapping[int, SumKeys]) -> dict[int, bytes]:
        """The second message: what is sealed for each other member.

        Args:
            keys: of all members that have told theirs.

        Raises:
            WorkerError: they are too few; or it has sealed its shares before.
        """
        check_enough(len(keys), self._least, "told their keys")
        if (
            self._shared or self._answered
        ):  # the same keys would seal others, and two of one key tell of both
            raise WorkerError(
                "the shares of a secure sum were to be sealed twice. Begin a new sum."
            )
        if not 2 * self._least > len(keys) or keys.get(self.number) != self.keys():
            raise WorkerError(
                f"a secure sum of {len(keys)} members with at least {self._least}: more than half "
                "are wanted, each with its own keys, or two sums could be opened apart."
            )
        self._keys = dict(keys)
        places = places_of(keys)
        of_key = split(self._private.private_bytes_raw(), len(keys), self._needed)
        of_seed = split(self._seed, len(keys), self._needed)
        found = {}
        for other, place in places.items():
            both = of_key[place - 1] + of_seed[place - 1]
            if other == self.number:
                self._shared = {other: both}
            else:
                sealed = ChaCha20Poly1305(self._seal_key(self.number, other))
                found[other] = sealed.encrypt(_NONCE, both, self._context)
        return found

    def pairs(self, keys: Mapping[int, SumKeys]) -> dict[int, Mask]:
        """Masks of this member's part for each other one, where nobody can drop out: they cancel,
        so nothing is shared or answered.

        Args:
            keys: of all members.

        Raises:
            WorkerError: they are too few; or it has sealed shares.
        """
        check_enough(len(keys), self._least, "told their keys")
        if self._shared or self._answered or keys.get(self.number) != self.keys():
            raise WorkerError("the keys of a secure sum were to be used twice. Begin a new sum.")
        self._answered, listed = True, list_digest(keys, keys)
        return {
            other: self._pair(keys[other], listed, other) for other in keys.keys() - {self.number}
        }

    def _pair(self, keys: SumKeys, listed: bytes, other: int) -> Mask:
        secret = self._private.exchange(_public(keys.masks))
        return pair_mask(secret, self._context, listed, self.number, other)

    def masks(self, sealed: Mapping[int, bytes]) -> dict[int, Mask]:
        """Masks of this member's part, by other member; its own by its own number.

        Args:
            sealed: for this one, by the members that have sent theirs.

        Raises:
            WorkerError: they are too few, or have another context.
        """
        check_enough(len(sealed.keys() | {self.number}), self._least, "sent their shares")
        others = {other: data for other, data in sealed.items() if other != self.number}
        try:
            opened = {
                other: ChaCha20Poly1305(self._seal_key(other, self.number)).decrypt(
                    _NONCE, data, self._context
                )
                for other, data in others.items()
            }
        except InvalidTag:
            raise WorkerError(
                "a secure sum is refused: what another participant has sealed cannot be opened. "
                "Some process has another model, job or list of participants. Resume the run."
            ) from None
        self._shared = {**self._shared, **opened}
        listed = list_digest(self._keys, self._shared)
        found = {self.number: Mask(own_key(self._seed, self._context), True)}
        for other in opened:
            found[other] = self._pair(self._keys[other], listed, other)
        return found

    def answer(self, come: Collection[int]) -> dict[int, bytes]:
        """The last message: a share for each member, of its seed or of its key.

        Args:
            come: members whose masked parts have come.

        Raises:
            WorkerError: they are too few, or strangers; or it has answered before.
        """
        check_enough(len(come), self._least, "have parts in it")
        if self._answered or not set(come) <= self._shared.keys():
            raise WorkerError(
                "a secure sum was to be opened twice, or with parts of strangers: the difference "
                "of two sums could be what one participant has given."
            )
        self._answered = True
        cut = {of: (both[:SHARE_BYTES], both[SHARE_BYTES:]) for of, both in self._shared.items()}
        return {of: seed if of in come else key for of, (key, seed) in cut.items()}

    def _seal_key(self, source: int, to: int) -> bytes:
        other = to if source == self.number else source
        secret = _extracted(self._seals.exchange(_public(self._keys[other].seals)), self._context)
        return derived(secret, "sealed share", source, to)


def places_of(members: Collection[int]) -> dict[int, int]:
    """Which share is whose, by member; from 1."""
    return {member: place for place, member in enumerate(sorted(members), 1)}


def check_enough(count: int, least: int, what: str) -> None:
    """Refuse to go on with too few.

    Raises:
        WorkerError: they are.
    """
    if count < least:
        raise WorkerError(
            f"a secure sum is refused: {count} participants {what}, and sync.options.least = "
            f"{least}. Nothing of them was revealed. Lower it, or have more participants."
        )


def list_digest(keys: Mapping[int, SumKeys], members: Collection[int]) -> bytes:
    """Digest of a list of members and their keys."""
    every = (str(each).encode() + b":" + keys[each].packed() for each in sorted(members))
    return hashlib.sha256(b"".join(every)).digest()


def seed_hash(seed: bytes) -> bytes:
    """Hash that a member tells of its seed; of 256 random bits it says nothing."""
    return hashlib.sha256(b"instep seed" + seed).digest()


def own_key(seed: bytes, context: bytes) -> bytes:
    """The key of a member's own mask."""
    return derived(seed, "own mask", context)


def pair_mask(secret: bytes, context: bytes, listed: bytes, of: int, other: int) -> Mask:
    """The mask that `of` has for `other`: the lower one adds it, the higher one takes it off."""
    pair = min(of, other), max(of, other)
    return Mask(derived(_extracted(secret, context), "pair mask", listed, *pair), of < other)


def _extracted(secret: bytes, context: bytes) -> bytes:
    """HKDF-Extract: a uniformly random key of what two have agreed on."""
    return hmac.new(context, secret, hashlib.sha256).digest()


def _public(data: bytes) -> X25519PublicKey:
    return X25519PublicKey.from_public_bytes(data)
