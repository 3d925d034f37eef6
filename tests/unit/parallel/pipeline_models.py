"""Models of the pipeline's tests: each gives a model, a batch and its samples, in float64."""

import torch
from torch import nn
from torch.nn import functional

WORDS, LENGTH, WIDTH = 32, 8, 16


def mlp(samples=6):
    layers = [nn.Linear(8, 24), nn.ReLU(inplace=True), nn.Linear(24, 24), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2)), samples


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.drop = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x, mask):
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.drop(self.out(attended))


class GPT(nn.Module):
    def __init__(self, tied, blocks=4):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(64, WIDTH) / 4)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.never = nn.Parameter(torch.ones(2))
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def gpt(tied=False, blocks=4, samples=6):
    return GPT(tied, blocks), samples


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.downs = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.ups = nn.ModuleList([nn.Linear(16, 8) for _ in range(3)])
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        kept = []
        for down in self.downs:
            x = down(x).relu()
            kept.append(x)
        for up in self.ups:
            x = up(torch.cat([x, kept.pop()], 1)).relu()
        return self.head(x)


def hugging_face(name, samples=4):
    import transformers

    small = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 32}
    layers = {"num_hidden_layers": 4, "num_attention_heads": 2}
    kinds = {
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": WORDS, "n_embd": WIDTH}
                 | {"n_layer": 4, "n_head": 2, "n_positions": 32}
                 | {"bos_token_id": 0, "eos_token_id": 0}),
        "llama": ("LlamaForCausalLM", "LlamaConfig", small | layers),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", small | layers
                  | {"head_dim": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}),
        "mixtral": ("MixtralForCausalLM", "MixtralConfig", small | layers
                    | {"num_key_value_heads": 2, "num_local_experts": 4}
                    | {"experts_implementation": "eager"}),
        "bert": ("BertForMaskedLM", "BertConfig", small | layers),
        "vit": ("ViTForImageClassification", "ViTConfig", {k: v for k, v in small.items()
                if k != "vocab_size"} | layers | {"image_size": 8, "patch_size": 4}),
        "t5": ("T5ForConditionalGeneration", "T5Config", {"vocab_size": WORDS, "d_model": WIDTH}
               | {"d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
               | {"decoder_start_token_id": 0}),
        "mamba": ("MambaForCausalLM", "MambaConfig",
                  {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 4}
                  | {"state_size": 4}),
    }  # fmt: skip
    model, config, options = kinds[name]
    return getattr(transformers, model)(getattr(transformers, config)(**options)), samples


def batch_of(model, samples, number=0, length=LENGTH):
    """Batch `number` for one of these models."""
    generator = torch.Generator().manual_seed(number)
    if hasattr(model, "config"):
        if "ViT" in type(model).__name__:
            images = torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64)
            return {"pixel_values": images, "labels": torch.arange(samples) % 2}
        ids = torch.randint(1, WORDS, (samples, length), generator=generator)
        labels = ids.clone()
        labels[0, length // 2 :] = -100  # so parts have different weights
        return {"input_ids": ids, "labels": labels}
    if isinstance(model, GPT):
        ids = torch.randint(1, WORDS, (samples, length + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]
    given = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    return given, torch.randn(samples, 2, generator=generator, dtype=torch.float64)


def loss_of(model):
    """From a batch and its samples to its mean loss and weight."""

    def loss(batch, samples):
        if isinstance(batch, dict):
            labels = batch["labels"]
            logits = model(**batch).logits  # their own loss is computed in float32
            if labels.dim() == 1:
                return functional.cross_entropy(logits, labels), samples
            if "ForCausal" in type(model).__name__ or "LMHead" in type(model).__name__:
                logits, labels = logits[:, :-1], labels[:, 1:]
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return loss, int(labels.ne(-100).sum())
        inputs, target = batch
        made = model(inputs)
        if isinstance(model, GPT):
            return functional.cross_entropy(made.flatten(0, 1), target.flatten()), target.numel()
        return functional.mse_loss(made, target), samples

    return loss
