"""For tests: fake environments (:mod:`.mocking_classes`) and checks for your own (:mod:`.conformance`)."""

from rollwright.testing.conformance import CHECKS, EnvConformance, check_env

__all__ = ["CHECKS", "EnvConformance", "check_env"]
