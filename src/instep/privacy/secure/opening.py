"""Opening of a sum, by whoever adds up: finds the masks that are left in it.

It needs no secret but those that members answer with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from instep.errors import WorkerError
from instep.privacy.secure.masks import Mask
from instep.privacy.secure.members import (
    SumKeys,
    check_enough,
    list_digest,
    own_key,
    pair_mask,
    places_of,
    seed_hash,
)
from instep.privacy.secure.shamir import join


def masks_left(
    keys: Mapping[int, SumKeys],
    shared: Collection[int],
    come: Collection[int],
    answers: Mapping[int, Mapping[int, bytes]],
    *,
    least: int,
    context: bytes,
    needed: int | None = None,
) -> list[Mask]:
    """Find what to apply to the sum of the masked parts, so that it is the sum of the parts.

    Args:
        keys: of all members that have told theirs.
        shared: members that have sent their shares.
        come: those of them whose parts are in the sum.
        answers: by member that has answered, the share that it gives for each.
        least, context: as for `SumMember`.
        needed: what the members were given as `shares`.

    Raises:
        WorkerError: they are too few, or what they gave is not what they had promised.
    """
    check_enough(len(come), least, "have parts in it")
    needed = least if needed is None else needed
    check_enough(len(answers), needed, "answered")
    places, listed, found = places_of(keys), list_digest(keys, shared), list[Mask]()
    for member in sorted(shared):
        some = sorted(answers)[:needed]
        secret = join({places[each]: answers[each][member] for each in some})
        if secret is None:
            raise _wrong(member)
        if member in come:
            if seed_hash(secret) != keys[member].seed:
                raise _wrong(member)
            found.append(Mask(own_key(secret, context), False))
            continue
        private = X25519PrivateKey.from_private_bytes(secret)
        if private.public_key().public_bytes_raw() != keys[member].masks:
            raise _wrong(member)
        for other in sorted(come):  # each has its mask for this one in the sum
            both = private.exchange(X25519PublicKey.from_public_bytes(keys[other].masks))
            found.append(pair_mask(both, context, listed, other, member).opposite())
    return found


def _wrong(member: int) -> WorkerError:
    return WorkerError(
        f"a secure sum cannot be opened: the shares of participant {member} do not give what it "
        "had promised. Some process has another model, job or list of participants."
    )
