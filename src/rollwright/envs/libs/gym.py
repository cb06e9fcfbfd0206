"""GymEnv and GymWrapper: gymnasium environments, single or vectorized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, Unpack, cast

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict, TensorDictBase

from rollwright._foreign import class_path, library_of_env
from rollwright._keys import NestedKey, key_str, leaf_keys, place, unravel
from rollwright.data.entries import unchecked_td
from rollwright.data.specs import Categorical, Composite, Unbounded
from rollwright.data.specs.conversion import leaves_of, torch_dtype
from rollwright.envs.arrays import Entry, NameRow, Rows, RowsStep, Values
from rollwright.envs.base import _extensions
from rollwright.envs.libs.building import (
    Available,
    GymKeywords,
    decorate,
    gym_backend,
    make,
    name_of_observation,
    set_gym_backend,
    space_of,
)
from rollwright.envs.libs.codecs import ActionWriter, ObservationReader, spec_of
from rollwright.envs.libs.gym_rows import (
    FLAG_TYPES,
    BaseInfoDictReader,
    GymRows,
    InfoReadingEnv,
    default_info_dict_reader,
)
from rollwright.envs.libs.library import LibraryEnv
from rollwright.envs.libs.vector import BatchedEnv, Readers, VectorEpisodes, is_batched
from rollwright.envs.libs.vector_tensors import VectorTensors, copies_of, device_of_env, gym_tensors
from rollwright.envs.own_tensors import OwnTensors
from rollwright.errors import EnvError, EnvKeyError, NotNative, SpecError

__all__ = [
    "BaseInfoDictReader",
    "GymEnv",
    "GymWrapper",
    "default_info_dict_reader",
    "gym_backend",
    "set_gym_backend",
]

Seeds = list[int | None]

RESERVED = ("reward", "done", "terminated", "truncated", "next", "_reset")
_OTHERWISE = "Pass gymnasium.make(...), call GymEnv(name) to create one by name, or subclass EnvBase."
_REMEDIES = {
    "dm_env": "Use DMControlWrapper(env), or DMControlEnv(domain, task) to create one by name.",
    "pettingzoo": "It has several agents: use PettingZooWrapper(env), or PettingZooEnv(task, parallel=...).",
}
_PLAIN = (float, int, np.floating, np.bool_)  # what a single environment returns as a rule


class GymWrapper(InfoReadingEnv):
    """Wraps a gymnasium environment or vector environment.

    Entries: a Dict space has its own keys; elements of a Tuple are ``("observation", "0")`` and so on; any other
    observation is ``"observation"``, any other action ``"action"``. Images (uint8 from 0 to 255, ``[height, width,
    3]``, such as Atari's), and the observation with ``pixels_only``, are ``"pixels"``. Discrete values are one-hot
    unless ``categorical_action_encoding``. Spaces that no tensor can hold (text, graphs, sequences) become non-tensor
    data.

    The true last observation of an episode is always in ``"next"``, and no transition crosses from one episode to the
    next, in every autoreset mode of a vector environment. In ``SAME_STEP``, the first observation of the new episode is
    kept until its reset. In ``NEXT_STEP`` and ``DISABLED``, environments are reset with ``options={"reset_mask":
    ...}``, before the step that ``NEXT_STEP`` would spend on the reset. Vector environments that cannot reset some of
    their environments are refused; the message says what to use instead. Environments that ended and were not reset
    keep their last state, with rewards of zero, while the others are stepped.

    Attributes that this class does not have are those of the gymnasium environment.

    Args:
        env: the environment.
        categorical_action_encoding: discrete actions and observations as integers from 0.
        device: device of the tensors; None: the CPU, without naming a device.
        from_pixels: add rendered images as ``"pixels"``, uint8 ``[height, width, channels]``.
        pixels_only: with ``from_pixels``: leave out all other observations.
        frame_skip: repeat each action this many times and add up the rewards. For an environment that skips frames by
            itself (Atari's ``frameskip``), set this when you make it instead.
        allow_done_after_reset: see :class:`~rollwright.envs.EnvBase`.
        run_type_checks: see :class:`~rollwright.envs.EnvBase`.
        policy: see :class:`~rollwright.envs.EnvBase`.

    Raises:
        TypeError: ``env`` is no gymnasium environment.
        ValueError: ``env`` is a vector environment that cannot be kept from mixing episodes.

    Example:
        >>> import gymnasium
        >>> env = GymWrapper(gymnasium.make("Pendulum-v1"))
        >>> env.set_seed(0)
        0
        >>> rollout = env.rollout(3)
        >>> rollout["next", "observation"].shape, env.spec.max_episode_steps
        (torch.Size([3, 3]), 200)
    """

    reward_dtype: type[np.floating[Any]] = np.float32
    inner_name = "gym_env"

    def __init__(
        self,
        env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any],
        categorical_action_encoding: bool = False,
        *,
        device: torch.device | str | int | None = None,
        from_pixels: bool = False,
        pixels_only: bool = False,
        frame_skip: int | None = None,
        allow_done_after_reset: bool = False,
        run_type_checks: bool = False,
        policy: Callable[..., Any] | None = None,
    ) -> None:
        env = BatchedEnv(env) if is_batched(env) else env
        if not isinstance(env, (gymnasium.Env, VectorEnv)):
            raise TypeError(
                f"env: expected a gymnasium.Env or gymnasium.vector.VectorEnv, got {class_path(env)}. "
                f"{_REMEDIES.get(library_of_env(env), _OTHERWISE)}"
            )
        if hasattr(env.unwrapped, "all_env_ids"):
            raise TypeError("env: expected a gymnasium environment, got an EnvPool. Use EnvPoolEnv(task_id, num_envs).")
        env = decorate(env, frame_skip, from_pixels, pixels_only)
        root = name_of_observation(env, from_pixels, pixels_only)
        self._setup(env, root, categorical_action_encoding, device, allow_done_after_reset, run_type_checks)
        self.from_pixels, self.pixels_only = from_pixels, pixels_only

    def _setup(
        self,
        env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any],
        root: str,
        categorical: bool,
        device: torch.device | str | int | None,
        allow_done_after_reset: bool,
        run_type_checks: bool,
    ) -> None:
        """Take over ``env`` and decide how each entry of it is converted."""
        vector = isinstance(env, VectorEnv)
        named = device_of_env(env)
        device = named if device is None and named is not None and named.type != "cpu" else device
        batch = (env.num_envs,) if isinstance(env, VectorEnv) else ()
        seen, done = space_of(env, "observation_space"), space_of(env, "action_space")
        super().__init__(
            device=device,
            batch_size=batch,
            allow_done_after_reset=allow_done_after_reset,
            run_type_checks=run_type_checks,
        )
        self._env: Any = env
        self.returns_tensors = named is not None
        self._episodes = VectorEpisodes(env) if isinstance(env, VectorEnv) else None
        self._vector: VectorTensors | None = None
        self._seeds: Seeds | None = None
        self._shape = batch
        observations = leaves_of(seen, root, categorical)
        actions = leaves_of(done, "action", categorical)
        clashes = {leaf.key for leaf in observations} & {*RESERVED, *(leaf.key for leaf in actions)}
        if clashes:
            raise ValueError(
                f"env: {self} has an observation of the same name as an action, a reward or a flag: "
                f"{key_str(clashes)}. Rename it with gymnasium.wrappers.TransformObservation."
            )
        self._observe = ObservationReader(observations, batch)
        self._observe_one = ObservationReader(observations, ()) if vector else self._observe
        self._act, self._actions, self._observations = ActionWriter(done, actions, batch), actions, observations
        self.plain_array, self._plain_dtype = self._observe.plain_array, self._observe.plain_dtype
        self.observation_spec = spec_of(observations, batch)
        self.action_spec = spec_of(actions, batch)
        self.space_keys = [leaf.key for leaf in observations]
        self.space_rewards = {"reward": Entry((*batch, 1), np.dtype(self.reward_dtype), True)}
        reward_dtype = torch_dtype(self.reward_dtype)
        self.reward_spec = Unbounded((*batch, 1), device=self.device or "cpu", dtype=reward_dtype)
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool, device=self.device or "cpu")
        self.done_spec = Composite(done=flag, terminated=flag, truncated=flag, shape=batch)
        if (on_tensors := self._on_tensors()) is not None and on_tensors.marks_missing:
            self.observation_spec["observation_missing"] = flag

    # Stepping ---------------------------------------------------------------------------------

    def step_values(self, given: TensorDictBase | Values) -> Values:
        """Act, by the actions among ``given``; the content of ``"next"`` as arrays, or as :meth:`on_tensors` has it."""
        if isinstance(given, TensorDictBase) and (vector := self._on_tensors()) is not None:
            return vector.step_alone(given)
        try:
            action = self._act(given)
        except SpecError as error:
            raise EnvError(f"{self}: action {error}") from error
        except KeyError as error:
            raise EnvKeyError(
                f"{self}: step found no {error.args[0]!r} in the data, which has "
                f"{key_str(given.keys())}. Let the policy write it, or call env.rand_action(data)."
            ) from error
        if self._episodes is not None:
            return self._episodes.step(action, self._readers)
        values = self._env.step(action)
        if type(values) is tuple and len(values) == 5 and not self.info_dict_reader:  # as a rule
            observation, reward, terminated, truncated, _ = values
            key, dtype, shape = self.plain_array
            plain = type(observation) is np.ndarray and observation.dtype == dtype and observation.shape == shape
            flags = type(terminated) in FLAG_TYPES and type(truncated) in FLAG_TYPES
            if plain and flags and isinstance(reward, (float, int)):
                done = terminated or truncated
                out: Values = {key: observation.astype(self._plain_dtype, "C")}  # a copy
                out["reward"], out["terminated"], out["truncated"] = self.reward_dtype(reward), terminated, truncated
                out["done"] = done
                return out
        return self.read_step(values)

    def row_writer(self, num_rows: int) -> ActionWriter:
        """What converts the actions of ``num_rows`` single environments like this one."""
        return ActionWriter(self._act.space, self._actions, (num_rows,))

    def reset_data(self, mask: torch.Tensor | None, **kwargs: Any) -> Values:
        """Reset the environments of a mask ``[*batch, 1]``; the first call shows whether they return tensors."""
        if (vector := self._on_tensors()) is not None:
            given = None if mask is None else unchecked_td({"_reset": mask}, self.batch_size, device=self.device)
            return copies_of(vector.reset(given, **kwargs))
        if self._episodes is None or mask is not None:
            return super().reset_data(mask, **kwargs)
        found: Any = self.reset_values(None, self._readers._replace(reset=lambda values: values), **kwargs)
        self.returns_tensors = self.returns_tensors or _has_tensors(found)
        vector = self._on_tensors()
        return self._read_reset(found) if vector is None else copies_of(vector.begun(found))

    def reset_values(self, rows: Rows | None, read: Readers | None = None, **kwargs: Any) -> Values:
        """Begin new episodes where ``rows`` marks; first observations as arrays."""
        seeds = self._seeds_for(rows, kwargs.pop("seed", None))
        if self._episodes is not None:
            options = kwargs.pop("options", None)
            return self._episodes.reset(rows, read or self._readers, seed=seeds, options=options, **kwargs)
        if seeds is not None:
            kwargs["seed"] = seeds[0]
        return self._read_reset(self._env.reset(**kwargs))

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the gymnasium environment. A second call does nothing, and a reset uses it again, if it allows that."""
        was_closed = self.is_closed
        super().close(raise_if_closed=raise_if_closed)
        if not was_closed:
            self._env.close()

    def _reopen(self) -> None:
        self.is_closed = False

    # Seeds ------------------------------------------------------------------------------------

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        if seed is None:
            self._seeds = None
            return None
        self._seeds = [seed if static_seed else seed + i for i in range(self.numel())]
        return self._seeds[-1]

    def seeds_for(self, marks: torch.Tensor | None, given: int | Seeds | None) -> Seeds | None:
        """The seeds of a reset of what ``marks``, bool ``[*batch]``, says; None: there are none to be given."""
        if self._seeds is None and given is None:
            return None
        return self._seeds_for(None if marks is None else marks.cpu().numpy(), given)

    def _seeds_for(self, rows: Rows | None, given: int | Seeds | None) -> Seeds | None:
        """The seeds of a reset: those given, else those that ``set_seed`` left for the environments reset."""
        if self._seeds is None and given is None:
            return None
        seeds, self._seeds = self._seeds, None
        if given is not None:
            return [given + i for i in range(self.numel())] if isinstance(given, int) else list(given)
        if seeds is None or rows is None or rows.all():
            return seeds
        if self._episodes is not None and not self._episodes.seeds_parts:
            self._seeds = seeds  # they wait for a reset of all
            return None
        if any(seed is not None for seed in np.array(seeds, object)[~rows]):
            self._seeds = [None if row else seed for seed, row in zip(seeds, rows, strict=True)]
        now = [seed if row else None for seed, row in zip(seeds, rows, strict=True)]
        return now if any(seed is not None for seed in now) else None

    # Reading what gymnasium returns ---------------------------------------------------------------

    @property
    def _readers(self) -> Readers:
        return Readers(self.read_step, self._read_reset, self._read_final, self._read_info)

    def read_step(self, values: Any) -> Values:
        """What the environment's ``step`` returned, as arrays."""
        if not isinstance(values, (tuple, list)) or len(values) != 5:
            raise EnvError(
                f"{self}: step must return (observation, reward, terminated, truncated, info), got "
                f"{_described(values)}. Environments of the old gym API need shimmy's GymV26CompatibilityV0."
            )
        observation, reward, terminated, truncated, info = values
        out = self._converted(self._observe, observation, "step")
        if type(terminated) is not bool or type(truncated) is not bool or self._episodes is not None:
            terminated = self._column("terminated", terminated, np.bool_)
            truncated = self._column("truncated", truncated, np.bool_)
        plain = type(reward) is float and self._episodes is None
        out["reward"] = self.reward_dtype(reward) if plain else self._column("reward", reward, self.reward_dtype)
        out["terminated"], out["truncated"], out["done"] = terminated, truncated, terminated | truncated
        if self.info_dict_reader:
            out.update(self._read_info(info, out))
        return out

    def _read_reset(self, values: Any) -> Values:
        if not isinstance(values, (tuple, list)) or len(values) != 2:
            raise EnvError(f"{self}: reset must return (observation, info), got {_described(values)}.")
        if self._episodes is not None and not self.returns_tensors:
            self.returns_tensors = _has_tensors(values)
        out = self._converted(self._observe, values[0], "reset")
        if self.info_dict_reader:
            out.update(self._read_info(values[1], out))
        return out

    def _read_final(self, observation: Any) -> Values:
        return self._converted(self._observe_one, observation, "step")

    def _read_info(self, info: Any, before: Values | None = None) -> Values:
        """What the readers make of ``info``, and of the entries read ``before``, where they change those."""
        if not self.info_dict_reader:
            return {}
        found = self._info_entries(info)
        if found is not None:
            return {key: _as_value(value) for key, value in found.items()}
        data = self.tensordict_of(before or {})
        given = {key: data.get(key) for key in leaf_keys(data)}
        self._read_info_into(info, data)
        new = {unravel(key): data.get(key) for key in leaf_keys(data)}
        return {key: _as_value(value) for key, value in new.items() if given.get(key) is not value}

    def write_observation(self, observation: Any, out: Values, i: int) -> None:
        """Write what a step returned into row ``i`` of arrays by key; there are no objects among the entries."""
        try:
            self._observe.write(observation, out, i)
        except (SpecError, KeyError):
            self._converted(self._observe, observation, "step")  # which reports it
            raise

    def _converted(self, read: ObservationReader, observation: Any, call: str) -> Values:
        try:
            return read(observation)
        except SpecError as error:
            raise EnvError(f"{self}: {call} returned an observation that breaks its space: {error}") from error
        except KeyError as error:
            raise EnvKeyError(
                f"{self}: {call} returned no {error.args[0]!r}, which the observation space announces. "
                "Return the entry, or take it out of the space."
            ) from error

    def _column(self, name: str, value: Any, dtype: type[np.generic]) -> Any:
        """Rewards or flags: a new array ``[*batch]``, or a number of a single environment."""
        if self._episodes is None and isinstance(value, _PLAIN):
            return dtype(value)
        array = np.asarray(value)
        if array.shape == self._shape and array.dtype.kind in "biuf":
            return array.astype(dtype)[()]
        if array.size != self.numel() or array.dtype.kind not in "biuf":
            expected = "a number" if not self.batch_size else f"{self.numel()} numbers"
            raise EnvError(f"{self}: step returned {name!r} = {value!r}, expected {expected}. Return it so.")
        return array.astype(dtype).reshape(self.batch_size)[()]

    def in_turn(
        self, envs: Sequence[LibraryEnv], entries: dict[NestedKey, Entry], name_error: NameRow
    ) -> RowsStep | None:
        """A function that steps such environments one after the other; see :meth:`ArrayEnv.in_turn`."""
        same = [env for env in envs if isinstance(env, GymWrapper)]
        return None if self.batch_size or len(same) < len(envs) else GymRows(same, entries, name_error)

    def _tensor_form(self) -> OwnTensors:
        return gym_tensors(self, GymWrapper)

    def on_tensors(self) -> VectorTensors:
        """What steps and resets its vector environment on tensors.

        Raises:
            NotNative: the environment returns none, as far as is known; it reads info; or see :class:`VectorTensors`.
        """
        if not self.returns_tensors:
            raise NotNative("its environment has not returned tensors so far")
        if self.info_dict_reader:
            raise NotNative("it reads info")
        if self._vector is None or self._vector.gym is not self._env:
            self._vector = VectorTensors(self, self._observations, self._actions)
        return self._vector

    def _on_tensors(self) -> VectorTensors | None:
        try:
            return self.on_tensors() if self.returns_tensors else None
        except NotNative:
            return None

    def tensordict_over(self, values: Mapping[NestedKey, torch.Tensor]) -> TensorDict:
        """The data that tensors of the batch are, over their memory."""
        nested: dict[str, Any] = {}
        for key, value in values.items():
            place(nested, key, value)
        return unchecked_td(nested, self.batch_size, device=self.device)

    # The object itself ------------------------------------------------------------------------

    @property
    def gym_env(self) -> Any:
        """The gymnasium environment."""
        return self._env

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            env = self.__dict__.get("_env")
            if env is None or name.startswith("__"):
                raise
            return getattr(env, name)

    @property
    def env_name(self) -> str:
        """The id of the gymnasium environment; its class's name where it has none."""
        spec = self._env.spec
        return str(spec.id) if spec is not None else type(self._env.unwrapped).__name__

    def __repr__(self) -> str:
        name = self.env_name if "_env" in self.__dict__ else "?"
        return f"{type(self).__name__}(env={name}, batch_size={list(self.batch_size)}, device={self.device})"


class GymEnv(GymWrapper):
    """Makes a gymnasium environment by its name.

    :class:`GymWrapper` says how spaces become entries, and has the options that are not listed below.

    Args:
        env_name: id of a registered environment. Packages that register well-known ones (Atari, MiniGrid,
            gymnasium-robotics, ...) are imported for you. For others, write ``"module:Name-v0"``.
        num_envs: number of environments to step together, batch size ``[num_envs]``; None or 0: one, batch size ``[]``.
        num_workers: above 1, makes a :class:`~rollwright.envs.ParallelEnv` of this many, batch size ``[num_workers]``
            or ``[num_workers, num_envs]``.
        vectorization_mode: ``"sync"`` steps environments one after the other, ``"async"`` in one process each;
            ``"vector_entry_point"`` uses the environment's own vector form.
        frame_skip: frames of the environment in one step, in all. An environment that skips frames by itself (Atari's
            ``frameskip``) gets this number. Others are stepped this often, and their rewards are added up.
        pixels_only: with ``from_pixels``: leave out all other observations.
        policy: see :class:`~rollwright.envs.EnvBase`.
        **kwargs: arguments of ``gymnasium.make``. Type checkers know those of common environments; pass others in a
            ``dict[str, Any]``, as ``**settings``.

    Raises:
        EnvError: gymnasium cannot make the environment; its message is repeated.
        MissingExtraError: a package is not installed; the message names it.

    Example:
        >>> env = GymEnv("CartPole-v1")
        >>> env
        GymEnv(env=CartPole-v1, batch_size=[], device=None)
        >>> env.rollout(3)["action"].shape, env.rollout(3)["next", "reward"].shape
        (torch.Size([3, 2]), torch.Size([3, 1]))
        >>> GymEnv("Pendulum-v1", num_envs=2).rollout(3).batch_size
        torch.Size([2, 3])
    """

    def __new__(cls, *args: Any, num_workers: int = 1, **kwargs: Any) -> Self:
        """A ``ParallelEnv`` of ``num_workers``, where there are more than one."""
        if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
            raise ValueError(f"num_workers: expected a number of at least 1, got {num_workers!r}.")
        if num_workers == 1:
            return super().__new__(cls)
        several: Any = _extensions["num_workers"](partial(cls, *args, **kwargs), num_workers)
        return cast(Self, several)

    def __init__(
        self,
        env_name: str,
        *,
        num_envs: int | None = None,
        num_workers: int = 1,
        vectorization_mode: Literal["sync", "async", "vector_entry_point"] = "sync",
        categorical_action_encoding: bool = False,
        device: torch.device | str | int | None = None,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int | None = None,
        allow_done_after_reset: bool = False,
        run_type_checks: bool = False,
        disable_env_checker: bool = True,
        policy: Callable[..., Any] | None = None,
        **kwargs: Unpack[GymKeywords],
    ) -> None:
        if not isinstance(env_name, str):
            raise TypeError(f"env_name: expected the id of an environment, got {env_name!r}. GymWrapper takes objects.")
        if num_envs is not None and (not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 0):
            raise ValueError(
                f"num_envs: expected a number of environments, or None for a single one, got {num_envs!r}."
            )
        given = {**kwargs, "disable_env_checker": disable_env_checker}
        env = make(env_name, num_envs or 0, vectorization_mode, frame_skip, from_pixels, pixels_only, given)
        root = name_of_observation(env, from_pixels, pixels_only)
        self._setup(env, root, categorical_action_encoding, device, allow_done_after_reset, run_type_checks)
        self.from_pixels, self.pixels_only = from_pixels, pixels_only

    available_envs = Available(lambda: list(gymnasium.registry), "Names that are registered with gymnasium now.")


def _has_tensors(values: Any) -> bool:
    """Whether what a reset has returned, observation and info, are tensors."""
    value = values[0] if isinstance(values, (tuple, list)) and values else None
    while isinstance(value, dict) and value:
        value = next(iter(value.values()))
    return isinstance(value, torch.Tensor)


def _described(values: Any) -> str:
    return f"{len(values)} values" if isinstance(values, (tuple, list)) else type(values).__name__


def _as_value(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
