"""Models of the transformers library, from configurations, with `model(**batch).loss`.

Of such a loss nobody says what it is a mean of: instep has to find out.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch
from pair import SAMPLES, Parts, pair, said
from torch.overrides import TorchFunctionMode

from pairs.common import gentle_adamw, images, lengths

IGNORED = -100
MODELS = "transformers.models"


def own_loss(model, batch):
    return model(**batch).loss


class Doubled(TorchFunctionMode):
    """Where the code says float32, float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return function(*(torch.float64 if a is torch.float32 else a for a in args), **wide)


def typed(model):
    """The model in the type that is asked for, all of it.

    These models compute losses, norms and softmaxes in float32, whatever their parameters are:
    in float64 a plain loop is then 1e-7 away from one with other padding. So in float64 they are
    made to do what they say in float64; in float32 they are as they come.
    """
    forward = type(model).forward
    if not hasattr(forward, "doubles"):

        @functools.wraps(forward)
        def doubled(self, *args, **kwargs):
            wide = next(self.parameters()).dtype == torch.float64
            with Doubled() if wide else nullcontext():
                return forward(self, *args, **kwargs)

        doubled.doubles = True
        type(model).forward = doubled
    return model.to(torch.get_default_dtype())


def shifted(batch):
    """Labels of a causal model that count: the first of a sequence is predicted by nobody."""
    return float((batch["labels"][:, 1:] != IGNORED).sum())


def unshifted(batch):
    """Labels that count where each belongs to its own place."""
    return float((batch["labels"] != IGNORED).sum())


def texts(vocabulary=40, longest=12):
    return [torch.randint(3, vocabulary, (size,)) for size in lengths(longest, 2)]


def causal(samples):
    """Padded on the right, the padding masked and ignored."""
    longest = max(map(len, samples))
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
    for row, tokens in enumerate(samples):
        ids[row, : len(tokens)] = labels[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def masked(samples):
    """Only a few tokens of each text are to be guessed."""
    batch = causal(samples)
    guessed = batch["input_ids"] % 3 == 1
    guessed[:, 0] = True
    batch["labels"] = torch.where(guessed, batch["labels"], IGNORED)
    batch["input_ids"] = torch.where(guessed, 2, batch["input_ids"])
    return batch


def answered(samples):
    """The question is ignored: only the second half of a text counts."""
    batch = causal(samples)
    for row, tokens in enumerate(samples):
        batch["labels"][row, : len(tokens) // 2] = IGNORED
    return batch


def language(model, **changes):
    given = {
        "model": model,
        "train": texts(),
        "collate": causal,
        "compute_loss": own_loss,
        "of": shifted,
        "optimizer": gentle_adamw,
    }
    return Parts(**{**given, **changes})


def gpt2_model(dropout=0.0):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return typed(GPT2LMHeadModel(config))


GPT2 = (f"{MODELS}.gpt2.modeling_gpt2",)


@pair("GPT-2, padded", needs=GPT2)
def gpt2():
    return language(gpt2_model())


@pair("GPT-2, padded, dropout", needs=GPT2, draws=True)
def gpt2_dropout():
    return language(gpt2_model(0.1))


@pair("GPT-2, only answers count", needs=GPT2)
def gpt2_answers():
    return language(gpt2_model(), collate=answered)


@pair("GPT-2, texts of one length", needs=GPT2)
def gpt2_even():
    return language(gpt2_model(), train=[torch.randint(3, 40, (8,)) for _ in range(SAMPLES)])


@pair("GPT-2, classes", needs=GPT2)
def gpt2_classes():
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2, num_labels=3,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0, eos_token_id=0,
        bos_token_id=0,
    )  # fmt: skip
    model = typed(GPT2ForSequenceClassification(config))
    return language(model, collate=with_classes, of=lambda b: float(len(b["labels"])))


def with_classes(samples):
    batch = causal(samples)
    batch["labels"] = torch.tensor([int(x.sum()) % 3 for x in samples])
    return batch


@pair("GPT-2 with LoRA", needs=(*GPT2, "peft"))
def lora():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True
    )
    model = get_peft_model(gpt2_model(), config).to(torch.get_default_dtype())
    return language(model, optimizer=lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9))


@pair("Llama, tied, padded", needs=(f"{MODELS}.llama.modeling_llama",))
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return language(typed(LlamaForCausalLM(config)))


@pair("Mixtral with its balancing loss", said("apart|weight|gradient|not shown"),
      needs=(f"{MODELS}.mixtral.modeling_mixtral",))  # fmt: skip
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=16,
        experts_implementation="eager",
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        pad_token_id=0,
    )
    return language(typed(MixtralForCausalLM(config)))


def bert_config(**changes):
    from transformers import BertConfig

    return BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **changes,
    )  # fmt: skip


BERT = (f"{MODELS}.bert.modeling_bert",)


@pair("BERT, masked tokens", needs=BERT)
def bert():
    from transformers import BertForMaskedLM

    model = typed(BertForMaskedLM(bert_config()))
    return language(model, collate=masked, of=unshifted)


@pair("BERT, a class of each text", needs=BERT)
def bert_classes():
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(bert_config(num_labels=3))
    return language(
        typed(model),
        collate=with_classes,
        of=lambda b: float(len(b["labels"])),
    )


@pair("BERT, a class of each token", needs=BERT)
def bert_tokens():
    from transformers import BertForTokenClassification

    def collate(samples):
        batch = causal(samples)
        known = batch["labels"] != IGNORED
        batch["labels"] = torch.where(known, batch["labels"] % 3, IGNORED)
        return batch

    model = typed(BertForTokenClassification(bert_config(num_labels=3)))
    return language(model, collate=collate, of=unshifted)


@pair("T5", needs=(f"{MODELS}.t5.modeling_t5",))
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
    )

    def collate(samples):
        batch, answers = causal(samples), causal([x.flip(0)[: 1 + len(x) // 2] for x in samples])
        return {**batch, "labels": answers["labels"]}

    model = typed(T5ForConditionalGeneration(config))
    return language(model, collate=collate, of=unshifted)


@pair("ViT", needs=(f"{MODELS}.vit.modeling_vit",))
def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    def collate(samples):
        return {
            "pixel_values": torch.stack([x for x, _ in samples]),
            "labels": torch.stack([y for _, y in samples]),
        }

    return Parts(
        model=typed(ViTForImageClassification(config)),
        train=images(),
        collate=collate,
        compute_loss=own_loss,
        optimizer=gentle_adamw,
    )
