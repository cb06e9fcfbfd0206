"""BraxEnv, GymnaxEnv and their wrappers: environments that are functions of JAX, a batch of them on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rollwright._foreign import class_path, is_brax_env, is_gymnax_env, kind_in
from rollwright._keys import place
from rollwright.data.entries import unchecked_td
from rollwright.data.specs import Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded
from rollwright.envs.base import EnvBase
from rollwright.envs.libs.building import Available
from rollwright.envs.own_tensors import OwnTensors
from rollwright.errors import EnvError, require


class JaxFunctions(NamedTuple):
    """A single environment as functions of JAX.

    Attributes:
        begin: from a key to an observation and a state.
        act: from a key, a state and an action to observation, state, reward, terminated, truncated.
        keep: from the state of an episode that has ended and the one that the next begins with, to that state with what
            goes on through episodes.
    """

    begin: Callable[[Any], tuple[Any, Any]]
    act: Callable[[Any, Any, Any], tuple[Any, Any, Any, Any, Any]]
    keep: Callable[[Any, Any], Any] = lambda ended, fresh: fresh


class JaxEnv(EnvBase):
    """``num_envs`` environments of JAX, batch size ``[num_envs]``: base of :class:`BraxWrapper` and its kin.

    A step is one compiled call, and so is a reset of what has ended, by a mask that only the device reads. Arrays of
    JAX become tensors over the same memory (DLPack), and so do actions. A key, split at each reset (and at each step of
    gymnax) into one for the next call and one for each environment, is all the randomness: ``set_seed(n)`` sets
    ``jax.random.PRNGKey(n)``. The state of the simulation is part of what :func:`~rollwright.envs.save_env` saves.

    Args:
        functions: of a single environment.
        num_envs: how many.
        action: spec of the action of one.
        fresh_resets: whether an episode begins at a state of its own; else at the one that the first episode of the
            environment began at. A fresh state is computed for all environments in each step in which any has ended.
        device: of the tensors, which JAX has to have; None: JAX's default.
        extra: of rollwright, that installs the library.
    """

    returns_copies = True
    resets_by_mask = True
    _not_saved = ("_jax", "_jax_device", "_step_all", "_begin_all", "_begin_some", "inner")

    def __init__(
        self,
        functions: JaxFunctions,
        num_envs: int,
        action: TensorSpec,
        *,
        fresh_resets: bool,
        device: torch.device | str | int | None,
        extra: str,
    ) -> None:
        if not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1:
            raise ValueError(f"num_envs: expected a number of environments of at least 1, got {num_envs!r}.")
        self_jax = require("jax", extra=extra, purpose=type(self).__name__)
        place_of = _jax_device(self_jax, device)
        on = torch.device("cpu") if place_of.platform == "cpu" else torch.device("cuda", place_of.local_hardware_id)
        super().__init__(device=on, batch_size=[num_envs])
        self._jax, self._jax_device = self_jax, place_of
        self.fresh_resets = bool(fresh_resets)
        self._key = self._key_of(int(np.random.SeedSequence().generate_state(1)[0]))
        self._now: Any = None  # observations and states
        self._first: Any = None  # those of the first episodes, where resets are not fresh
        self._compile(functions)
        seen, _ = self_jax.eval_shape(functions.begin, self._key)
        self._set_specs(seen, action)

    def _compile(self, functions: JaxFunctions) -> None:
        jax, num, fresh = self._jax, self.batch_size[0], self.fresh_resets
        numpy = jax.numpy

        def keys_of(key: Any) -> tuple[Any, Any]:
            keys = jax.random.split(key, num + 1)
            return keys[0], keys[1:]

        def step_all(key: Any, state: Any, action: Any) -> Any:
            key, keys = keys_of(key)
            seen, state, *outcome = jax.vmap(functions.act)(keys, state, action)
            reward, terminated, truncated = (value.reshape(num, 1) for value in outcome)
            terminated, truncated = terminated.astype(bool), truncated.astype(bool)
            flags = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
            return key, (seen, state), {"reward": reward.astype(numpy.float32), **flags}

        def begin_all(key: Any) -> Any:
            key, keys = keys_of(key)
            return key, jax.vmap(functions.begin)(keys)

        def begin_some(key: Any, first: Any, now: Any, mask: Any) -> Any:
            mask = mask.reshape(num)

            def begun(key: Any) -> Any:
                key, (seen, state) = begin_all(key) if fresh else (key, first)
                state = jax.vmap(functions.keep)(now[1], state) if not fresh else state

                def chosen(new: Any, old: Any) -> Any:
                    return numpy.where(mask.reshape(num, *[1] * (old.ndim - 1)), new, old)

                return key, jax.tree.map(chosen, (seen, state), now)

            return jax.lax.cond(mask.any(), begun, lambda key: (key, now), key)

        self._step_all, self._begin_all, self._begin_some = map(jax.jit, (step_all, begin_all, begin_some))

    def _set_specs(self, seen: Any, action: TensorSpec) -> None:
        num, device = self.batch_size[0], self.device
        observed = Composite(shape=(num,), device=device)
        for key, leaf in self._named(seen).items():
            dtype = torch.from_numpy(np.zeros(1, leaf.dtype)).dtype
            observed[key] = Unbounded((num, *leaf.shape), device=device, dtype=dtype)
        flag = Categorical(2, shape=(num, 1), dtype=torch.bool, device=device)
        self.observation_spec = observed
        self.action_spec = action.expand((num, *action.shape)).to(device)
        self.reward_spec = Unbounded((num, 1), device=device, dtype=torch.float32)
        self.done_spec = Composite(done=flag, terminated=flag, truncated=flag, shape=(num,), device=device)

    def _named(self, seen: Any) -> dict[Any, Any]:
        """Arrays of an observation by key: a dictionary has its own, anything else is ``"observation"``."""
        found: dict[Any, Any] = {}
        for path, leaf in self._jax.tree_util.tree_flatten_with_path(seen)[0]:
            names = tuple(str(getattr(one, "key", getattr(one, "name", getattr(one, "idx", one)))) for one in path)
            names = names if isinstance(seen, Mapping) else ("observation", *names)
            found[names[0] if len(names) == 1 else names] = leaf
        return found

    # Stepping ---------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict.get("action")
        if isinstance(self.action_spec, OneHot):
            action = self.action_spec.to_categorical(action)
        self._key, self._now, outcome = self._step_all(self._key, self._now[1], self._as_array(action))
        return self._data(self._now[0], outcome)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if (seed := kwargs.pop("seed", None)) is not None:
            self._key = self._key_of(seed)
        if kwargs:
            raise TypeError(f"reset() got {', '.join(kwargs)}, and takes seed alone")
        if mask is None or self._now is None:
            self._key, self._now = self._begin_all(self._key)
            self._first = None if self.fresh_resets else self._now
            return self._data(self._now[0], {}).clone()  # the first states are read again
        self._key, self._now = self._begin_some(self._key, self._first, self._now, self._as_array(mask))
        return self._data(self._now[0], {})

    def _set_seed(self, seed: int | None) -> int | None:
        if seed is not None:
            self._key = self._key_of(seed)
        return seed

    def _key_of(self, seed: int) -> Any:
        with self._jax.default_device(self._jax_device):
            return self._jax.random.PRNGKey(seed)

    # Data -------------------------------------------------------------------------------------

    def _as_array(self, value: Tensor) -> Any:
        return self._jax.dlpack.from_dlpack(value.detach().contiguous(), device=self._jax_device)

    def _data(self, seen: Any, outcome: Mapping[str, Any]) -> TensorDict:
        nested: dict[str, Any] = {}
        for key, value in (*self._named(seen).items(), *outcome.items()):
            place(nested, key, torch.utils.dlpack.from_dlpack(value))
        return unchecked_td(nested, self.batch_size, device=self.device)

    def _tensor_form(self) -> OwnTensors:
        return OwnTensors(self, JaxEnv, lambda td: self._step(td), lambda td, **kwargs: self._reset(td, **kwargs))


def _jax_device(jax: Any, device: torch.device | str | int | None) -> Any:
    """The device of JAX that a device of torch is.

    Raises:
        EnvError: JAX has no such device.
    """
    if device is None:
        return jax.devices()[0]
    wanted = torch.device(device)
    try:
        return jax.devices("cpu" if wanted.type == "cpu" else "gpu")[wanted.index or 0]
    except (IndexError, RuntimeError) as error:
        raise EnvError(
            f"device: expected one that JAX has ({', '.join(map(str, jax.devices()))}), got {wanted}: {error}. Install "
            "jax[cuda12], or pass device='cpu'."
        ) from error


class BraxWrapper(JaxEnv):
    """An environment of Brax, or of MuJoCo Playground (MJX), that exists already, ``num_envs`` of them.

    Entries: ``"observation"``, or the keys of a dictionary of observations, ``"action"`` float32 from -1 to 1, and
    ``"reward"``. Brax's own wrappers for batches and resets are taken off and their arguments kept, so that the last
    observation of an episode is in ``"next"``. ``truncated`` says that ``episode_length`` is over.

    By default, episodes begin at the states that the first ones began at, as in Brax's training: a fresh reset costs
    about as much as a step of all environments, and is needed in nearly every step where there are thousands.

    Args:
        env: what ``brax.envs.get_environment(...)`` or ``brax.envs.create(...)`` returns.
        num_envs: how many; None: the ``batch_size`` of ``create``.
        episode_length: steps after which an episode is truncated; None: that of ``create``, else never.
        action_repeat: how often an action is repeated.
        fresh_resets: see :class:`JaxEnv`.
        device: likewise.

    Raises:
        TypeError: ``env`` is no environment of Brax, or has wrappers around those for batches.
        ValueError: nobody says how many there are.

    Example:
        >>> from brax import envs  # doctest: +SKIP
        >>> env = BraxWrapper(envs.get_environment("ant"), num_envs=4096, episode_length=1000)  # doctest: +SKIP
        >>> env.reset()["observation"].shape  # doctest: +SKIP
        torch.Size([4096, 27])
    """

    def __init__(
        self,
        env: Any,
        num_envs: int | None = None,
        *,
        episode_length: int | None = None,
        action_repeat: int = 1,
        fresh_resets: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        if not is_brax_env(env):
            raise TypeError(
                f"env: expected an environment of Brax, got {class_path(env)}. Pass what "
                "brax.envs.get_environment(...) returns, or call BraxEnv(env_name, num_envs)."
            )
        given, bare = env, env
        while layer := next((name for name in kind_in("brax", bare) if name in _LAYERS), None):
            if layer == "VmapWrapper":
                num_envs = bare.batch_size if num_envs is None else num_envs
            elif layer == "EpisodeWrapper":
                episode_length = bare.episode_length if episode_length is None else episode_length
                action_repeat = bare.action_repeat if action_repeat == 1 else action_repeat
            bare = bare.env
        if "DomainRandomizationVmapWrapper" in kind_in("brax", bare):
            raise TypeError("env: expected one environment, got DomainRandomizationVmapWrapper, which makes many.")
        if num_envs is None:
            raise ValueError(
                "num_envs: expected a number of environments, got None, and the environment names no batch_size. Pass "
                "BraxWrapper(env, num_envs=1024), or brax.envs.create(name, batch_size=1024)."
            )
        single = bare
        if episode_length is not None or action_repeat != 1:
            training = _brax("brax.envs.wrappers.training")
            single = training.EpisodeWrapper(bare, episode_length or np.iinfo(np.int32).max, action_repeat)

        def begin(key: Any) -> tuple[Any, Any]:
            state = single.reset(key)
            return state.obs, state

        def act(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
            state = single.step(state, action)
            truncated = state.info.get("truncation", 0 * state.done) > 0
            return state.obs, state, state.reward, (state.done > 0) & ~truncated, truncated

        def keep(ended: Any, fresh: Any) -> Any:
            held = {
                name: ended.info[name] for name in ("rng",) if name in ended.info
            }  # else all episodes draw the same
            return fresh.replace(info={**fresh.info, **held}) if held else fresh

        self.inner, self.episode_length, self.action_repeat = None, episode_length, action_repeat
        action = Bounded(-1.0, 1.0, shape=(int(bare.action_size),), dtype=torch.float32)
        functions = JaxFunctions(begin, act, keep)
        super().__init__(functions, num_envs, action, fresh_resets=fresh_resets, device=device, extra="brax")
        self.inner = given


_LAYERS = ("AutoResetWrapper", "EpisodeWrapper", "VmapWrapper")


def _brax(module: str) -> Any:
    with warnings.catch_warnings():  # of what it imports
        warnings.simplefilter("ignore")
        return require(module, extra="brax", purpose="BraxEnv")


class BraxEnv(BraxWrapper):
    """Environments of Brax by name.

    Args:
        env_name: such as ``"ant"``.
        num_envs: how many are simulated together: the batch size is ``[num_envs]``.
        episode_length: see :class:`BraxWrapper`.
        action_repeat: likewise.
        fresh_resets: likewise.
        device: likewise.
        **kwargs: go to ``brax.envs.get_environment``: ``backend="mjx"``.

    Raises:
        MissingExtraError: Brax is not installed.
        EnvError: Brax cannot make it; its message is repeated.
    """

    def __init__(
        self,
        env_name: str,
        num_envs: int,
        *,
        episode_length: int | None = 1000,
        action_repeat: int = 1,
        fresh_resets: bool = False,
        device: torch.device | str | int | None = None,
        **kwargs: Any,
    ) -> None:
        make = _brax("brax.envs").get_environment
        try:
            with warnings.catch_warnings():  # that other packages are newer
                warnings.simplefilter("ignore")
                env = make(env_name, **kwargs)
        except Exception as error:
            raise EnvError(f"BraxEnv({env_name!r}): Brax raised {type(error).__name__}: {error}") from error
        super().__init__(
            env,
            num_envs,
            episode_length=episode_length,
            action_repeat=action_repeat,
            fresh_resets=fresh_resets,
            device=device,
        )

    available_envs = Available(lambda: sorted(_brax("brax.envs")._envs), "Names that are registered with Brax now.")


class GymnaxWrapper(JaxEnv):
    """An environment of gymnax that exists already, ``num_envs`` of them.

    Discrete actions are one-hot unless ``categorical_action_encoding``. The last observation of an episode is in
    ``"next"``. Episodes begin at fresh states, which cost next to nothing here.

    Args:
        env: what ``gymnax.make(...)`` returns first.
        params: what it returns second; None: ``env.default_params``.
        num_envs: how many.
        categorical_action_encoding: discrete actions as integers from 0.
        fresh_resets: see :class:`JaxEnv`.
        device: likewise.

    Raises:
        TypeError: ``env`` is no environment of gymnax.

    Example:
        >>> import gymnax  # doctest: +SKIP
        >>> env = GymnaxWrapper(*gymnax.make("CartPole-v1"), num_envs=4096)  # doctest: +SKIP
    """

    def __init__(
        self,
        env: Any,
        params: Any = None,
        *,
        num_envs: int,
        categorical_action_encoding: bool = False,
        fresh_resets: bool = True,
        device: torch.device | str | int | None = None,
    ) -> None:
        if not is_gymnax_env(env):
            raise TypeError(
                f"env: expected an environment of gymnax, got {class_path(env)}. Pass what gymnax.make(...) returns, "
                "GymnaxWrapper(*gymnax.make(name), num_envs=1024), or call GymnaxEnv(env_name, num_envs)."
            )
        params = env.default_params if params is None else params
        space = env.action_space(params)

        def begin(key: Any) -> tuple[Any, Any]:
            seen: tuple[Any, Any] = env.reset_env(key, params)
            return seen

        def act(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
            seen, state, reward, terminated, _ = env.step_env(key, state, action, params)
            return seen, state, reward, terminated, env.is_truncated(state, params)

        if hasattr(space, "n"):
            choices = Categorical if categorical_action_encoding else OneHot
            action: TensorSpec = choices(int(space.n))
        else:
            low, high = (torch.from_numpy(np.broadcast_to(one, space.shape).copy()) for one in (space.low, space.high))
            action = Bounded(low, high, shape=space.shape, dtype=torch.float32)
        self.inner = None
        super().__init__(
            JaxFunctions(begin, act), num_envs, action, fresh_resets=fresh_resets, device=device, extra="gymnax"
        )
        self.inner = env


class GymnaxEnv(GymnaxWrapper):
    """Environments of gymnax by name.

    Args:
        env_name: such as ``"CartPole-v1"``.
        num_envs: how many are simulated together: the batch size is ``[num_envs]``.
        categorical_action_encoding: see :class:`GymnaxWrapper`.
        fresh_resets: see :class:`JaxEnv`.
        device: likewise.
        **kwargs: go to ``gymnax.make``.

    Raises:
        MissingExtraError: gymnax is not installed.
        EnvError: gymnax cannot make it; its message is repeated.
    """

    def __init__(
        self,
        env_name: str,
        num_envs: int,
        *,
        categorical_action_encoding: bool = False,
        fresh_resets: bool = True,
        device: torch.device | str | int | None = None,
        **kwargs: Any,
    ) -> None:
        gymnax = require("gymnax", extra="gymnax", purpose="GymnaxEnv")
        try:
            env, params = gymnax.make(env_name, **kwargs)
        except Exception as error:
            raise EnvError(f"GymnaxEnv({env_name!r}): gymnax raised {type(error).__name__}: {error}") from error
        super().__init__(
            env,
            params,
            num_envs=num_envs,
            categorical_action_encoding=categorical_action_encoding,
            fresh_resets=fresh_resets,
            device=device,
        )

    available_envs = Available(
        lambda: list(require("gymnax", extra="gymnax", purpose="GymnaxEnv.available_envs").registered_envs),
        "Names that are registered with gymnax now.",
    )
