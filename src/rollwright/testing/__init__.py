"""For tests: fake environments (:mod:`.mocking_classes`) and checks for your own (:mod:`.conformance`)."""

from rollwright.testing.conformance import CHECKS, EnvConformance, check_env
from rollwright.testing.dataloaders import DummyStrDataLoader, DummyTensorDataLoader

__all__ = ["CHECKS", "DummyStrDataLoader", "DummyTensorDataLoader", "EnvConformance", "check_env"]
