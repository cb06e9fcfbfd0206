"""The Evaluator: a queue of evaluations, backends that run them, episodes and results."""

from rollwright.collectors.evaluation.evaluator import Evaluator

__all__ = ["Evaluator"]
