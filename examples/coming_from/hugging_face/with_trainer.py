import torch
from sklearn.datasets import load_digits
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

images, digits = load_digits(return_X_y=True)
samples = [
    {"input_ids": torch.tensor(image, dtype=torch.long), "labels": int(digit)}
    for image, digit in zip(images, digits, strict=True)
]


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(axis=1) == prediction.label_ids).mean()}


set_seed(0)
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
arguments = TrainingArguments(
    "model",
    num_train_epochs=2,
    per_device_train_batch_size=32,
    learning_rate=3e-3,
    train_sampling_strategy="sequential",
    average_tokens_across_devices=False,  # or two processes make the loss of BERT twice as large
    use_cpu=True,
    ddp_backend="gloo",
    save_strategy="no",
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=arguments,
    train_dataset=samples[:1536],
    eval_dataset=samples[1536:],
    compute_metrics=accuracy,
)
trainer.train()
print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
trainer.save_model()
