import torch
from sklearn.datasets import load_digits
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

import instep

images, digits = load_digits(return_X_y=True)
samples = [
    {"input_ids": torch.tensor(image, dtype=torch.long), "labels": int(digit)}
    for image, digit in zip(images, digits, strict=True)
]


def accuracy(logits, labels):
    return (logits.argmax(dim=1) == labels).float().mean()


def recipe():
    config = BertConfig(
        vocab_size=17,  # the shades of grey: an image is a text of 64 of them
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return instep.Recipe(
        model=BertForSequenceClassification(config),
        compute_loss=lambda model, batch: model(**batch).loss,
        weight=lambda batch: len(batch["labels"]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0),
        scheduler=lambda optimizer: get_linear_schedule_with_warmup(optimizer, 0, 48),
        train=samples[:1536],
        validate=samples[1536:],
        predict=lambda model, batch: model(input_ids=batch["input_ids"]).logits,
        targets=lambda batch: batch["labels"],
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    run = instep.train(
        recipe,
        name="digits",
        workers=2,
        seed=0,
        train={"epochs": 2, "global_batch": 64, "max_grad_norm": 1.0},
        data={"order": "dataset"},
    )
    print(f"accuracy {run.summary['metrics']['accuracy']:.3f}")
