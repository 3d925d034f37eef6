"""Losses over the global batch: gradients of cached embeddings are those of one plain pass."""

import copy
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers import run_processes
from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks
from instep.data.dealing import deal
from instep.errors import PeerError, RecipeError
from instep.parallel.global_batch.batch_norm import make_global
from instep.parallel.global_batch.cached import CachedGradients, of_one_pass, probe

SIZES = (3, 2, 3, 2)
"""Samples of each micro-batch."""
BATCH = sum(SIZES)
Views = namedtuple("Views", "image text")


class Towers(nn.Module):
    """Two towers and a temperature that is learnt, as CLIP has."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.text = nn.Linear(4, 5)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("calls", torch.zeros(()))


def embed_pairs(model, batch):
    image, text, _ = batch
    model.calls.add_(1)
    views = model.image(image), model.text(text)
    return Views(*(functional.normalize(view, dim=1) for view in views)), None


def clip(model, embeddings, targets):
    """Contrast of each image with all texts, and of each text with all images."""
    assert targets is None
    logits = embeddings.image @ embeddings.text.T * model.temperature.exp()
    labels = torch.arange(len(logits))
    return (
        functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)
    ) / 2


def embed_labelled(model, batch):
    image, _, label = batch
    return {"z": functional.normalize(model.image(image), dim=1)}, {
        "label": label,
        "odd": label > 1,
    }


def triplets(model, embeddings, targets):
    """The mean over all triplets of the batch."""
    gaps = torch.cdist(embeddings["z"], embeddings["z"])
    same = targets["label"][:, None] == targets["label"][None]
    valid = (same & ~torch.eye(len(same), dtype=torch.bool))[:, :, None] & ~same[:, None]
    return functional.relu(gaps[:, :, None] - gaps[:, None] + 0.5)[valid].mean()


def supervised(model, embeddings, targets):
    """Supervised contrastive (Khosla et al. 2020)."""
    z = embeddings["z"]
    alone = torch.eye(len(z), dtype=torch.bool)
    logits = (z @ z.T / model.temperature.exp()).masked_fill(alone, -1e9)
    same = (targets["label"][:, None] == targets["label"]) & ~alone
    each = -(functional.log_softmax(logits, 1) * same).sum(1) / same.sum(1).clamp(min=1)
    return (each * (1 + targets["odd"])).mean()


LOSSES = {
    "clip": (embed_pairs, clip),
    "triplets": (embed_labelled, triplets),
    "supervised": (embed_labelled, supervised),
}


torch.manual_seed(3)  # once: ranks as threads draw from one generator
MODEL, DATA = Towers(), (torch.randn(BATCH, 6), torch.randn(BATCH, 4), torch.arange(BATCH) % 3)


def case(dtype=torch.float64):
    batch = tuple(part.to(dtype) if part.is_floating_point() else part for part in DATA)
    return copy.deepcopy(MODEL).to(dtype), batch


def plain(embed, batch_loss, dtype=torch.float64):
    """One pass over the whole batch."""
    model, batch = case(dtype)
    loss = batch_loss(model, *embed(model, batch))
    loss.backward()
    return float(loss.detach()), {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


def cached(comm, embed, batch_loss, dtype=torch.float64, speeds=None):
    """The same by micro-batches: what each pass gave, by number; the loss pass's is the last."""
    model, whole = case(dtype)
    batches = list(zip(*(part.split(SIZES) for part in whole), strict=True))
    step = CachedGradients(model, embed, batch_loss)
    own = deal(len(SIZES), comm.size, speeds)[comm.rank]

    def taken():
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return grads

    for number in own:
        step.embed(number, batches[number], SIZES[number])
    step.gather(comm, len(SIZES), torch.device("cpu"))
    passes, loss = {}, None
    if own or step.counts:
        loss = float(step.loss())
    of_loss = taken()
    assert step.counts or not of_loss
    if step.counts:
        passes[len(SIZES)] = of_loss
    for number in own:
        step.backward(number, batches[number])
        passes[number] = taken()
    return loss, passes, step.rows


def summed(found):
    total = {}
    for _, passes, _ in found:
        for grads in passes.values():
            for name, grad in grads.items():
                total[name] = total.get(name, 0) + grad
    return total


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_are_those_of_one_pass_over_the_whole_batch(kind, workers):
    loss, wanted = plain(*LOSSES[kind])
    found = run_ranks(workers, cached, *LOSSES[kind])
    assert {rows for _, _, rows in found} == {BATCH}
    for own, passes, _ in found:
        assert own == pytest.approx(loss, rel=1e-12) if passes else own is None
    total = summed(found)
    for name, grad in wanted.items():
        if grad is None:
            assert name not in total
        else:
            torch.testing.assert_close(total[name], grad, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("kind", LOSSES)
def test_every_pass_gives_the_same_bits_whoever_runs_it(kind):
    def bits(found):
        return {
            number: {name: grad.numpy().tobytes() for name, grad in grads.items()}
            for _, passes, _ in found
            for number, grads in passes.items()
        }

    alone = bits(run_ranks(1, cached, *LOSSES[kind], torch.float32))
    assert sorted(alone) == [0, 1, 2, 3, 4]
    for workers, speeds in ((2, None), (3, (9.0, 1.0, 1.0)), (5, None)):
        assert bits(run_ranks(workers, cached, *LOSSES[kind], torch.float32, speeds)) == alone


def test_a_temperature_counts_once():
    _, wanted = plain(embed_pairs, clip)
    found = run_ranks(4, cached, embed_pairs, clip)
    givers = [n for n, (_, passes, _) in enumerate(found) if len(SIZES) in passes]
    assert givers == [0]
    given = found[0][1][len(SIZES)]
    assert set(given) == {"temperature"}
    torch.testing.assert_close(given["temperature"], wanted["temperature"], rtol=1e-12, atol=0)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))
        self.head = nn.BatchNorm1d(5)  # of the loss itself, which has the global batch

    def embed(self, batch):
        return self.body(batch[0]), batch[2]

    def contrast(self, embeddings, targets):
        z = functional.normalize(self.head(embeddings), dim=1)
        return ((z @ z.T - (targets[:, None] == targets).to(z)) ** 2).mean()


def test_embeddings_normalised_over_the_global_batch_are_those_of_one_plain_pass():
    """Worker 0 has 6 samples, worker 1 has 4, worker 2 none."""
    torch.manual_seed(5)
    model, (_, batch) = Normed().double(), case()
    plain = copy.deepcopy(model)
    plain.contrast(*plain.embed(batch)).backward()

    def body(comm):
        mine = copy.deepcopy(model)
        reads = make_global(mine)
        reads.join(comm)
        step = CachedGradients(mine, Normed.embed, Normed.contrast, go_back=reads.backward_from)
        rows = (slice(0, 6), slice(6, 10), slice(0, 1))[comm.rank]
        own, works = tuple(part[rows] for part in batch), comm.rank < 2
        kept = copy.deepcopy(mine.body.state_dict())
        with reads.one_pass(counts=works):
            if works:
                step.embed(comm.rank, own, rows.stop - rows.start)
            else:
                step.join_in(own)
        mine.body.load_state_dict(kept)  # the first time moves no buffer
        step.gather(comm, 2, torch.device("cpu"))
        if works:
            step.loss()
        with reads.one_pass(counts=works):
            if works:
                step.backward(comm.rank, own)
            else:
                step.join_in(own, record=True)
                reads.backward(None, 0.0)
        for parameter in mine.parameters():
            if parameter.grad is None or not works:
                parameter.grad = torch.zeros_like(parameter)
            comm.all_reduce(parameter.grad).wait()
        return mine

    for found in run_ranks(3, body)[:2]:
        for (name, mine), other in zip(found.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-13, msg=name)
        for (name, mine), other in zip(found.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13, msg=name)


def test_a_loss_scaled_for_float16_scales_the_gradients_and_is_told_as_it_is():
    model, batch = case()
    step = CachedGradients(model, embed_pairs, clip)
    step.embed(0, batch, BATCH)
    step.gather(AloneComm(), 1, torch.device("cpu"))
    loss = step.loss(lambda loss: loss * 1024)
    step.backward(0, batch)
    value, wanted = plain(embed_pairs, clip)
    assert float(loss) == pytest.approx(value, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 1024 * wanted[name], rtol=1e-12, atol=1e-12)


def test_one_batch_by_itself_is_one_plain_pass():
    model, batch = case()
    assert (
        float(of_one_pass(embed_pairs, clip)(model, batch).detach()) == plain(embed_pairs, clip)[0]
    )


def test_the_probe_tells_an_embedding_that_looks_at_its_batch():
    model, batch = case()

    def halves(embed):
        tried = probe(embed)
        parts = [tuple(part[rows] for part in batch) for rows in (slice(0, 5), slice(5, 10))]
        return float(tried(model, batch).detach()), sum(
            float(tried(model, part).detach()) for part in parts
        ) / 2

    def looks(model, batch):
        found, targets = embed_labelled(model, batch)
        return {"z": found["z"] - found["z"].mean(0) ** 2}, targets

    assert halves(embed_labelled)[0] == pytest.approx(halves(embed_labelled)[1], rel=1e-12)
    assert halves(looks)[0] != pytest.approx(halves(looks)[1], rel=1e-3)


def refusal(embed, batch_loss=clip, comm=None):
    model, batch = case()
    batches = [tuple(part[rows] for part in batch) for rows in (slice(0, 6), slice(6, 10))]
    comm = comm or AloneComm()
    step = CachedGradients(model, embed, batch_loss)
    for number in range(comm.rank, 2, comm.size):
        step.embed(number, batches[number], len(batches[number][0]))
    step.gather(comm, 2, torch.device("cpu"))
    step.loss()
    for number in range(comm.rank, 2, comm.size):
        step.backward(number, batches[number])


def drifting(model, batch, kept=[]):  # noqa: B006  # it keeps something from call to call
    kept.append(1)
    return Views(model.image(batch[0]) * len(kept), model.text(batch[1])), None


REFUSED = {
    "no pair": (lambda m, b: m.image(b[0]), r"\(embeddings, targets\) is wanted; targets may be"),
    "no tensor": (lambda m, b: (m.image(b[0]), ["a"]), "returned a str among embeddings"),
    "no numbers": (lambda m, b: (b[2], None), "no tensor of floating-point numbers"),
    "a row too many": (
        lambda m, b: (torch.cat([m.image(b[0])] * 2), None),
        r"shape \[12, 5\] for 6 samples: .* Two views of each sample are a tuple",
    ),
    "a scalar": (lambda m, b: (m.image(b[0]), torch.tensor(1)), r"shape \[\] for 6 samples"),
    "other shapes": (
        lambda m, b: (m.image(b[0])[:, : len(b[0]) // 2], None),
        r"other shapes or types for micro-batch 1 than for micro-batch 0 .*float64\[3\].*Pad",
    ),
    "detached": (
        lambda m, b: (Views(*(v.detach() for v in embed_pairs(m, b)[0])), None),
        "embeddings that Recipe.embed returned do not depend on the model's parameters",
    ),
    "it drifts": (
        drifting,
        "returned different embeddings when the same samples were embedded again",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_embeddings_that_cannot_be_used_are_refused_by_name(kind):
    embed, text = REFUSED[kind]
    with pytest.raises(RecipeError, match=text):
        refusal(embed)


def test_a_loss_that_forgets_the_embeddings_is_refused():
    with pytest.raises(RecipeError, match="batch_loss returned does not depend on the embeddings"):
        refusal(embed_pairs, lambda model, embeddings, targets: model.temperature * 2)


def test_shapes_that_differ_between_workers_are_refused_on_each():
    def body(comm):
        try:
            refusal(REFUSED["other shapes"][0], comm=comm)
        except RecipeError as error:
            return str(error)

    assert all("Pad to one length" in text for text in run_ranks(3, body))


def test_a_step_of_which_no_sample_could_be_read_has_no_rows():
    def body(comm):
        step = CachedGradients(case()[0], embed_pairs, clip)
        step.gather(comm, 4, torch.device("cpu"))
        return step.rows, step.counts

    assert run_ranks(2, body) == [(0, False)] * 2


def test_a_worker_that_goes_away_breaks_the_step_with_a_peer_error():
    class Gone(Exception):
        pass

    def body(comm, at):
        model, batch = case()
        before = copy.deepcopy(model.state_dict())
        step = CachedGradients(model, embed_labelled, triplets)
        step.embed(comm.rank, batch, BATCH)
        asked, original = [], comm.all_reduce

        def all_reduce(tensor):
            asked.append(1)
            if comm.rank == 1 and len(asked) == at:
                raise Gone
            return original(tensor)

        comm.all_reduce = all_reduce
        try:
            step.gather(comm, 2, torch.device("cpu"))
        except PeerError:
            same = all(torch.equal(value, before[n]) for n, value in model.state_dict().items())
            seen.append(same and all(p.grad is None for p in model.parameters()))
            raise

    seen = []
    for at in (1, 2):
        with pytest.raises(Gone):
            run_ranks(2, body, at)
    assert seen == [True, True]


def in_a_process(comm):
    return {kind: cached(comm, *LOSSES[kind], torch.float32) for kind in LOSSES}


@pytest.mark.process
def test_processes_give_the_bits_of_threads(tmp_path):
    found = run_processes(2, in_a_process, tmp_path)
    for kind, losses in LOSSES.items():
        wanted = run_ranks(2, cached, *losses, torch.float32)
        for one, other in zip([each[kind] for each in found], wanted, strict=True):
            assert (one[0], one[2]) == (other[0], other[2])
            assert one[1].keys() == other[1].keys()
            for number, grads in one[1].items():
                for name, grad in grads.items():
                    assert torch.equal(grad, other[1][number][name])
