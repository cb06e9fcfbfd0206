"""What a collector does with schemes that it receives weights through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwright.weight_update._scheme import WeightSyncScheme

__all__ = ["receive_all", "register_receivers"]


def register_receivers(
    collector: Any,
    schemes: Mapping[str, WeightSyncScheme],
    *,
    synchronize_weights: bool = True,
    timeout_s: float = 30.0,
) -> dict[str, WeightSyncScheme]:
    """Make schemes receive for a collector.

    Args:
        collector: has ``get_model(model_id)``.
        schemes: by model, from a sender; those that are receivers already stay what they are.
        synchronize_weights: wait for the first weights of each, and take them.
        timeout_s: for each.

    Returns:
        The schemes, for :func:`receive_all`.

    Raises:
        TypeError: one is no scheme.
        RuntimeError: one comes from no sender, or is the sender.
        TimeoutError: a sender has sent nothing.
    """
    for model_id, scheme in schemes.items():
        if not isinstance(scheme, WeightSyncScheme):
            raise TypeError(
                f"weight_recv_schemes[{model_id!r}]: expected a WeightSyncScheme, got {type(scheme).__name__}."
            )
        if not scheme.initialized_on_receiver:
            scheme.init_on_receiver(model_id, collector)
    if synchronize_weights:
        for scheme in schemes.values():
            if not scheme.synchronized_on_receiver:
                scheme.connect(timeout=timeout_s)
    return dict(schemes)


def receive_all(schemes: Mapping[str, WeightSyncScheme]) -> int | None:
    """Take what senders have sent last; the newest version among it, None if nothing is new."""
    versions = [version for scheme in schemes.values() if (version := scheme.receive()) is not None]
    return max(versions, default=None)
