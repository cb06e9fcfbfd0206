"""Receiving ends of weight schemes in a collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwright._foreign import is_torchrl_scheme
from rollwright.weight_update._scheme import WeightSyncScheme
from rollwright.weight_update.feed import HasModels, HeldWeights

__all__ = ["Relay", "as_schemes", "check_schemes", "receive_all", "register_receivers"]


class Relay:
    """Takes weights for a collector whose models are elsewhere, to be handed on.

    Args:
        collector: its ``get_model(model_id)`` raises ``ValueError`` for a model that is not in this process.

    Example:
        >>> from torch import nn
        >>> class Workers:
        ...     def get_model(self, model_id):
        ...         raise ValueError(model_id)
        >>> sender, relay = WeightSyncScheme(), Relay(Workers())
        >>> sender.init_on_sender("env.transform[0]", model=nn.Linear(2, 1))
        >>> import copy
        >>> schemes = register_receivers(relay, {"env.transform[0]": copy.copy(sender)}, synchronize_weights=False)
        >>> sender.send(), receive_all(schemes), sorted(relay.weights("env.transform[0]"))
        (1, ['env.transform[0]'], ['bias', 'weight'])
    """

    def __init__(self, collector: HasModels) -> None:
        self._collector = collector
        self._held: dict[str, HeldWeights] = {}

    def get_model(self, model_id: str) -> Any:
        """The model, where it is in this process; else what keeps weights for it."""
        if model_id not in self._held:
            try:
                return self._collector.get_model(model_id)
            except ValueError:
                self._held[model_id] = HeldWeights()
        return self._held[model_id]

    def weights(self, model_id: str) -> Any:
        """What came last for a model: the model itself where it is in this process; None if nothing came."""
        model = self.get_model(model_id)
        return model.state if isinstance(model, HeldWeights) else model


def as_schemes(name: str, schemes: Any) -> Any:
    """Schemes by model, with this library's in place of TorchRL's.

    Args:
        name: of the argument.
        schemes: what was passed; None: no schemes.

    Returns:
        ``schemes`` itself where none is TorchRL's.

    Raises:
        TypeError: they are no dictionary from names of models to schemes.
    """
    if isinstance(schemes, Mapping) and any(is_torchrl_scheme(scheme) for scheme in schemes.values()):
        schemes = {model_id: WeightSyncScheme.from_torchrl(scheme) for model_id, scheme in schemes.items()}
    check_schemes(name, schemes)
    return schemes


def check_schemes(name: str, schemes: Any) -> None:
    """Check schemes by model.

    Args:
        name: of the argument.
        schemes: what was passed; None: no schemes.

    Raises:
        TypeError: they are no dictionary from names of models to schemes.
    """
    if schemes is None:
        return
    if not isinstance(schemes, Mapping):
        raise TypeError(
            f"{name}: expected schemes by model, got {type(schemes).__name__}: {schemes!r}. Pass for example "
            "{'policy': SharedMemWeightSyncScheme()}."
        )
    for model_id, scheme in schemes.items():
        if not isinstance(model_id, str):
            raise TypeError(
                f"{name}: expected names of models, got {type(model_id).__name__}: {model_id!r}. Name them as "
                "'policy' or 'env.transform[0]'."
            )
        if not isinstance(scheme, WeightSyncScheme):
            kind = isinstance(scheme, type) and issubclass(scheme, WeightSyncScheme)
            raise TypeError(
                f"{name}[{model_id!r}]: expected a WeightSyncScheme, got {type(scheme).__name__}: {scheme!r}. "
                + (f"Make one: {scheme.__name__}()." if kind else "Pass for example SharedMemWeightSyncScheme().")
            )


def register_receivers(
    context: HasModels,
    schemes: Mapping[str, WeightSyncScheme],
    *,
    synchronize_weights: bool = True,
    timeout_s: float = 30.0,
) -> dict[str, WeightSyncScheme]:
    """Make schemes receive for a collector.

    Args:
        context: the collector, or what takes weights for it.
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
    check_schemes("weight_recv_schemes", schemes)
    for model_id, scheme in schemes.items():
        if not scheme.initialized_on_receiver:
            scheme.init_on_receiver(model_id, context)
    if synchronize_weights:
        for scheme in schemes.values():
            if not scheme.synchronized_on_receiver:
                scheme.connect(timeout=timeout_s)
    return dict(schemes)


def receive_all(schemes: Mapping[str, WeightSyncScheme]) -> list[str]:
    """Take what senders have sent last; the models that something new came for."""
    return [model_id for model_id, scheme in schemes.items() if scheme.receive() is not None]
