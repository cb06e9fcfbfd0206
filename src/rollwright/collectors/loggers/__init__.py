"""Loggers: the numbers of a collector as curves, and videos, in CSV, TensorBoard, Weights & Biases or MLflow."""

from rollwright.collectors.loggers.base import Logger, StatsLogger, numbers_in
from rollwright.collectors.loggers.csv import CSVLogger
from rollwright.collectors.loggers.mlflow import MLflowLogger
from rollwright.collectors.loggers.tensorboard import TensorBoardLogger
from rollwright.collectors.loggers.wandb import WandbLogger

__all__ = [
    "CSVLogger",
    "Logger",
    "MLflowLogger",
    "StatsLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "numbers_in",
]
