"""State is packed into tensors and JSON, and unpacked unchanged."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from instep.errors import CheckpointError
from instep.state.packing import pack_state, unpack_state
from instep.state.snapshot import model_tensors, parameters_sha256, tied_names


def through_json(state):
    tensors, skeleton = pack_state(state)
    text = json.dumps(skeleton, allow_nan=False)
    return unpack_state(tensors, json.loads(text))


def same(a, b):
    """Equal in value and in type, all the way down; nan equals nan, -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(max_size=5),
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.integers(-128, 127).map(np.int8),
    st.booleans().map(np.bool_),
)
tensors = st.sampled_from(
    [
        torch.tensor(1.5),
        torch.tensor(float("nan")),
        torch.zeros(0, 3),
        torch.arange(6, dtype=torch.int64).view(2, 3),
        torch.tensor([True, False]),
        torch.tensor([1.0, -0.0, math.inf], dtype=torch.bfloat16),
    ]
)
keys = st.one_of(st.text(max_size=3), st.integers(), st.none(), st.booleans(), st.floats(-2, 2))
states = st.recursive(
    scalars | tensors,
    lambda part: st.one_of(
        st.lists(part, max_size=4),
        st.lists(part, max_size=4).map(tuple),
        st.dictionaries(keys, part, max_size=4),
        st.dictionaries(st.text(max_size=3), part, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(states)
def test_any_nested_state_comes_back_with_its_values_and_types(state):
    assert same(through_json(state), state)


@settings(max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda part: st.one_of(
            st.lists(part, max_size=3),
            st.dictionaries(
                st.sampled_from(["tuple", "dict", "Counter", "int", "float", "numpy", "tensor"]),
                part,
                max_size=2,
            ),
        ),
        max_leaves=8,
    )
)
def test_made_up_skeletons_give_a_state_or_a_checkpoint_error(skeleton):
    try:
        unpack_state({}, skeleton)
    except CheckpointError:
        pass


@pytest.mark.parametrize(
    "skeleton",
    [
        {"numpy": ["<f8", "zz"]},
        {"numpy": ["O", "00"]},
        {"numpy": "a"},
        {"numpy": ["a1", "00"]},
        {"numpy": [1, "00"]},
        {"numpy": ["<f8", "00" * 16]},
        {"int": "twelve"},
        {"float": "0.1"},
        {"set": []},
        {"dict": [[[1], 2]]},
        {"dict": [1]},
        {"Counter": "ab"},
        {"tensor": "nowhere"},
        {"tuple": [], "list": []},
        {},
    ],
)
def test_a_skeleton_that_pack_state_never_writes_is_refused(skeleton):
    with pytest.raises(CheckpointError):
        unpack_state({}, skeleton)


def test_tensors_without_a_place_are_refused():
    packed, skeleton = pack_state({"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no place for 1 of its tensors, 'b'"):
        unpack_state(packed | {"b": torch.ones(1)}, skeleton)


def test_places_with_one_name_keep_apart():
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 0: torch.tensor(3)}
    state |= {"0": torch.tensor(4), "__metadata__": torch.tensor(5)}
    assert same(through_json(state), state)
    assert "__metadata__" not in pack_state(state)[0]


@pytest.mark.parametrize(
    ("thing", "named"),
    [
        (lambda: 0, "function"),
        ({1, 2}, "set"),
        (np.zeros(3), "numpy.ndarray"),
        (1j, "complex"),
        (torch.float32, "torch.dtype"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.ones(2, device="meta"), "meta"),
        ({(1, 2): 3}, "tuple as a key"),
    ],
)
def test_what_cannot_be_kept_is_named_with_its_place(thing, named):
    with pytest.raises(CheckpointError) as caught:
        pack_state({"param_groups": [{"lr": 0.1}, {"odd": thing}]})
    assert "state['param_groups'][1]['odd']" in str(caught.value)
    assert named in str(caught.value)


def test_a_state_that_holds_itself_is_refused():
    state = []
    state.append(state)
    with pytest.raises(CheckpointError, match="deeper"):
        pack_state(state)


def train(model, optimizer, scheduler, steps):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=generator)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.detach())
        elif scheduler:
            scheduler.step()


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.9), amsgrad=True),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-1, max_iter=3),
    "rmsprop, lr a tensor": lambda p: torch.optim.RMSprop(p, lr=torch.tensor(1e-2)),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_restored_optimizer_continues_bit_for_bit(make):
    model = small_model()
    optimizer = make(model.parameters())
    train(model, optimizer, None, 3)
    state = through_json(optimizer.state_dict())
    assert same(state, optimizer.state_dict())
    twin = small_model()
    twin.load_state_dict(model.state_dict())
    other = make(twin.parameters())
    # load_state_dict may keep the tensors it is given, as the original's they would be shared
    other.load_state_dict(
        unpack_state({k: t.clone() for k, t in pack_state(state)[0].items()}, pack_state(state)[1])
    )
    train(model, optimizer, None, 3)
    train(twin, other, None, 3)
    assert parameters_sha256(twin) == parameters_sha256(model)


schedules = torch.optim.lr_scheduler
SCHEDULERS = {
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 10),
    "multi step": lambda o: schedules.MultiStepLR(o, [2, 4]),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "lambda that gives numpy": lambda o: schedules.LambdaLR(o, lambda s: np.cos(s / 100)),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)], milestones=[2]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_comes_back_exactly(make):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    train(model, optimizer, scheduler, 3)
    state = through_json(scheduler.state_dict())
    assert same(state, scheduler.state_dict())
    make(optimizer).load_state_dict(state)


def test_a_counter_stays_a_counter():
    assert same(through_json(Counter([2, 4, 4])), Counter([2, 4, 4]))


def test_a_grad_scaler_comes_back_exactly():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    scaler.scale(torch.ones(1))
    assert same(through_json(scaler.state_dict()), scaler.state_dict())
    assert scaler.state_dict()["scale"] == 2.0**40


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.ones(2), persistent=False)


def test_model_tensors_are_the_state_dict_and_ties_show():
    tensors = model_tensors(Tied())
    assert list(tensors) == ["count", "embedding.weight", "head.weight"]
    assert tied_names(tensors) == {"head.weight": "embedding.weight"}


def test_views_of_one_memory_that_differ_are_not_tied():
    whole = torch.arange(6.0)
    parts = {"whole": whole, "half": whole[:3], "square": whole.view(2, 3), "empty": whole[:0]}
    assert tied_names(parts | {"none": whole[:0]}) == {}


def test_extra_state_that_is_no_tensor_is_refused():
    class Odd(nn.Module):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(CheckpointError, match="_extra_state of the model is a dict"):
        model_tensors(Odd())


def test_the_hash_is_over_little_endian_bytes_in_order_of_names():
    model = nn.Module()
    model.register_parameter("b", nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T))
    model.register_buffer("a", torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    model.register_buffer("c", torch.tensor(258))
    by_hand = bytes.fromhex("803f00c0") + np.array([1, 3, 2, 4], "<f4").tobytes()
    by_hand += (258).to_bytes(8, "little")
    assert parameters_sha256(model) == hashlib.sha256(by_hand).hexdigest()


def test_the_hash_of_tied_weights_counts_each_name():
    model = Tied()
    loose = Tied()
    loose.head.weight = nn.Parameter(model.head.weight.detach().clone())
    loose.embedding.weight = nn.Parameter(model.embedding.weight.detach().clone())
    assert parameters_sha256(loose) == parameters_sha256(model)
