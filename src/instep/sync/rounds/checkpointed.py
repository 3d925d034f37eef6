"""What ranks carry, as tensors for a checkpoint, and back.

Each rank gives what it holds and zero for the rest, so that the sum over ranks is all of it. What
is left out has the parameters' shapes; what participants remember stands with the first parameter,
as the integers of its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from instep.records import Law
from instep.sync.rounds.carried import Carried, CarriedPiece, kept_of
from instep.sync.rounds.segments import Segments

LEFT, KEPT = "residual-", "optimizer-"


def laws_of(carried: Carried, left: Iterable[int]) -> dict[str, Law]:
    """Of what `tensors_of` gives."""
    residuals = (f"{LEFT}{of}" for of in sorted(left))
    kept = (f"{KEPT}{of}" for of in sorted(carried.lengths))
    return dict.fromkeys(["residual", *residuals, *kept], Law.SUM)


def tensors_of(
    carried: Carried,
    segments: Segments,
    parameters: Sequence[Tensor],
    left: Mapping[int, Iterable[int]],
    device: torch.device,
) -> dict[str, Tensor]:
    """What a rank holds, as `KIND/SLOT`.

    Args:
        left: by participant and `SUM` that leave something out: what stands in its place in pieces.
    """
    state = dict[str, Tensor]()
    for of, whats in sorted(left.items()):
        flat, those = torch.zeros(segments.length, dtype=torch.float32, device=device), set(whats)
        for piece, tensor in carried.held.items():
            if piece.of in those and carried.made.get(piece.of) == piece.commit:
                flat[piece.start : piece.stop] = tensor
        for slot, place in enumerate(segments.places):
            state[f"{LEFT}{of}/{slot}"] = flat[place].view(parameters[slot].shape).clone()
    for of, length in sorted(carried.lengths.items()):
        piece = CarriedPiece(kept_of(of), 0, length, carried.made[of])
        bits = torch.zeros(length, dtype=torch.int32, device=device)
        if piece in carried.held:
            bits.copy_(carried.held[piece].view(torch.int32))
        state[f"{KEPT}{of}/0"] = bits
    return state


def pieces_from(
    state: Mapping[str, Tensor],
    carried: Carried,
    segments: Segments,
    pieces: Callable[[int], Iterable[CarriedPiece]],
    device: torch.device,
) -> dict[CarriedPiece, Tensor]:
    """What `tensors_of` gave, summed over ranks.

    Args:
        pieces: of a participant or `SUM`, where what was left out lies.
    """
    held, flats = dict[CarriedPiece, Tensor](), dict[int, Tensor]()
    for name, tensor in state.items():
        kind, slot = name.split("/")
        if kind.startswith(KEPT):
            of = int(kind.removeprefix(KEPT))
            bits = tensor.to(device).view(torch.float32)
            held[CarriedPiece(kept_of(of), 0, len(bits), carried.made.get(of, 0))] = bits
            continue
        of = int(kind.removeprefix(LEFT))
        if of not in flats:
            flats[of] = torch.zeros(segments.length, dtype=torch.float32, device=device)
        flats[of][segments.places[int(slot)]] = tensor.flatten().to(device)
    for of, flat in flats.items():
        held |= {piece: flat[piece.start : piece.stop].clone() for piece in pieces(of)}
    return held
