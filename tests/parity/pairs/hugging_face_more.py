"""More models of the transformers library, and losses built around theirs."""

from __future__ import annotations

import torch
from pair import SAMPLES, Parts, honest, pair, said, samples_of

from pairs.common import first_of_each_step, gentle_adamw
from pairs.hugging_face import (
    BERT,
    GPT2,
    MODELS,
    bert_config,
    causal,
    gpt2_model,
    language,
    own_loss,
    shifted,
    texts,
    typed,
    unshifted,
)


@pair("GPT-2, micro-batches of nothing", needs=GPT2)
def gpt2_of_nothing():
    """A text of one token has none to predict: the model's own loss is then 0 / 0."""
    needed = first_of_each_step()
    cut = [x[:1] if number % 3 and number not in needed else x for number, x in enumerate(texts())]
    return language(gpt2_model(), train=cut)


@pair("GPT-2, the same bits", needs=GPT2, draws=True, train={"determinism": "bits"})
def gpt2_by_bits():
    return language(gpt2_model(0.1))


@pair("GPT-2, another term beside its loss", said("weight|loss|apart"), needs=GPT2)
def gpt2_and_more():
    """The second term is a mean over all logits, padding too: tokens are not its weight."""

    def loss(model, batch):
        out = model(**batch)
        return out.loss + 0.1 * out.logits.square().mean()

    return language(gpt2_model(), compute_loss=loss)


@pair("GPT-2, labels weighed by the user", needs=GPT2)
def gpt2_weighed():
    return language(gpt2_model(), given={"weight": shifted})


@pair("GPT-2, unshifted labels as weight (wrong)", said("weight|apart"), needs=GPT2)
def gpt2_weighed_wrongly():
    return language(gpt2_model(), given={"weight": unshifted})


@pair("BERT, regression", needs=BERT)
def bert_regression():
    from transformers import BertForSequenceClassification

    dtype = torch.get_default_dtype()

    def collate(samples):
        batch = causal(samples)
        batch["labels"] = torch.tensor([float(x.sum() % 7) for x in samples], dtype=dtype)
        return batch

    model = typed(BertForSequenceClassification(bert_config(num_labels=1)))
    return language(model, collate=collate, of=lambda b: float(len(b["labels"])))


@pair("BERT, spans of answers, padded", said("apart|padd|loss"), needs=BERT)
def bert_spans():
    """The padding can be chosen too, and how much there is depends on the longest text."""
    return spans(texts())


@pair("BERT, spans of answers", honest("weight"), needs=BERT)
def bert_spans_of_one_length():
    return spans([torch.randint(3, 40, (9,)) for _ in range(SAMPLES)])


def spans(train):
    from transformers import BertForQuestionAnswering

    def collate(samples):
        batch = causal(samples)
        del batch["labels"]
        ends = torch.tensor([int(x.sum()) % len(x) for x in samples])
        return {**batch, "start_positions": ends // 2, "end_positions": ends}

    model = typed(BertForQuestionAnswering(bert_config()))
    return language(model, train=train, collate=collate, of=samples_of)


@pair("BERT, masked tokens, dropout", needs=BERT, draws=True)
def bert_dropout():
    from transformers import BertForMaskedLM

    from pairs.hugging_face import masked

    config = bert_config()
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.1
    return language(typed(BertForMaskedLM(config)), collate=masked, of=unshifted)


@pair("BART", needs=(f"{MODELS}.bart.modeling_bart",))
def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=40,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=16,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
    )

    def collate(samples):
        batch, answers = causal(samples), causal([x.flip(0)[: 1 + len(x) // 2] for x in samples])
        return {**batch, "labels": answers["labels"]}

    model = typed(BartForConditionalGeneration(config))
    return language(model, collate=collate, of=unshifted)


@pair("CLIP", said("samples|apart|compare"), needs=(f"{MODELS}.clip.modeling_clip",))
def clip():
    """Each picture has to find its text among those of the batch."""
    from transformers import CLIPConfig, CLIPModel

    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = CLIPConfig(
        text_config={**small, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**small, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    ids, pictures = torch.randint(3, 40, (SAMPLES, 8)), torch.randn(SAMPLES, 3, 8, 8)
    ids[:, -1] = 2

    def collate(samples):
        return {
            "input_ids": torch.stack([x for x, _ in samples]),
            "pixel_values": torch.stack([x for _, x in samples]),
            "return_loss": True,
        }

    return Parts(
        model=typed(CLIPModel(config)),
        train=list(zip(ids, pictures, strict=True)),
        collate=collate,
        compute_loss=own_loss,
        optimizer=gentle_adamw,
    )
