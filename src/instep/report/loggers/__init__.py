"""Where the curves of a run go besides its own report: TensorBoard, W&B, MLflow, a CSV file.

A process of its own follows the run's folder (`follow.py`), so that no logger can hold up the
training. To add one: a class with the methods of `base.Logger` in its own file, and its line here.
"""

from __future__ import annotations

from instep.registry import Registry

LOGGERS = Registry(
    "logger",
    {
        "csv": "instep.report.loggers.csv:CsvLogger",
        "mlflow": "instep.report.loggers.mlflow:MlflowLogger",
        "tensorboard": "instep.report.loggers.tensorboard:TensorBoardLogger",
        "wandb": "instep.report.loggers.wandb:WandbLogger",
    },
)
