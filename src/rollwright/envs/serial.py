"""SerialEnv: several environments in one process, stepped in turn; its array form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Unpack

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright._processes.channel import ByValue
from rollwright.envs.arrays import (
    STEPPED,
    ArrayEnv,
    Entry,
    Rows,
    UnfitOutcome,
    Values,
    array_form,
    check_open,
    refuse_overrides,
)
from rollwright.envs.base import EnvBase, closed_on_error
from rollwright.envs.batched.base import ArrayFacts, BatchArrays, IgnoredOptions, IndexedEnvs, blank, check_ignored
from rollwright.envs.factories import (
    Factories,
    Factory,
    FactoryKwargs,
    call_each,
    check_apart,
    factories,
    made,
    own_kwargs,
    placed,
)
from rollwright.envs.recreation import RecreatedEnv, RecreationWarning, check_failure
from rollwright.errors import EnvError, NotNative, RollwrightError


class SerialArrays(BatchArrays):
    """The array form of a :class:`SerialEnv`: environments on arrays that are stepped in turn, one a row.

    Raises:
        NotNative: one of its environments has no array form, or they differ.
    """

    def __init__(self, env: SerialEnv, known: type[SerialEnv]) -> None:
        refuse_overrides(env, known)
        self._env, self._openings = env, env.openings
        self._parts = [array_form(part, unfit=True) for part in env.known_parts()]
        self._describe(env, [ArrayFacts.of(part) for part in self._parts], len(self._parts), below=True)
        self.reads_presets = any(part.reads_presets for part in self._parts)
        self._in_turn = self._parts[0].in_turn(self._parts, env.named_error)
        self._last: Values = {}  # outcomes of the step before

    def check(self) -> None:
        """Test that the environment is what this form was made of; to be called once a batch."""
        if self._env.openings != self._openings:
            raise NotNative("its environments were closed, and others were made")
        for part in self._parts:
            part.check()

    def step(self, root: Values, preset: Values) -> Values:
        """Act."""
        if self._env.is_closed:
            check_open(self._env, "step")
        marks, last = root.get(STEPPED), self._last
        taken: Sequence[Callable[[], Values]] | None = None
        if self._in_turn is not None and marks is None:
            stepped = self._in_turn(root)
            if isinstance(stepped, dict):
                self._last = dict(stepped)
                return stepped
            taken = stepped
        out: Values = blank({**self._outcome_forms, "truncated": self._outcome_forms["done"]})
        unfit: dict[int, UnfitOutcome] = {}
        if self.may_be_unfit:  # which may change what the policy has written
            out.update({key: value.copy() for key, value in preset.items() if key not in out})
        for i, part in enumerate(self._parts):
            if marks is not None and last and not np.any(marks[i]):
                for key, value in last.items():
                    out[key][i] = value[i]
                continue
            try:
                if taken is not None:
                    outcome = taken[i]()
                else:
                    mine = {key: root[key][i, ...] for key in self._seen(root)}  # with the dots, numbers are arrays too
                    if marks is not None and last:
                        mine[STEPPED] = marks[i]
                    outcome = part.step(mine, {key: value[i, ...] for key, value in preset.items()})
            except UnfitOutcome as found:
                unfit[i] = found
                continue
            except EnvError as error:
                raise self._env.named_error(i, error) from error
            for key, value in outcome.items():
                if key in out:
                    out[key][i] = value
        if unfit:
            raise self._unfit(self._env, "step", out, range(len(self._parts)), unfit)
        self._last = dict(out)
        return out

    def _seen(self, root: Values) -> Iterable[NestedKey]:
        """Keys of what an environment is given of the root."""
        return root if self.may_be_unfit else self.reads

    def see_roots(self, forms: Mapping[NestedKey, Entry]) -> None:
        """Note the forms of all that roots hold, but for what a policy writes; see :attr:`may_be_unfit`."""
        of_one = {key: Entry(shape[1:], dtype, column) for key, (shape, dtype, column) in forms.items()}
        for part in self._parts:
            part.see_roots(of_one)

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """Begin new trajectories in the environments that ``rows``, bool ``[*batch]``, marks; None: in all."""
        return self._reset(rows, None, kwargs)

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """The same where what goes on may be read: ``root``, from which the next step would be taken."""
        return self._reset(rows, root, kwargs)

    def _reset(self, rows: Rows | None, root: Values | None, kwargs: dict[str, Any]) -> Values:
        check_open(self._env, "reset")
        self._env.seed_for_reset(kwargs)
        out, is_first = blank(self.carried), rows is not None
        unfit: dict[int, UnfitOutcome] = {}
        places = range(len(self._parts)) if rows is None else _marked(rows)
        for i in places:
            part, mask = self._parts[i], None if rows is None else np.asarray(rows[i])
            try:
                own = own_kwargs(kwargs, i) if kwargs else kwargs
                if root is None or not self.may_be_unfit:
                    fresh = part.reset(mask, **own)
                else:
                    fresh = part.reset_from({key: value[i, ...] for key, value in root.items()}, mask, **own)
            except UnfitOutcome as found:
                unfit[i] = found
                continue
            except EnvError as error:
                raise self._env.named_error(i, error) from error
            for key, memory in out.items():
                memory[slice(None) if is_first else i] = fresh[
                    key
                ]  # the others are not read, and hold nothing by chance
            is_first = False
        if unfit:
            raise self._unfit(self._env, "reset", out, places, unfit, whole=root is None)
        return out


def _marked(rows: Rows) -> list[int]:
    """The environments of which a row, or a part of it, is marked."""
    marked: list[int] = np.flatnonzero(rows if rows.ndim == 1 else rows.reshape(len(rows), -1).any(-1)).tolist()
    return marked


class SerialEnv(IndexedEnvs):
    """Steps a batch of environments in this process, one after the other.

    The batch size is ``[num_workers, *batch]``, where ``batch`` is that of each environment. A partial reset reaches
    only the environments that ``"_reset"`` marks. Environments with different entries give lazily stacked TensorDicts.
    Arguments of :meth:`reset` go to all environments; ``list_of_kwargs=[{...}, ...]`` has arguments for each.

    Attributes that this class lacks are looked up in the environments: ``env.some_attribute`` is a list of their
    values, ``env.some_method(...)`` a list of what they return. ``env[1:3]`` is a view of two environments, as a batch.

    Args:
        num_workers: number of environments.
        create_env_fn: makes an environment; or a list with one such function for each.
        create_env_kwargs: arguments for it, or a list of them.
        device: device of the batch's data; None: that of the environments.
        serial_for_single: no effect; for programs that use ``ParallelEnv`` as well.
        mp_start_method: no effect, as ``serial_for_single``.
        num_threads: no effect, as ``serial_for_single``.
        num_sub_threads: no effect, as ``serial_for_single``.
        non_blocking: no effect, as ``serial_for_single``.
        on_env_failure: what to do if an environment raises in a step or a reset. ``"raise"``: raise an error that names
            it. ``"recreate"``: make another one in its place, while the others continue. The frame of the failed step
            repeats the last observation, with a reward of 0 and ``truncated`` and ``done`` set, so the trajectory ends.
            Running statistics are reset, and the seed is derived from the old one. The first failure gives a
            ``RuntimeWarning``; :attr:`recreations` counts all. Four failures of one environment without a step in
            between are raised. An environment that never returns from a step can be replaced only in another process,
            by ``ParallelEnv``.
        policy: see :class:`~rollwright.envs.EnvBase`.
        **ignored: options of other libraries without effect, so that programs written for them run; see
            :class:`~rollwright.envs.batched.base.IgnoredOptions`.

    Attributes:
        recreations: a list: how many environments were in each place before.

    Raises:
        TypeError: ``create_env_fn`` is no such function, or does not return an environment.
        ValueError: a list has another length than ``num_workers``, or environments do not fit together.
        EnvError: an environment raised, or could not be made.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
        >>> env.set_seed(0)
        1
        >>> env.rollout(5).batch_size
        torch.Size([2, 5])
        >>> env.env_name
        ['CartPole-v1', 'CartPole-v1']
    """

    _not_saved = ("_makers", "openings")

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Factories,
        *,
        create_env_kwargs: FactoryKwargs = None,
        device: torch.device | str | int | None = None,
        serial_for_single: bool = False,
        mp_start_method: Literal["forkserver", "spawn", "fork"] | None = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        non_blocking: bool = False,
        on_env_failure: Literal["raise", "recreate"] = "raise",
        policy: Callable[..., Any] | None = None,
        **ignored: Unpack[IgnoredOptions],
    ) -> None:
        check_ignored(ignored, type(self).__name__)
        makers = factories(num_workers, create_env_fn, create_env_kwargs)
        recreates = check_failure(on_env_failure)
        envs = self._made(makers, recreates)
        with closed_on_error(envs):
            super().__init__(envs, device)
        self._makers = [ByValue(maker) for maker in makers]
        self._recreates = recreates
        self._take(envs)

    def _made(self, makers: Sequence[Factory], recreates: bool) -> list[EnvBase]:
        envs: list[EnvBase] = []
        with closed_on_error(envs):
            for i, maker in enumerate(makers):
                envs.append(made(i, maker))
            check_apart(dict(enumerate(envs)))
            if not recreates:
                return envs
            name, notice = type(self).__name__, RecreationWarning(".recreations")
            return [
                RecreatedEnv(env, maker, i, partial(notice.warn, f"{name}[{i}]"))
                for i, (env, maker) in enumerate(zip(envs, makers, strict=True))
            ]

    def _take(self, envs: list[EnvBase]) -> None:
        for i, env in enumerate(envs):
            self.add_module(f"worker{i}", env)
        self._last: Sequence[TensorDictBase] | TensorDictBase | None = None  # outcomes of the step before
        self._cache.clear()
        self._envs = envs  # from here on, attributes are looked up in them, which may have a "worker0" too

    def known_parts(self) -> list[EnvBase]:
        """The environments that are already made."""
        return self._envs

    def _open(self) -> list[EnvBase]:
        self._take(self._made([maker.value for maker in self._makers], self._recreates))
        return self._envs

    @property
    def recreations(self) -> list[int]:
        """How many environments were in each place before."""
        return [env.recreations if isinstance(env, RecreatedEnv) else 0 for env in self._envs]

    # Stepping ---------------------------------------------------------------------------------

    def step_outcome(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What :meth:`step` puts below ``"next"``; on arrays, if all environments have that form."""
        one_by_one = self._recreates or self.ndim > 1 or tensordict.get(STEPPED, None) is not None
        stepped = None if one_by_one else self.step_on_arrays(tensordict)
        if stepped is None:
            return super().step_outcome(tensordict)
        self._last = stepped.copy()  # transforms write into the other
        return stepped

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        marks = tensordict.get(STEPPED, None)
        every = marks is None or self._last is None
        return self.step_rows(tensordict, [every or bool(marks[i].any()) for i in range(self.num_workers)])

    def step_rows(self, tensordict: TensorDictBase, marks: Sequence[bool]) -> TensorDictBase:
        """Step some environments; None: all. The others keep the result of their last step, if there was one."""
        outcomes: list[TensorDictBase | None] = []
        for i, (env, row) in enumerate(zip(self._envs, tensordict.unbind(0), strict=True)):
            if not marks[i]:
                outcomes.append(None if self._last is None else self._last[i])
                continue
            with self._naming(i):
                outcomes.append(env.step_outcome(placed(row, env.device)))
        known = self._filled(outcomes, self._envs)
        if all(marks) or self._last is not None:
            self._last = known
        return self._stack(known)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.seed_for_reset(kwargs)
        return self.reset_rows(tensordict, [True] * self.num_workers, **kwargs)

    def reset_rows(self, tensordict: TensorDictBase | None, marks: Sequence[bool], **kwargs: Any) -> TensorDictBase:
        """Reset some environments; of these, only what ``"_reset"`` marks."""
        rows = [None] * self.num_workers if tensordict is None else tensordict.unbind(0)
        fresh: list[TensorDictBase | None] = []
        for i, (env, row) in enumerate(zip(self._envs, rows, strict=True)):
            with self._naming(i):
                given = None if row is None else placed(row, env.device)
                resets = marks[i] and self._is_marked(row)
                fresh.append(env.reset_outcome(given, **own_kwargs(kwargs, i)) if resets else None)
        return self._stack(self._filled(fresh, self._envs))

    @contextmanager
    def _naming(self, worker: int) -> Iterator[None]:
        """Errors name the environment that raised them."""
        try:
            yield
        except RollwrightError as error:
            raise self.named_error(worker, error) from error

    def _array_form(self) -> ArrayEnv:
        return SerialArrays(self, SerialEnv)

    # The environments together ------------------------------------------------------------------

    def seed_rows(self, rows: Sequence[int], seed: int | None, static_seed: bool) -> int | None:
        """Seed some environments."""
        return self.seed_each(rows, seed, static_seed, lambda row, *given: self._envs[row].set_seed(*given))

    def to(self, device: torch.device | str | int | None) -> SerialEnv:  # type: ignore[override]
        """Move the environments and the batch; returns the environment."""
        if device is not None:
            for env in self._envs:
                env.to(device)
        super().to(device)
        return self

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all environments. A second call raises unless ``raise_if_closed=False``."""
        was_closed = self.is_closed
        super().close(raise_if_closed=raise_if_closed)
        errors: list[Exception] = []
        for env in () if was_closed else self._envs:
            try:
                env.close(raise_if_closed=False)
            except Exception as error:  # the others are to be closed all the same
                errors.append(error)
        if errors:
            raise errors[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_envs" not in self.__dict__ or name.startswith("_"):
                raise
        return self.look_up(name, range(self.num_workers))

    def look_up(self, name: str, rows: Sequence[int]) -> Any:
        """Values of an attribute of some environments; for a method, a function that calls it in each of them."""
        values = [getattr(self._envs[row], name) for row in rows]
        return call_each(values) if all(callable(value) for value in values) else values

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_workers={self.num_workers}, env={self._envs[0]}, "
            f"batch_size={list(self.batch_size)}, device={self.device})"
        )
