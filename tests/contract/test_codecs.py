"""Every codec keeps the promises of `comm/codecs/base.py`; so does the one that the guide shows."""

import inspect
import itertools
import math
import re
from pathlib import Path

import pytest
import torch

from helpers import run_processes
from instep.comm.codecs import CODECS
from instep.comm.codecs import places as codec_places
from instep.comm.codecs.base import ALIGNED_BYTES, CUT
from instep.comm.codecs.short import Short
from instep.errors import SpecError
from instep.job.sync.tables import CODEC_ROWS

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/adding-a-codec.md"
SHOWN = "the one of the guide"
AT_RANDOM = ", at random"
OF_TABLE = (name for name in CODECS if hasattr(CODECS[name], "encode"))
NAMES = [*OF_TABLE, f"int8{AT_RANDOM}", f"int4{AT_RANDOM}", SHOWN]
COUNTS = [0, 1, 2, 3, 255, 256, 257, 1000, 4097, 140_001]
EPS = 2.0**-22
BLOCK = CODECS["int8"]().block


def codec_called(name, **options):
    if name.endswith(AT_RANDOM):
        return CODECS[name.removesuffix(AT_RANDOM)](rounding="random", **options)
    if name != SHOWN:
        return CODECS[name](**options)
    code, _ = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.M | re.S)
    shown = {}
    exec(compile(code, GUIDE.name, "exec"), shown)
    return shown["Float8"]()


@pytest.fixture(params=NAMES)
def codec(request):
    return codec_called(request.param)


def normal(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


LARGEST, SMALLEST = torch.finfo(torch.float32).max, 2.0**-149
KINDS = {
    "normal": normal,
    "of every size": lambda n: normal(n) * 10.0 ** (normal(n, 1) * 12).clamp(-36, 36),
    "zeros": torch.zeros,
    "the largest": lambda n: normal(n).sign() * LARGEST,
    "huge": lambda n: normal(n).clamp(-3, 3) * (LARGEST / 3),
    "tiny": lambda n: normal(n) * 1e-37,
    "subnormal": lambda n: (normal(n) * 100).round() * SMALLEST,
    "one spike": lambda n: torch.cat([torch.full((min(n, 1),), 1e30), normal(max(n - 1, 0))]),
}


def encoded(codec, values, key=7, left=None, filled=0):
    """The payload, cut to what was written."""
    out = torch.full((codec.size(values.numel()),), filled, dtype=torch.uint8)
    return out[: codec.encode(values, out, key=key, left=left)]


def decoded(codec, payload, count):
    codec.add_into(total := torch.zeros(count), payload)
    return total


def bits(tensor):
    return tensor.numpy().tobytes()


def test_a_payload_has_at_most_the_size_that_was_said(codec):
    for count in COUNTS:
        used = encoded(codec, normal(count)).numel()
        assert used <= codec.size(count)
        assert used == codec.size(count) or not codec.fixed_size
        assert codec.size(0) == 0
        assert codec.size(count) <= codec.size(count + 1)


def test_what_is_decoded_and_what_is_left_make_up_the_values(codec):
    for kind, count in itertools.product(KINDS, COUNTS):
        values, left = KINDS[kind](count), torch.full((count,), torch.nan)
        got = decoded(codec, encoded(codec, values, left=left), count)
        assert got.isfinite().all()
        assert left.isfinite().all()
        off = (got.double() + left.double() - values.double()).abs()
        assert (off <= EPS * (got.double().abs() + left.double().abs()) + SMALLEST).all()
        assert codec.unbiased or left.double().norm() <= values.double().norm()


def test_zeros_are_decoded_to_zeros_and_leave_nothing(codec):
    for count in COUNTS:
        left = torch.ones(count)
        got = decoded(codec, encoded(codec, torch.zeros(count), left=left), count)
        assert not got.any()
        assert not left.any()


def contraction(name, values):
    """What may be left of normal values at most, as a share of their square: 1 - delta."""
    if name in ("sign", "top_k"):  # of each chunk, the mean magnitude, or the largest values
        chunk = 1024 if name == "sign" else CUT
        kept = 0.0
        for part in values.double().split(chunk):
            size = part.abs()
            largest = size.topk(math.ceil(0.01 * len(part))).values
            kept += float(size.sum() ** 2 / len(part) if name == "sign" else largest.square().sum())
        return 1 - 0.99 * kept / float(values.double().square().sum())
    return {"bfloat16": 2.0**-16, "float16": 2.0**-22, "int8": 1e-3, "int4": 0.03}[name]


@pytest.mark.parametrize("name", ["bfloat16", "float16", "int8", "int4", "sign", "top_k"])
def test_a_codec_with_error_feedback_leaves_less_than_there_was(name):
    """Contraction: then error feedback converges (Karimireddy et al. 2019)."""
    for count in COUNTS[1:]:
        values, left = normal(count), torch.empty(count)
        encoded(codec_called(name), values, left=left)
        most = contraction(name, values) * float(values.double().square().sum())
        assert float(left.double().square().sum()) <= most * (1 + 1e-5) + 1e-12


def test_without_room_for_what_is_left_the_payload_is_the_same(codec):
    for count in COUNTS:
        values = normal(count)
        with_room = encoded(codec, values, left=torch.empty(count))
        assert torch.equal(with_room, encoded(codec, values))


def test_nothing_is_written_but_the_payload_and_what_is_left(codec):
    for count in COUNTS:
        size = codec.size(count)
        out = torch.full((size + 3 * ALIGNED_BYTES,), 77, dtype=torch.uint8)
        room = torch.full((count + 2,), 5.0)
        values, before = normal(count), normal(count)
        used = codec.encode(values, out[ALIGNED_BYTES:], key=1, left=room[1 : count + 1])
        assert torch.equal(values, before)
        assert room[0] == room[-1] == 5.0
        outside = torch.cat([out[:ALIGNED_BYTES], out[ALIGNED_BYTES + used :]])
        assert (outside == 77).all()
        payload, total = out.clone(), torch.full((count + 2,), 5.0)
        codec.add_into(total[1 : count + 1], out[ALIGNED_BYTES : ALIGNED_BYTES + used])
        assert torch.equal(out, payload)
        assert total[0] == total[-1] == 5.0


def test_equal_values_and_keys_give_equal_bytes_wherever_they_lie(codec):
    for count in COUNTS:
        values, shifted = normal(count), torch.empty(count + 1)[1:]
        shifted.copy_(values)
        first = encoded(codec, values, key=3)
        assert torch.equal(first, encoded(codec, shifted, key=3, filled=255))


def test_a_payload_is_added_with_its_weight(codec):
    for weight, count in itertools.product((1.0, 0.0, 0.3, -2.0), COUNTS):
        payload, total = encoded(codec, normal(count)), normal(count, 1)
        wanted = total.double() + weight * decoded(codec, payload, count).double()
        codec.add_into(total, payload, weight)
        torch.testing.assert_close(total.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_never_decoded_to_a_number_nor_left_for_the_next_step(codec, bad):
    for count, at in ((1, 0), (2, 1), (257, 256), (1000, 300), (1000, 999), (4097, 4096)):
        values, left = normal(count), torch.empty(count)
        values[at] = bad
        got = decoded(codec, encoded(codec, values, left=left), count)
        assert not got[at].isfinite()
        assert left.isfinite().all()
        sound = got.isfinite()
        torch.testing.assert_close((got + left)[sound], values[sound])
        assert encoded(codec, values).equal(encoded(codec, values, filled=9))


def test_with_error_feedback_nothing_is_lost_over_hundreds_of_steps(codec):
    count = 3 * BLOCK + 5
    left, room = torch.zeros(count), torch.empty(count)
    given, got = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    for step in range(200):
        fresh = torch.randn(count, generator=generator) + 0.5
        given += fresh
        fresh += left
        payload = encoded(codec, fresh, key=step, left=room)
        left, room = room, left
        got += decoded(codec, payload, count)
    torch.testing.assert_close(got + left, given, rtol=0, atol=200 * EPS)


def test_a_linear_codecs_payloads_may_be_summed(codec):
    if not codec.linear:
        pytest.skip("it does not say so")
    one, other = (encoded(codec, normal(1000, seed)) for seed in (0, 1))
    both = decoded(codec, one, 1000) + decoded(codec, other, 1000)
    summed = (one.view(torch.float32) + other.view(torch.float32)).view(torch.uint8)
    torch.testing.assert_close(decoded(codec, summed, 1000), both)


def test_a_segmentable_codecs_values_may_be_cut(codec):
    if not codec.segmentable:
        pytest.skip("it does not say so")
    values = KINDS["of every size"](3 * CUT + 100)
    whole = decoded(codec, encoded(codec, values), values.numel())
    at_random = codec.unbiased and hasattr(codec, "block")
    for cut in (CUT, 2 * CUT):
        parts = [decoded(codec, encoded(codec, p), p.numel()) for p in values.tensor_split([cut])]
        if at_random:  # then to the same levels, or those beside them
            blocks = [torch.cat(parts).split(codec.block), whole.split(codec.block)]
            for one, other, given in zip(*blocks, values.split(codec.block), strict=True):
                near = 1e-5 if codec.scale_type == torch.float32 else 2.0**-7
                assert (one - other).abs().max() <= given.abs().max() / codec.top * (1 + near)
        else:
            assert bits(torch.cat(parts)) == bits(whole)


def test_the_mean_over_the_keys_of_an_unbiased_codec_is_what_was_encoded(codec):
    if not codec.unbiased:
        pytest.skip("it does not say so")
    values, keys = normal(500), 256
    each = torch.stack(
        [decoded(codec, encoded(codec, values, key=key), 500).double() for key in range(keys)]
    )
    off, deviation = (each.mean(0) - values).abs(), each.std(0)
    rare = deviation.max() / keys**0.5  # what is drawn once in many keys may not be among them
    assert (off <= 6 * (deviation + 2 * rare) / keys**0.5 + 1e-6).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounding_at_random_draws_anew_for_each_value_key_and_seed(name):
    """Errors have the variance of a draw between two levels, and tell nothing of each other."""
    count, values = 64 * 1024, normal(64 * 1024).clamp(-3, 3)
    values[:: CODECS[name]().block] = 4.0  # in each block, so that all have one scale
    level = 4.0 / CODECS[name]().top
    above = (values.double() / level) % 1
    deviation = (above * (1 - above)).sqrt()
    drawn = (deviation > 0.01).nonzero().flatten()

    def errors(key, seed=0):
        codec = codec_called(f"{name}{AT_RANDOM}", seed=seed)
        got = decoded(codec, encoded(codec, values, key=key), count).double()
        return ((got - values) / level / deviation)[drawn]

    one = errors(7)
    near = 5 / len(drawn) ** 0.5
    assert abs(one.mean()) < near
    assert abs(one.square().mean() - 1) < 10 * near
    assert torch.equal(one, errors(7))
    others = [errors(8), errors(7 + (1 << 32)), errors(7, seed=1), one.roll(1), one.roll(1024)]
    for other in others:
        assert abs((one * other).mean()) < near


@pytest.mark.parametrize("rounding", ["stochastic", True, None])
def test_a_rounding_that_does_not_exist_is_refused(rounding):
    with pytest.raises(SpecError, match="needs to be 'nearest' or 'random'"):
        CODECS["int8"](rounding=rounding)


def sent_and_read(comm, names):
    """Rank 0 encodes and sends; what each rank reads."""
    read = []
    for name in names:
        codec = codec_called(name)
        payload = torch.empty(codec.size(1000), dtype=torch.uint8)
        if comm.rank == 0:
            used = torch.tensor([codec.encode(normal(1000), payload, key=1)])
            comm.send(used, 1).wait()
            comm.send(payload, 1).wait()
        else:
            comm.receive(used := torch.zeros(1, dtype=torch.int64), 0).wait()
            comm.receive(payload, 0).wait()
        read.append(bits(decoded(codec, payload[: int(used)], 1000)))
    return read


@pytest.mark.process
def test_another_process_decodes_the_same_bits(tmp_path):
    sender, receiver = run_processes(2, sent_and_read, tmp_path, NAMES)
    assert sender == receiver


@pytest.mark.grid
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("tiny", "subnormal")])
@pytest.mark.parametrize(
    ("name", "block", "top", "near"), [("int8", BLOCK, 127, 1e-5), ("int4", 64, 7, 2.0**-7)]
)
def test_a_value_is_off_by_half_a_level_of_its_block_at_most(name, block, top, near, kind):
    for count in COUNTS[1:]:
        codec, values = CODECS[name](block=block), KINDS[kind](count)
        got = decoded(codec, encoded(codec, values), count)
        for part, back in zip(values.double().split(block), got.double().split(block), strict=True):
            assert (back - part).abs().max() <= part.abs().max() / (2 * top) * (1 + near)


def test_int8_is_four_times_smaller_but_for_a_scale_in_each_block():
    size = CODECS["int8"]().size
    assert [size(n) for n in (0, 1, 1024, 1025)] == [0, 5, 1028, 1033]


@pytest.mark.parametrize(
    ("name", "bits", "smaller"),
    [
        ("bfloat16", 16, 2),
        ("float16", 16, 2),
        ("int8", 8, 3.98),
        ("int4", 4, 7.52),
        ("sign", 1, 31),
    ],
)
def test_a_codec_is_as_much_smaller_as_its_bits_but_for_the_scales(name, bits, smaller):
    codec = CODECS[name]()
    scales = 8 * codec.scale_type.itemsize / codec.block if hasattr(codec, "block") else 0
    assert codec.size(1 << 20) == (1 << 20) * (bits + scales) / 8
    assert 4 * (1 << 20) / codec.size(1 << 20) >= smaller


def test_a_sign_stands_for_the_mean_magnitude_of_its_block():
    values = torch.tensor([3.0, -1.0, 0.0, 8.0] + 12 * [0.0] + 16 * [0.0] + [-2.0])
    codec = CODECS["sign"](block=16)
    got = decoded(codec, encoded(codec, values), 33)
    assert got.tolist() == [0.75, -0.75] + 14 * [0.75] + 16 * [0.0] + [-2.0]


@pytest.mark.grid
@pytest.mark.parametrize("block", [16, 1024, CUT])
@pytest.mark.parametrize("name", ["int8", "int4", "sign", f"int8{AT_RANDOM}", f"int4{AT_RANDOM}"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_loops_do_what_torchs_operations_do(name, block, kind):
    codec = codec_called(name, block=block)
    for count in COUNTS:
        values, left = KINDS[kind](count), torch.empty(count)
        values[7::1001] = torch.nan
        payload = encoded(codec, values, left=left)
        scales, packed = codec._parts(payload, count)
        for piece, blocks, places in codec._pieces(count):
            rows = values[piece].view(-1, min(block, values[piece].numel()))
            wanted, levels, rest = codec.coded(rows, 7, piece.start)
            near = 2.0**-23 if name == "sign" else 0.0  # of a mean, which is summed in any order
            torch.testing.assert_close(
                scales[blocks].float(), wanted.flatten(), rtol=near, atol=0.0, equal_nan=True
            )
            assert torch.equal(packed[places], levels)
            # where torch rounds once and the loop twice
            near = 2e-7 * rows.abs().nan_to_num(0.0)
            assert ((left[piece].view_as(rest) - rest).abs() <= near).all()
            total = torch.ones(rows.numel())
            wanted = 1 + codec.levels(levels, total.numel()).view_as(rows) * wanted
            codec.add_into(total, torch.cat([scales[blocks].view(torch.uint8), packed[places]]))
            torch.testing.assert_close(total, wanted.flatten(), equal_nan=True, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", [*NAMES, "int4"])
def test_a_codec_does_not_follow_the_default_type_of_torch(name):
    values = normal(1000)
    wanted = bits(encoded(codec_called(name), values))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert bits(encoded(codec_called(name), values)) == wanted
    finally:
        torch.set_default_dtype(torch.float32)


def of_float16(count):
    """Each float16 there is, and what lies between two: in the middle, and beside that."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).float()
    every = every[every.isfinite()].sort().values
    middle = (every[1:] + every[:-1]) / 2
    beside = [middle.nextafter(torch.tensor(far)) for far in (-torch.inf, torch.inf)]
    edge = torch.tensor([65519.996, 65520.0, 65535.0, -65520.0, 65536.0, 2.0**-25, -(2.0**-25)])
    return torch.cat([edge, *beside, middle, every])[:count].contiguous()


@pytest.mark.grid
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", [*KINDS, "in the range of float16"])
def test_compiled_16_bit_numbers_are_those_of_torch(name, kind):
    codec = CODECS[name]()
    for count in COUNTS:
        kinds = {**KINDS, "in the range of float16": of_float16}
        values, left, rest = kinds[kind](count), torch.empty(count), torch.empty(count)
        values[7::1001] = torch.nan
        values[8::1001] = -torch.inf
        payload, wanted = (
            encoded(codec, values, left=left),
            torch.empty(2 * count, dtype=torch.uint8),
        )
        Short.encode(codec, values, wanted, key=1, left=rest)
        assert bits(left) == bits(rest)
        short, wanted = payload.view(codec.dtype), wanted.view(codec.dtype)
        torch.testing.assert_close(short, wanted, rtol=0, atol=0, equal_nan=True)
        totals = torch.ones(count), torch.ones(count)
        codec.add_into(totals[0], payload, 0.3)
        Short.add_into(codec, totals[1], payload, 0.3)
        torch.testing.assert_close(*totals, rtol=3e-7, atol=1e-7, equal_nan=True)


@pytest.mark.grid
@pytest.mark.parametrize("block", [0, 8, 1000, 8192, 16.0, True, "64"])
@pytest.mark.parametrize("name", ["int8", "int4", "sign"])
def test_a_block_that_cannot_be_is_refused(name, block):
    with pytest.raises(SpecError, match=r"codec_options.block = .*needs a power of two from 16"):
        CODECS[name](block=block)


def test_int8_loses_no_block_but_the_one_that_is_not_finite():
    codec, values = CODECS["int8"](), normal(3 * BLOCK)
    values[BLOCK + 5] = torch.inf
    got = decoded(codec, encoded(codec, values), 3 * BLOCK).view(3, BLOCK)
    assert got.isnan().all(1).tolist() == [False, True, False]
    assert got[::2].isfinite().all()


def test_top_k_needs_17_bits_for_each_value_that_it_sends():
    codec, count = CODECS["top_k"](), 100 * CUT
    payload = encoded(codec, normal(count))
    assert 8 * payload.numel() / int(decoded(codec, payload, count).count_nonzero()) <= 17


@pytest.mark.parametrize("density", [1 / CUT, 0.003, 0.01, 0.3, 1])
def test_top_k_sends_the_largest_and_leaves_the_others_as_they_are(density):
    codec, values = CODECS["top_k"](density=density), normal(3 * CUT + 700)
    left = torch.empty(values.numel())
    got = decoded(codec, encoded(codec, values, left=left), values.numel())
    for part, back, rest in zip(*(v.split(CUT) for v in (values, got, left)), strict=True):
        count = codec.chosen(part.numel())
        assert count == -int(-density * part.numel() // 1)
        largest = part.abs().topk(count).indices
        sent = torch.zeros(part.numel(), dtype=torch.bool)
        sent[largest] = True
        assert torch.equal(rest[~sent], part[~sent])
        assert not back[~sent].any()
        near = 1.01 * part.abs().max() / (2 * 127)
        assert (back[sent] - part[sent]).abs().max() <= near


@pytest.mark.grid
@pytest.mark.parametrize("density", [1 / CUT, 0.003, 0.01, 0.3, 1])
@pytest.mark.parametrize("kind", [*KINDS, "many alike"])
def test_compiled_top_k_is_that_of_torchs_operations(kind, density):
    codec = CODECS["top_k"](density=density)
    for count in [n for n in COUNTS if n < 100_000] + [5 * CUT + 9]:
        values = normal(count).round() if kind == "many alike" else KINDS[kind](count)
        values[3 * CUT + 5 :: 2000] = torch.nan
        left, total, wanted = torch.empty(count), torch.ones(count), torch.ones(count)
        payload = encoded(codec, values, left=left)
        codec.add_into(total, payload, 0.3)
        for part in codec._parts(count):
            scales, levels, places = part.of(payload)
            found = codec.coded(values[part.values].view(-1, part.width))
            near = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(scales.view(torch.bfloat16), found.scales, **near)
            assert torch.equal(levels, found.levels.flatten())
            packed = codec_places.packed(found.places, part.width, codec.low)
            assert torch.equal(places, packed.flatten())
            read = codec_places.unpacked(packed, part.chosen, codec.low)
            assert torch.equal(read, found.places)
            assert torch.equal(left[part.values], found.left.flatten())
            codec.add_in_torch(part, wanted, payload, 0.3)
        torch.testing.assert_close(total, wanted, equal_nan=True, rtol=3e-7, atol=0)


@pytest.mark.parametrize("density", [0, 0.0002, 1.01, True, "0.1", float("nan")])
def test_a_density_that_cannot_be_is_refused(density):
    with pytest.raises(SpecError, match=r"codec_options.density = .*needs a number from 1/4096"):
        CODECS["top_k"](density=density)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.2])
def test_nonzero_packs_places_near_their_entropy(density):
    count = 200_000
    values = normal(count) * (
        torch.rand(count, generator=torch.Generator().manual_seed(1)) < density
    )
    payload, sent = encoded(CODECS["nonzero"](), values), int(values.count_nonzero())
    assert torch.equal(decoded(CODECS["nonzero"](), payload, count), values)
    share = torch.tensor(sent / count, dtype=torch.float64)
    entropy = -(share * share.log2() + (1 - share) * (1 - share).log2()) / share
    assert 8 * (payload.numel() - 8) / sent - 32 <= entropy + 0.7
    places = values.nonzero().flatten()
    low = (count // sent).bit_length() - 1
    packed = codec_places.packed(places.unsqueeze(0), count, low)[0]
    assert torch.equal(payload[8 + 4 * sent :], packed)
    assert torch.equal(codec_places.unpacked(packed.unsqueeze(0), sent, low)[0], places)


@pytest.mark.parametrize("name", CODECS)
def test_the_options_in_the_row_of_a_codec_are_those_that_it_takes(name):
    known = inspect.signature(CODECS[name]).parameters.values()
    assert CODEC_ROWS[name].options == {p.name: p.default for p in known if p.name != "seed"}
