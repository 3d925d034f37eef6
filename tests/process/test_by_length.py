"""Batches by length in whole runs, against a plain PyTorch loop over the planned samples."""

import by_length
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from started import RECIPES

import instep
from instep.cli import main
from instep.data.lengths import ByLength
from instep.data.order import Order
from instep.errors import RecipeError, SpecError
from instep.store.run_folder import RunFolder
from marks import tail

pytestmark = pytest.mark.process

SEED, TOKENS, WINDOW, EPOCHS, PARTS = 5, 60, 40, 2, 4
LENGTHS = np.array(by_length.lengths())
TRAIN = {"epochs": EPOCHS, "tokens_per_batch": TOKENS, "micro_batches": PARTS, "merge": "never"}


def trained(folder, workers, *, arguments=None, **changes):
    run = instep.train(
        f"{RECIPES / 'by_length.py'}:recipe",
        name=f"on-{workers}",
        runs=folder,
        workers=workers,
        seed=SEED,
        quiet=True,
        arguments=arguments or {},
        check={"content": "all"},
        **{"train": TRAIN, **changes, "data": {"window": WINDOW, **changes.get("data", {})}},
    )
    return run.path


def planned(**changes):
    given = {"window": WINDOW, "seed": SEED, "micro_batches": PARTS, "tokens": TOKENS, **changes}
    return ByLength(Order(len(LENGTHS), SEED), len(LENGTHS), lambda i: LENGTHS[i], **given)


def plain(order):
    """One process, each batch whole and padded to its longest, the mean over its tokens."""
    rows, net = by_length.Sequences(), by_length.model()
    optimizer = by_length.optimizer(net.parameters())
    for epoch in range(EPOCHS):
        for number in range(order.steps):
            chosen = order.indices(*order.of(epoch, number)).tolist()
            found = by_length.compute_loss(net, by_length.collate([rows[n] for n in chosen]))
            optimizer.zero_grad()
            (found.total / found.weight).backward()
            optimizer.step()
    return net.state_dict()


def assert_same(run, wanted, *, within=1e-9):
    found = load_file(run / "model.safetensors")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=within)


@pytest.mark.parametrize("workers", [2, tail(1), tail(3)])
def test_a_run_by_tokens_is_a_plain_loop_over_its_batches(tmp_path, workers, capsys):
    run, order = trained(tmp_path, workers), planned()
    assert_same(run, plain(order))
    assert main(["audit", str(run), "--content", "--json"]) == 0
    folder = RunFolder(run)
    assert folder.audit.exact
    assert folder.same_as_one_machine == "yes"
    assert folder.last_step == EPOCHS * order.steps
    assert folder.last("data_lengths")["padding"] == pytest.approx(order.padding(0))


@pytest.mark.tail
def test_a_stopped_run_goes_on_with_the_next_batch_at_another_size(tmp_path, capsys):
    longer = tmp_path / "longer"
    train = {**TRAIN, "stop_after_steps": 4}
    run = trained(tmp_path, 2, train=train, arguments={"longer": str(longer)})
    longer.touch()
    assert main(["resume", str(run), "--workers", "3"]) != 0
    assert "other lengths than when the run was started" in capsys.readouterr().err
    longer.unlink()
    assert main(["resume", str(run), "--workers", "3"]) == 0
    assert_same(run, plain(planned()))
    assert RunFolder(run).audit.exact


def test_a_batch_sampler_by_length_is_taken_for_what_it_means(tmp_path):
    train = {"epochs": EPOCHS, "global_batch": 9, "micro_batches": PARTS}
    run = trained(tmp_path, 2, train=train, arguments={"sampler": "buckets"})
    folder = RunFolder(run)
    assert_same(run, plain(planned(tokens=None, batch=9)))
    assert folder.last("data_lengths")["sampler"] == "Buckets"
    assert folder.same_as_one_machine == "yes"
    assert not [each for each in folder.named("warning") if "batch_sampler" in each["text"]]


def test_a_subset_is_said_and_so_is_what_becomes_of_the_last_batch(tmp_path):
    folder = RunFolder(trained(tmp_path, 1, arguments={"sampler": "subset"}))
    assert folder.last("samples_chosen")["text"].startswith("the 42 of 83 samples that its Subset")
    said = [each["text"] for each in folder.named("warning")]
    assert [text for text in said if "drop_last = True, which is not used: no sample" in text]
    assert [text for text in said if "train.tokens_per_batch = 60 says how many" in text]
    chosen = LENGTHS[::2]
    order = ByLength(
        Order(42, SEED),
        42,
        lambda indices: chosen[indices],
        window=WINDOW,
        seed=SEED,
        micro_batches=PARTS,
        tokens=TOKENS,
    )
    assert folder.last("data_lengths")["digest"] == order.digest
    assert folder.audit.exact


def test_what_tokens_do_not_go_with_is_refused_in_a_sentence(tmp_path):
    averaging = {"name": "averaging", "participants": 2, "options": {"local_steps": 2}}
    with pytest.raises(SpecError, match=r"'dataset' does not go with train\.tokens_per_batch = 60"):
        trained(tmp_path, 1, data={"order": "dataset"})
    with pytest.raises(SpecError, match=r"'averaging' does not go with train\.tokens_per_batch"):
        trained(tmp_path, 1, sync=averaging)
    with pytest.raises(RecipeError, match=r"needs to know how long samples are: set data\.length"):
        trained(tmp_path, 1, arguments={"sampler": "none"})
