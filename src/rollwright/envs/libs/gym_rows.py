"""Single gymnasium environments, stepped in turn, and the readers of their ``info`` dictionaries."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import torch
from tensordict import NonTensorData, TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey, as_tuple, is_private, unravel
from rollwright._tensors import as_tensor
from rollwright.data.specs import Composite, NonTensor, TensorSpec, Unbounded
from rollwright.envs.arrays import Entry, NameRow, Values, check_open, raise_named
from rollwright.envs.libs.library import LibraryEnv
from rollwright.envs.utils import check_env_specs
from rollwright.errors import EnvError, SpecError

if TYPE_CHECKING:
    from rollwright.envs.libs.gym import GymWrapper


Info = Mapping[str, Any]


class BaseInfoDictReader(abc.ABC):
    """Writes entries of ``info`` into the data of a step or a reset."""

    @property
    @abc.abstractmethod
    def info_spec(self) -> Composite | None:
        """Specs of what is written, for one environment; None while they are not known."""

    @abc.abstractmethod
    def __call__(self, info_dict: Info, tensordict: TensorDictBase) -> TensorDictBase:
        """Write into ``tensordict`` (content of ``"next"``, or a reset's result) and return it."""


class default_info_dict_reader(BaseInfoDictReader):
    """Reads entries of ``info`` as tensors; an entry that is not there is filled with zeros.

    Args:
        keys: which entries, nested ones as tuples, such as ``("episode", "r")``. None: those of ``spec``,
            or, without a spec, all that the environment returns from a first reset and step and whose
            names are free.
        spec: their specs for one environment, in order of ``keys`` or by key. Without it, entries
            named by ``keys`` are float32 scalars, and entries found in the environment are what they
            were when found.
        ignore_private: do not look for entries whose name begins with an underscore.

    Raises:
        ValueError: ``spec`` and ``keys`` are of different lengths.

    Example:
        >>> from tensordict import TensorDict
        >>> reader = default_info_dict_reader(["speed"])
        >>> reader({"speed": 2.0, "other": 1}, TensorDict())["speed"], reader({}, TensorDict())["speed"]
        (tensor(2.), tensor(0.))
    """

    def __init__(
        self,
        keys: Sequence[NestedKey] | None = None,
        spec: Sequence[TensorSpec] | Mapping[NestedKey, TensorSpec] | Composite | None = None,
        ignore_private: bool = True,
    ) -> None:
        self.ignore_private = ignore_private
        self._spec: Composite | None = None
        self._leaves: dict[NestedKey, TensorSpec] = {}
        names = None if keys is None else [unravel(key) for key in keys]
        if spec is None:
            if names is not None:
                self._announce({name: Unbounded((), device="cpu") for name in names})
        elif isinstance(spec, (Composite, Mapping)):
            pairs = dict(spec.leaves().items() if isinstance(spec, Composite) else spec.items())
            if names is not None and set(names) != {unravel(key) for key in pairs}:
                raise ValueError(f"spec: expected specs of the keys {names}, got those of {list(pairs)}.")
            self._announce(pairs)
        else:
            if names is None or len(spec) != len(names):
                raise ValueError(
                    f"spec: expected one spec for each of the keys {names}, got {len(spec)}. Give as many "
                    "as there are keys, or a dictionary by key."
                )
            self._announce(dict(zip(names, spec, strict=True)))

    def _announce(self, specs: Mapping[NestedKey, TensorSpec]) -> None:
        self._spec = _composite(specs)
        self._leaves = self._spec.leaves()

    @property
    def keys(self) -> list[NestedKey] | None:
        """The entries that are read; None while they are not known."""
        return None if self._spec is None else list(self._spec.leaves())

    @property
    def info_spec(self) -> Composite | None:
        """Specs of the entries, for one environment."""
        return self._spec

    def discover(self, infos: Sequence[Info], batch_ndim: int, taken: Collection[NestedKey] = ()) -> None:
        """Take the entries of these dictionaries, but for the names that are taken, as what is to be read."""
        found: dict[NestedKey, TensorSpec] = {}
        for info in infos:
            for path, value in _flatten(info):
                key = unravel(path)
                if key not in taken and not (self.ignore_private and is_private(key)):
                    found[key] = _spec_like(value, batch_ndim)
        self._announce(found)

    def __call__(self, info_dict: Info, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the entries.

        Raises:
            SpecError: an entry does not have the shape of its spec.
        """
        if self._spec is None:
            self.discover([info_dict], tensordict.ndim)
        for key, value in self.entries(info_dict, tensordict.batch_size).items():
            tensordict.set(key, value)
        return tensordict

    def entries(self, info_dict: Info, batch_size: torch.Size) -> dict[NestedKey, Any]:
        """The same without a TensorDict: values by key.

        Args:
            info_dict: of a step or a reset.
            batch_size: of the environment.

        Raises:
            SpecError: see above.
        """
        found: dict[NestedKey, Any] = {}
        for key, spec in self._leaves.items():
            value = _look_up(info_dict, key)
            if isinstance(spec, NonTensor):
                found[key] = NonTensorData(value, batch_size=batch_size)
            elif value is None:
                found[key] = spec.zero(batch_size)
            else:
                found[key] = _as_tensor(key, value, spec, batch_size)
        return found


InfoReader = Callable[[Info, TensorDictBase], TensorDictBase | None]


class InfoReadingEnv(LibraryEnv):
    """An environment with ``info`` dictionaries, of which readers bring entries into the data.

    Attributes:
        info_dict_reader: the readers, in the order in which they are called.
    """

    info_dict_reader: list[InfoReader]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.info_dict_reader = []

    def _read_info_into(self, info: Any, out: TensorDictBase) -> None:
        try:
            for reader in self.info_dict_reader:
                reader(info, out)
        except SpecError as error:
            raise EnvError(f"{self}: {error}") from error

    def _info_entries(self, info: Any) -> dict[NestedKey, Any] | None:
        """What readers make of ``info``, where none of them needs a TensorDict for that; else None."""
        found: dict[NestedKey, Any] = {}
        try:
            for reader in self.info_dict_reader:
                if type(reader) is not default_info_dict_reader or reader.info_spec is None:
                    return None
                found.update(reader.entries(info, self.batch_size))
        except SpecError as error:
            raise EnvError(f"{self}: {error}") from error
        return found

    def set_info_dict_reader(self, info_dict_reader: InfoReader | None = None, ignore_private: bool = True) -> Self:
        """Read entries of ``info`` into the data, with every step and reset.

        Args:
            info_dict_reader: a :class:`BaseInfoDictReader`, or any function of ``info`` and the
                TensorDict to write into. None: a :class:`default_info_dict_reader`.
            ignore_private: for the default reader.

        Returns:
            The environment. A reader that does not declare what it reads is shown a reset and a random
            step first, so that its entries get specs; reset the environment afterwards.

        Raises:
            ValueError: the reader writes an entry that the environment has.

        Example:
            >>> from rollwright.envs import GymEnv
            >>> env = GymEnv("CartPole-v1").set_info_dict_reader(default_info_dict_reader(["lives"]))
            >>> env.rollout(2)["next", "lives"]
            tensor([0., 0.])
        """
        reader = info_dict_reader
        if reader is None:
            reader = default_info_dict_reader(ignore_private=ignore_private)
        taken = {*self.observation_keys, *self.action_keys, *self.reward_keys, *self.done_keys}
        if isinstance(reader, default_info_dict_reader) and reader.info_spec is None:
            infos: list[Info] = []
            self.info_dict_reader.append(lambda info, _: infos.append(info))
            try:
                self.rand_step(self.reset())
            finally:
                self.info_dict_reader.pop()
            reader.discover(infos, self.ndim, taken)
        spec = getattr(reader, "info_spec", None)
        if spec is not None:
            known = self.full_observation_spec.clone()
            for key, leaf in spec.leaves().items():
                if key in taken:
                    raise ValueError(
                        f"info_dict_reader: {self} has an entry {key!r} already. Leave it out of the "
                        "reader, or write a function that puts it under another name."
                    )
                known.set(key, leaf.expand((*self.batch_size, *leaf.shape)))
            self.observation_spec = known
        self.info_dict_reader.append(reader)
        return self

    def auto_register_info_dict(
        self, ignore_private: bool = True, *, info_dict_reader: InfoReader | None = None
    ) -> Self:
        """:meth:`set_info_dict_reader`, then check that data and specs agree; returns the environment."""
        if self.info_dict_reader:
            raise RuntimeError(f"{self} has an info reader already. Call auto_register_info_dict on a new environment.")
        self.set_info_dict_reader(info_dict_reader, ignore_private)
        check_env_specs(self)
        return self


def _composite(specs: Mapping[NestedKey, TensorSpec]) -> Composite:
    composite = Composite()
    for key, spec in specs.items():
        composite.set(key, spec)
    return composite


def _flatten(info: Info, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in info.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*prefix, str(name)))
        else:
            yield (*prefix, str(name)), value


def _look_up(info: Info, key: NestedKey) -> Any:
    value: Any = info
    for name in as_tuple(key):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _numeric(value: Any) -> np.ndarray[Any, Any] | None:
    """The value as an array of numbers; an array of objects is stacked, its gaps filled with zeros."""
    array = np.asarray(value)
    if array.dtype == object and array.ndim:
        known = [np.asarray(row) for row in array if row is not None]
        if not known or any(row.shape != known[0].shape for row in known):
            return None
        array = np.stack([np.zeros_like(known[0]) if row is None else np.asarray(row) for row in array])
    return array if array.dtype.kind in "biuf" else None


def _spec_like(value: Any, batch_ndim: int) -> TensorSpec:
    array = _numeric(value)
    if array is None or array.ndim < batch_ndim:
        return NonTensor((), example_data=value)
    return Unbounded(array.shape[batch_ndim:], dtype=as_tensor(array).dtype, device="cpu")


def _as_tensor(key: NestedKey, value: Any, spec: TensorSpec, batch: torch.Size) -> Tensor:
    array = _numeric(value)
    expected = torch.Size((*batch, *spec.shape))
    if array is None or array.size != expected.numel():
        got = type(value).__name__ if array is None else f"shape {list(array.shape)}"
        raise SpecError(
            f"info entry {key!r}: expected numbers of shape {list(expected)}, got {got}. Give the reader "
            f"the entry's spec: default_info_dict_reader([{key!r}], spec=[...])."
        )
    return torch.tensor(array, dtype=spec.dtype, device="cpu").reshape(expected)


FLAG_TYPES = (bool, np.bool_)  # what flags of a single environment are, as a rule


class GymRows:
    """Steps single environments whose spaces are equal.

    What gymnasium returns as a rule is written at once: a tuple of five, an array that is the one observation,
    a number, two flags. All else goes through :meth:`GymWrapper.read_step`, which converts it or reports it.

    Args:
        envs: the environments.
        entries: what each returns, but for the reward and flags.
        name_error: see :meth:`ArrayEnv.in_turn`.
    """

    def __init__(self, envs: Sequence[GymWrapper], entries: dict[NestedKey, Entry], name_error: NameRow) -> None:
        first, number = envs[0], len(envs)
        self._envs = [(env, env.gym_env) for env in envs]
        self._name_error, self._number = name_error, number
        self._actions = first.row_writer(number)
        self._memory = [
            (key, (number, *(shape[:-1] if column else shape)), dtype)
            for key, (shape, dtype, column) in entries.items()
        ]
        self._key, self._dtype, self._shape = first.plain_array
        self._reward_dtype = first.reward_dtype

    def __call__(self, root: Values) -> Values | None:
        """Step all of them.

        Args:
            root: holds the actions, ``[number, ...]``.

        Returns:
            The content of ``"next"``; None: an action cannot be taken, and nothing was stepped.
        """
        try:
            actions = self._actions.rows(root)
        except SpecError:
            return None
        number, dtype, shape = self._number, self._dtype, self._shape
        out: Values = {key: np.empty(size, kind) for key, size, kind in self._memory}
        observed: Any = out.get(self._key)
        out["reward"] = rewards = np.empty(number, self._reward_dtype)
        out["terminated"] = terminated = np.zeros(number, np.bool_)
        out["truncated"] = truncated = np.zeros(number, np.bool_)
        for i, (env, gym_env) in enumerate(self._envs):
            try:
                if env.is_closed:
                    check_open(env, "step")
                values = gym_env.step(actions[i])
                if type(values) is tuple and len(values) == 5:
                    observation, reward, ended, cut, _ = values
                    if isinstance(reward, (float, int)) and type(ended) in FLAG_TYPES and type(cut) in FLAG_TYPES:
                        plain = type(observation) is np.ndarray and observation.dtype == dtype
                        if plain and observation.shape == shape:
                            observed[i] = observation
                        else:
                            env.write_observation(observation, out, i)
                        rewards[i] = reward
                        if ended:
                            terminated[i] = True
                        if cut:
                            truncated[i] = True
                        continue
                for key, value in env.read_step(values).items():
                    if key != "done":
                        out[key][i] = value
            except Exception as error:
                self._fail(i, env, error)
        out["done"] = terminated | truncated
        return out

    def _fail(self, i: int, env: GymWrapper, error: Exception) -> NoReturn:
        """Raise what an environment's step ended with, as :meth:`LibraryArrays.step` and who calls it do."""
        try:
            raise_named(env, "step", error)
        except EnvError as named:
            raise self._name_error(i, named) from named
