"""Log-probabilities of a reference model, and a reward that keeps the policy close to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.specs import Composite, Unbounded
from rollwright.envs.transforms import Transform
from rollwright.errors import PolicyError

Model = Callable[[TensorDictBase], TensorDictBase]
_ASSISTANT: tuple[NestedKey, ...] = (("masks", "all_assistant_mask"), "assistant_mask")  # of records; of sequences


class RetrieveLogProb(Transform):
    """Writes the log-probabilities that a model gives to the tokens of a turn.

    On an environment they are below ``"next"``, at ``log_probs_full_key``: float32 ``[*batch, tokens]``, ragged, of
    prompt and response; after a reset they are empty. On data (in a replay buffer, or called) they are at the root.

    Args:
        model: a wrapper with ``generate=False``, or another callable that reads the turn and writes
            ``("log_probs", "full")``, or flat ``log_probs`` of the response.
        log_probs_full_key: where to write.
        assistant_only: 0 on tokens that were not sampled in this turn; of training sequences, in any turn.
        detach: compute without gradients.
        device: of the data that the model gets; None: as they are.

    Raises:
        TypeError: ``model`` cannot be called.

    Example:
        >>> from tensordict import TensorDict
        >>> def model(td):
        ...     td["log_probs"] = TensorDict({"full": -torch.ones(2, 3)}, [2])
        ...     return td
        >>> tokens = TensorDict({"full": torch.ones(2, 3, dtype=torch.int64)}, [2])
        >>> masks = {"all_assistant_mask": torch.tensor([[False, True, True]] * 2)}
        >>> td = TensorDict({"tokens": tokens, "masks": masks}, [2])
        >>> RetrieveLogProb(model)(td)[0]["ref_log_probs", "full"]
        tensor([-0., -1., -1.])
    """

    _not_saved = ("model",)

    def __init__(
        self,
        model: Model,
        *,
        log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        assistant_only: bool = True,
        detach: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not callable(model):
            raise TypeError(f"model: expected a wrapper with generate=False, got {type(model).__name__}.")
        self.__dict__["model"] = model  # no part of this one: its weights are not saved with the environment
        self.log_probs_full_key, self.assistant_only = log_probs_full_key, assistant_only
        self.detach, self.model_device = detach, device

    def values(self, td: TensorDictBase) -> list[torch.Tensor]:
        """The log-probabilities of each row, float32 ``[tokens]``, or ``[response]`` of flat records."""
        given = td.copy() if self.model_device is None else td.to(self.model_device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            out = self.__dict__["model"](given)
        found = []
        for row, before in zip(out.reshape(-1).unbind(0), td.reshape(-1).unbind(0), strict=True):
            value = _entry(row, ("log_probs", "full"))
            if value is None:
                raise PolicyError(
                    "model: it wrote no ('log_probs', 'full') and no 'log_probs'. Pass a wrapper with generate=False."
                )
            value = value if td.device is None else value.to(td.device)
            masks = [_entry(before, key) for key in _ASSISTANT]
            fitting = [mask for mask in masks if mask is not None and mask.shape == value.shape]
            if self.assistant_only and fitting:
                value = value * fitting[0]
            found.append(value)
        return found

    def _written(self, td: TensorDictBase, values: list[torch.Tensor]) -> TensorDictBase:
        rows = [row.copy() for row in td.reshape(-1).unbind(0)]
        for row, value in zip(rows, values, strict=True):
            row.set(self.log_probs_full_key, value)
        return _shaped(rows, td)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._written(next_tensordict, self.values(tensordict.exclude("next")))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._written(tensordict_reset, [torch.zeros(0)] * tensordict_reset.numel())

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the log-probabilities into data, at the root."""
        return self._written(tensordict, self.values(tensordict))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Announce the log-probabilities."""
        spec = observation_spec.clone()
        spec.set(self.log_probs_full_key, Unbounded((*spec.shape, -1), device=spec.device))
        return spec


class KLRewardTransform(Transform):
    r"""Takes the divergence from a reference model off the reward.

    .. math:: r' = r - c \sum_{t \in \text{response}} \left(\log \pi(a_t) - \log \pi_\text{ref}(a_t)\right)

    Where rewards are of tokens, it is taken off that of the last one.

    The sum is an unbiased estimate of the Kullback-Leibler divergence of the policy from the reference where responses
    are sampled from the policy. It is written, too: ``kl_penalty``, float32 ``[*batch, 1]``, 0 after a reset.

    Args:
        ref_model: a wrapper with ``generate=False``, see :class:`RetrieveLogProb`.
        ref_model_factory: in its place, a function that makes one; it is called once, where the transform is made.
        coef: the factor c.
        add_to_reward: False: only write ``kl_penalty``.
        log_prob_key: of the policy's log-probabilities, in full; flat ``log_probs`` of the response where it is absent.
        kl_key: where to write the sum.
        device: of the data that the model gets.

    Raises:
        TypeError: ``ref_model`` cannot be called, or there are both or none.
    """

    def __init__(
        self,
        ref_model: Model | None = None,
        *,
        ref_model_factory: Callable[[], Model] | None = None,
        coef: float = 1.0,
        add_to_reward: bool = True,
        log_prob_key: NestedKey = ("log_probs", "full"),
        kl_key: NestedKey = "kl_penalty",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_keys=["reward"])
        if (ref_model is None) == (ref_model_factory is None):
            found = "none" if ref_model is None else "both"
            raise TypeError(f"ref_model: expected it or ref_model_factory, got {found}. Pass one of the two.")
        made: Any = ref_model if ref_model_factory is None else ref_model_factory()
        self.reference = RetrieveLogProb(made, device=device)
        self.coef, self.add_to_reward = float(coef), add_to_reward
        self.log_prob_key, self.kl_key = log_prob_key, kl_key

    def divergence(self, td: TensorDictBase) -> torch.Tensor:
        """The sum of each row of a step's root, float32 ``[*batch, 1]``."""
        sums = []
        for row, reference in zip(td.reshape(-1).unbind(0), self.reference.values(td.exclude("next")), strict=True):
            policy, mask = _entry(row, self.log_prob_key), _entry(row, _ASSISTANT[0])
            if policy is None:
                raise PolicyError(
                    f"policy: it wrote no {self.log_prob_key!r}, which KLRewardTransform needs. Let it return "
                    "log-probabilities (return_log_probs=True)."
                )
            if policy.shape != reference.shape:
                raise PolicyError(
                    f"ref_model: it gave {list(reference.shape)} log-probabilities for {list(policy.shape)} of the "
                    "policy. Let both write the same layout."
                )
            difference = policy.detach() - reference
            sums.append((difference * mask if mask is not None and mask.shape == policy.shape else difference).sum())
        return torch.stack(sums).to(torch.float32).reshape(*td.batch_size, 1)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._penalised(next_tensordict, self.divergence(tensordict))

    def _penalised(self, td: TensorDictBase, divergence: torch.Tensor) -> TensorDictBase:
        td.set(self.kl_key, divergence)
        if self.add_to_reward:
            _take_off(td, self.coef * divergence)
        return td

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        zeros = torch.zeros((*tensordict_reset.batch_size, 1), device=tensordict_reset.device)
        return tensordict_reset.set(self.kl_key, zeros)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to data: the reward below ``"next"`` changes."""
        self._penalised(tensordict.get("next"), self.divergence(tensordict))
        return tensordict

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Announce the sum."""
        spec = observation_spec.clone()
        spec.set(self.kl_key, Unbounded((*spec.shape, 1), device=spec.device))
        return spec


def _take_off(td: TensorDictBase, penalty: torch.Tensor) -> None:
    """Take a penalty ``[*batch, 1]`` off the reward; off that of the last token, where each has one."""
    if isinstance(td, LazyStackedTensorDict):
        for row, own in zip(td.unbind(0), penalty.unbind(0), strict=True):
            _take_off(row, own)
        return
    reward = td.get("reward")
    if reward.ndim == penalty.ndim:
        td.set("reward", reward - penalty)
    elif reward.shape[td.batch_dims]:
        reward = reward.clone()
        reward.select(td.batch_dims, -1).sub_(penalty)
        td.set("reward", reward)


def _entry(row: TensorDictBase, key: NestedKey) -> torch.Tensor | None:
    """An entry of a row; a flat one, named as its group, where there is no group."""
    group = key if isinstance(key, str) else key[0]
    value: Any = row.get(group, None)
    if isinstance(value, torch.Tensor) or value is None or isinstance(key, str):
        return value if isinstance(value, torch.Tensor) else None
    found: torch.Tensor | None = row.get(key, None)
    return found


def _shaped(rows: list[Any], like: TensorDictBase) -> TensorDictBase:
    """Rows as a lazy stack of the batch size of ``like``."""
    if not like.ndim:
        row: TensorDictBase = rows[0]
        return row
    for size in reversed(like.batch_size[1:]):
        rows = [LazyStackedTensorDict(*rows[i : i + size], stack_dim=0) for i in range(0, len(rows), size)]
    return LazyStackedTensorDict(*rows, stack_dim=0)
