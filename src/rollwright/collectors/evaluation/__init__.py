"""The Evaluator, and what it is made of: a queue of evaluations, backends that run them, episodes and results."""

from rollwright.collectors.evaluation.evaluator import Evaluator

__all__ = ["Evaluator"]
