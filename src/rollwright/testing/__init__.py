"""For tests: fake environments (:mod:`.mocking_classes`), and checks of your own ones and of engines."""

from rollwright.testing.conformance import CHECKS, EnvConformance, check_env
from rollwright.testing.dataloaders import DummyStrDataLoader, DummyTensorDataLoader
from rollwright.testing.engines import check_engine

__all__ = ["CHECKS", "DummyStrDataLoader", "DummyTensorDataLoader", "EnvConformance", "check_engine", "check_env"]
