"""Checks for transports: what every backend promises, and third parties run on theirs."""

from rollwright.testing.transports.conformance import TRANSPORT_CHECKS, TransportConformance, check_transport
from rollwright.testing.transports.trial import TransportSettings

__all__ = ["TRANSPORT_CHECKS", "TransportConformance", "TransportSettings", "check_transport"]
