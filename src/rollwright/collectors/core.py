"""Path: the two ways to take the steps of a rollout have one face."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright.errors import NotNative

__all__ = ["Path", "UnfitOutputs"]


class UnfitOutputs(NotNative):
    """What a policy writes cannot lie in rows: whatever else has changed, it takes the plain path."""


class Path(ABC):
    """Takes the steps of a rollout: act, step, record.

    It holds what the next step is taken from, the *carrier*: observations, flags, whatever else the environment and
    the policy carry along, and trajectory ids.

    Attributes:
        how: what runs the environment and the policy, and why; for ``stats()`` and ``repr``.
        finite_keys: entries that are NaN where the policy's numbers are, to be tested once a batch.
    """

    how: dict[str, str]
    finite_keys: Sequence[NestedKey] = ()

    def compile(self, arguments: Mapping[str, Any]) -> None:  # noqa: B027 - most paths have nothing to prepare
        """Make the policy cheaper, and warm it up on the carrier.

        Raises:
            NotNative: it cannot be compiled, and runs as before.
        """

    def check(self) -> None:  # noqa: B027 - most paths take any environment
        """Test that the environment is what the path was chosen for.

        Raises:
            NotNative: it is not.
        """

    # The carrier ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def started(self) -> bool:
        """Whether there is a carrier."""

    @property
    @abstractmethod
    def carrier(self) -> TensorDictBase | None:
        """What the next step is taken from, ``[*env]``; None: nothing, a reset comes first."""

    @carrier.setter
    @abstractmethod
    def carrier(self, carrier: TensorDictBase | None) -> None: ...

    @abstractmethod
    def reset(self, **kwargs: Any) -> None:
        """Begin anew in all environments; trajectory ids are to be set next."""

    @abstractmethod
    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """Begin anew where ``marked``, bool ``[*env]``, says; the other environments go on."""

    @abstractmethod
    def set_ids(self, ids: torch.Tensor) -> None:
        """Give each environment the id, int64 ``[*env]``, of the trajectory that it is in."""

    @abstractmethod
    def renew_ids(self, ended: torch.Tensor) -> None:
        """Give fresh ids where ``ended``, bool ``[*env]``, says."""

    # A rollout ------------------------------------------------------------------------------------

    @abstractmethod
    def conform(self, outputs: TensorDictBase | None) -> None:
        """Give batches of random actions the entries that the policy writes, zero where no action is.

        Args:
            outputs: entries ``[*env]``, of :meth:`~rollwright.collectors.rollout.policy_trial.Trial.outputs`.

        Raises:
            UnfitOutputs: they cannot lie in rows.
        """

    @abstractmethod
    def begin(self, *, random: bool) -> None:
        """Open a batch, with random actions or with the policy's."""

    @abstractmethod
    def act(self, t: int) -> None:
        """The policy reads observations and writes actions."""

    @abstractmethod
    def step(self, t: int) -> None:
        """The environment steps; what ended begins anew."""

    @abstractmethod
    def record(self, t: int) -> None:
        """The frame goes into the batch's memory."""

    @abstractmethod
    def frame(self, t: int) -> TensorDictBase:
        """The frame ``[*env]`` of time ``t``, which was recorded last, as the batch will hold it."""

    @abstractmethod
    def finish(self, steps: int) -> TensorDictBase:
        """Close the batch after ``steps`` steps; times that were not taken are zero, their ids -1."""
