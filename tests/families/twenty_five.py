"""25 families of models, on which each kind of mesh has to be right or refused.

The list is frozen: they were chosen, and their shapes written down, before any mesh trained them.
All are tiny, built from configurations, with dropout at the default of their library. Each is made
as the pairs of `tests/parity` are, so the plain loop there, and its judge, serve here too.

To add one: a function under `@family` that returns its `Parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pair import SAME, SAMPLES, Pair, Parts, samples_of
from pairs.common import classes, images, regression
from pairs.hugging_face import (
    MODELS,
    causal,
    masked,
    own_loss,
    shifted,
    texts,
    typed,
    unshifted,
)
from pairs.networks import GCN, ResNet, UNet, graphs, one_graph
from torch import nn
from torch.nn import functional as F

STEPS = 10
"""An epoch has nine, of which the last is short."""

VARIANTS = ("DLRM, sparse",)
"""Rows of the table that are no families of their own."""

PAIRS: dict[str, Pair] = {}
"""By name, in the order of the table."""


def family(
    name: str, *, draws: bool = False, train: Mapping[str, Any] | None = None, needs: str = ""
) -> Callable[[Callable[[], Parts]], Callable[[], Parts]]:
    """Enter a family. See `pair.pair`; `needs` is a model of the transformers library."""

    def enter(build: Callable[[], Parts]) -> Callable[[], Parts]:
        PAIRS[name] = Pair(
            name=name,
            build=build,
            expected=SAME,
            draws=draws,
            train=dict(train or {}),
            needs=("torch._dynamo", *([f"{MODELS}.{needs}.modeling_{needs}"] if needs else [])),
            steps=STEPS,
        )
        return build

    return enter


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def parts(model, train, **given):
    return Parts(model=model, train=train, optimizer=sgd, **given)


def by_samples(batch):
    return float(samples_of(batch))


GLOBAL_NORM = {"batch_norm": "global"}


# ---- written here


@family("MLP")
def perceptron():
    model = nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )
    return parts(model, classes(), loss=nn.CrossEntropyLoss())


@family("ResNet", train=GLOBAL_NORM)
def residual():
    return parts(ResNet(nn.BatchNorm2d), images(), loss=nn.CrossEntropyLoss())


@family("U-Net")
def unet():
    train = [(x, (x.sum(0, keepdim=True) > 0).to(x)) for x, _ in images()]
    return parts(UNet(), train, loss=nn.BCEWithLogitsLoss())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


@family("LSTM")
def recurrent():
    series = torch.randn(SAMPLES, 7, 4)
    train = [(x, (x.sum() * 2).long().abs() % 4) for x in series]
    return parts(Recurrent(), train, loss=nn.CrossEntropyLoss())


class Encoder(nn.Module):
    """torch's own layers, with their dropout of 0.1."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)).mean(1))


@family("TransformerEncoder", draws=True)
def encoder():
    ids = torch.randint(0, 40, (SAMPLES, 8))
    return parts(Encoder(), [(x, x.sum() % 4) for x in ids], loss=nn.CrossEntropyLoss())


class Attention(nn.Module):
    """The number of heads follows from the width of what the products give."""

    def __init__(self, width, head):
        super().__init__()
        self.head = head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            each(x).view(batch, length, -1, self.head).transpose(1, 2)
            for each in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width=16, head=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Gives [batch, vocabulary, length], as torch's cross entropy wants it."""

    def __init__(self, tied=False, vocabulary=40, width=16, layers=4):
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def language_of_one_length():
    ids = torch.randint(0, 40, (SAMPLES, 9))
    return [(x[:-1], x[1:]) for x in ids]


@family("GPT")
def gpt():
    return parts(GPT(), language_of_one_length(), loss=nn.CrossEntropyLoss())


@family("GPT, tied")
def tied_gpt():
    return parts(GPT(tied=True), language_of_one_length(), loss=nn.CrossEntropyLoss())


class Mixture(nn.Module):
    """Each sample goes to two of four experts; one to which none goes does not run."""

    def __init__(self):
        super().__init__()
        self.before, self.router, self.after = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)
        )

    def forward(self, x):
        x = torch.tanh(self.before(x))
        top, chosen = self.router(x).softmax(1).topk(2, 1)
        out = x
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * top[rows, place].unsqueeze(1))
        return self.after(out)


@family("mixture of experts")
def mixture():
    return parts(Mixture(), classes(), loss=nn.CrossEntropyLoss())


def graphs_in(batch):
    return float(len(batch[1]))


@family("graph network")
def graph_network():
    """A batch of graphs is one graph: its first tensor has a row for each node."""

    def collate(samples):
        return one_graph(samples), torch.tensor([kind for _, _, kind in samples])

    return parts(
        GCN(True),
        graphs(),
        collate=collate,
        loss=nn.CrossEntropyLoss(),
        of=graphs_in,
        given={"weight": graphs_in},
    )


class DLRM(nn.Module):
    """Products of all pairs of embeddings and of the dense features' own (Naumov et al. 2019)."""

    def __init__(self, sparse):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 8, sparse=sparse) for rows in (30, 50, 20))
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, given):
        dense, ids = given
        features = self.bottom(dense)
        found = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        each = torch.stack([features, *found], 1)
        products = each @ each.transpose(1, 2)
        first, second = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([features, products[:, first, second]], 1)).squeeze(1)


def dlrm_parts(sparse, optimizer):
    ids = torch.stack([torch.randint(0, rows, (SAMPLES,)) for rows in (30, 50, 20)], 1)
    dense = torch.randn(SAMPLES, 4)
    clicked = ((ids.sum(1) + dense[:, 0].long()) % 2).to(dense)
    train = [((d, i), y) for d, i, y in zip(dense, ids, clicked, strict=True)]
    return Parts(model=DLRM(sparse), train=train, loss=nn.BCEWithLogitsLoss(), optimizer=optimizer)


@family("DLRM")
def dlrm():
    return dlrm_parts(False, sgd)


@family("DLRM, sparse")
def sparse_dlrm():
    return dlrm_parts(True, lambda p: torch.optim.SGD(p, lr=0.05))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 12))

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (spread / 2).exp()
        return self.decoder(code), mean, spread


def evidence(model, x):
    made, mean, spread = model(x)
    apart = (1 + spread - mean.square() - spread.exp()).sum(1) / -2
    return ((made - x).square().sum(1) + apart).mean()


@family("VAE", draws=True)
def vae():
    train = list(torch.randn(SAMPLES, 3) @ torch.randn(3, 12))
    return parts(VAE(), train, compute_loss=evidence, given={"weight": by_samples})


class Branching(nn.Module):
    """Samples take one of two ways; a way that none of a batch takes does not run."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(6, 16), nn.Linear(16, 4)
        self.long = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.short = nn.Linear(16, 16)

    def forward(self, x):
        hidden, far = torch.tanh(self.before(x)), x[:, 0] > 0.5
        out = torch.zeros_like(hidden)
        for way, rows in ((self.long, far), (self.short, ~far)):
            if bool(rows.any()):
                out = out.index_add(0, rows.nonzero()[:, 0], way(hidden[rows]))
        return self.after(out)


@family("data-dependent branch")
def branching():
    return parts(Branching(), classes(), loss=nn.CrossEntropyLoss())


class Dense(nn.Module):
    """Each layer sees what all before it gave."""

    def __init__(self, layers=4, growth=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 + n * growth, growth) for n in range(layers))
        self.head = nn.Linear(6 + layers * growth, 4)

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, torch.tanh(layer(x))], 1)
        return self.head(x)


@family("dense skips")
def dense_skips():
    return parts(Dense(), classes(), loss=nn.CrossEntropyLoss())


class Named(nn.Module):
    """Takes a dict, and gives one that has a scalar too."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 16), nn.Linear(3, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, given):
        hidden = torch.tanh(self.left(given["left"]) * self.right(given["right"]))
        return {"logits": self.body(hidden), "size": hidden.square().mean()}


def named_loss(model, batch):
    out = model({"left": batch["left"], "right": batch["right"]})
    return F.cross_entropy(out["logits"], batch["kind"]) + 0.1 * out["size"]


@family("dict in and out")
def named():
    train = [{"left": x[:3], "right": x[3:], "kind": y} for x, y in classes()]
    return parts(Named(), train, compute_loss=named_loss, given={"weight": by_samples})


class TwoHeads(nn.Module):
    """A sample has one of two tasks; the head of a task that none of a batch has does not run."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.heads = nn.ModuleDict({"kind": nn.Linear(16, 4), "size": nn.Linear(16, 3)})

    def forward(self, x, sizes):
        hidden = self.body(x)
        kinds = self.heads["kind"](hidden[~sizes]) if not bool(sizes.all()) else None
        return kinds, self.heads["size"](hidden[sizes]) if bool(sizes.any()) else None


def two_losses(model, batch):
    x, target, kind, sizes = batch
    kinds, values = model(x, sizes)
    total = torch.zeros((), dtype=x.dtype)
    if kinds is not None:
        total = total + F.cross_entropy(kinds, kind[~sizes], reduction="sum")
    if values is not None:
        total = total + (values - target[sizes]).square().sum()
    return total / len(x)


@family("two heads")
def two_heads():
    train = [(x, target, (x.sum() * 2).long().abs() % 4, x[0] > 0.7) for x, target in regression()]
    return parts(TwoHeads(), train, compute_loss=two_losses, given={"weight": by_samples})


# ---- of the transformers library, from configurations


def language(model, **changes):
    given = {"train": texts(), "collate": causal, "compute_loss": own_loss, "of": shifted}
    return parts(typed(model), **{**given, **changes})


DECODER = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@family("GPT-2", draws=True, needs="gpt2")
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    return language(GPT2LMHeadModel(config))


@family("Llama", needs="llama")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return language(LlamaForCausalLM(LlamaConfig(**DECODER)))


@family("Qwen3", needs="qwen3")
def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return language(Qwen3ForCausalLM(Qwen3Config(**DECODER, head_dim=8)))


@family("BERT", draws=True, needs="bert")
def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=40, max_position_embeddings=16, **ENCODER)
    return language(BertForMaskedLM(config), collate=masked, of=unshifted)


def with_answers(samples):
    batch, answers = causal(samples), causal([x.flip(0)[: 1 + len(x) // 2] for x in samples])
    return {**batch, "labels": answers["labels"]}


@family("T5", draws=True, needs="t5")
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return language(T5ForConditionalGeneration(config), collate=with_answers, of=unshifted)


def with_labels(samples):
    pictures, kinds = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(pictures), "labels": torch.stack(kinds)}


@family("ViT", needs="vit")
def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=8, patch_size=4, num_labels=4, **ENCODER)
    model = typed(ViTForImageClassification(config))
    return parts(model, images(), collate=with_labels, compute_loss=own_loss)


@family("Mixtral", needs="mixtral")
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**DECODER, num_local_experts=4, experts_implementation="eager")
    return language(MixtralForCausalLM(config))


@family("Mamba", needs="mamba")
def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=40,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return language(MambaForCausalLM(config))


@family("HF ResNet", train=GLOBAL_NORM, needs="resnet")
def hf_resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=4
    )
    model = typed(ResNetForImageClassification(config))
    return parts(model, images(16), collate=with_labels, compute_loss=own_loss)


@family("Whisper", needs="whisper")
def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=40,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=8,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    sounds = torch.randn(SAMPLES, 8, 16)

    def collate(samples):
        spoken, written = zip(*samples, strict=True)
        return {"input_features": torch.stack(spoken), "labels": causal(written)["labels"]}

    train = list(zip(sounds, texts(), strict=True))
    model = WhisperForConditionalGeneration(config)
    return language(model, train=train, collate=collate, of=unshifted)
