"""Fine-tunes a Hugging Face model to put texts into classes.

    instep run job.toml

`reviews.csv` has a text and a label in each row. Replace it with yours, and name its columns in
job.toml. The model is a small BERT that knows nothing yet. To start from a trained one, name it
there too: `model = "distilbert-base-uncased"`, or a folder.
"""

import csv
import io
from pathlib import Path

import torch
from torch import Tensor, nn

import instep

try:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        BertConfig,
        BertForSequenceClassification,
        PreTrainedTokenizerFast,
    )
except ImportError as error:
    raise ImportError("the model comes with transformers: pip install transformers") from error

FILE = Path(__file__).with_name("reviews.csv")


def recipe(
    text: str = "text", label: str = "label", model: str = "", lr: float = 3e-3
) -> instep.Recipe:
    rows = rows_of(FILE)
    if not rows or not {text, label} <= rows[0].keys():
        there = ", ".join(rows[0]) if rows else "no row"
        raise ValueError(f"{FILE.name} has {there}; job.toml names {text!r} and {label!r}")
    texts, labels = [row[text] for row in rows], [row[label] for row in rows]
    classes = sorted(set(labels))
    if model:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(classes))
    else:
        tokenizer = words_of(texts)
        network = small_bert(len(tokenizer), len(classes))
    encoded = tokenizer(texts, truncation=True, max_length=64)["input_ids"]
    samples = [(ids, classes.index(label)) for ids, label in zip(encoded, labels, strict=True)]

    def collate(samples: list[tuple[list[int], int]]) -> dict[str, Tensor]:
        batch = tokenizer.pad({"input_ids": [ids for ids, _ in samples]}, return_tensors="pt")
        return {**batch, "labels": torch.tensor([label for _, label in samples])}

    return instep.Recipe(
        model=network,
        compute_loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        collate=collate,
        train=samples[len(samples) // 6 :],
        validate=samples[: len(samples) // 6],
    )


def rows_of(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file as spreadsheets save it: with commas, semicolons or tabs."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252")  # of an older Excel
    separator = max(",;\t", key=text.partition("\n")[0].count)
    rows = [*csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)]
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ValueError(f"{file.name}: row {number} has other columns than the first line")
    return rows


def words_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with a number for each word."""
    split = pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text)}
    numbers = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def small_bert(words: int, classes: int) -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=words,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            num_labels=classes,
        )
    )
