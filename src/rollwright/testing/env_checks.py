"""The checks of environments: each public function is one, called with a factory, a seed and a number of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright._keys import as_tuple, key_str, leaf_keys
from rollwright.collectors import Collector
from rollwright.envs.arrays import array_form
from rollwright.envs.base import EnvBase
from rollwright.envs.utils import check_env_specs
from rollwright.errors import EnvError, NotNative
from rollwright.testing.comparison import MakeEnv, differing_key, rows_of, seeded


def specs(make_env: MakeEnv, seed: int, num_steps: int) -> None:
    """Steps have what the specs announce."""
    with seeded(make_env, seed) as env:
        check_env_specs(env, seed=seed)


def reset(make_env: MakeEnv, seed: int, num_steps: int) -> None:
    """A reset returns observations and flags, no reward, nothing done."""
    with seeded(make_env, seed) as env:
        first = env.reset()
        misplaced = {key for key in leaf_keys(first) if as_tuple(key)[0] == "next" or key in env.reward_keys}
        if misplaced:
            raise EnvError(f"{env}: reset returned {key_str(misplaced)}. Return observations and flags only.")
        if env.any_done(first) and not env.allow_done_after_reset:
            raise EnvError(f"{env}: 'done' is True after reset. Begin anew, or pass allow_done_after_reset=True.")
        if first is env.reset():
            raise EnvError(f"{env}: reset returned the same TensorDict twice. Make a new one with each call.")


def step(make_env: MakeEnv, seed: int, num_steps: int) -> None:
    """A step returns its argument, changed only by what the specs announce below ``"next"``."""
    with seeded(make_env, seed) as env:
        td = env.rand_action(env.reset())
        before = td.clone()
        after = env.step(td)
        if after is not td:
            raise EnvError(f"{env}: step returned another TensorDict. Write 'next' into the one that is given.")
        key = differing_key(after.exclude("next"), before)
        if key is not None:
            raise EnvError(f"{env}: step changed {key!r} at the root. Change a clone of what _step is given.")
        announced = {*env.observation_keys, *env.reward_keys, *env.done_keys}
        found = set(leaf_keys(after.get("next")))
        missing, extra = announced - found, found - announced - set(env.state_keys)
        if missing or extra:
            raise EnvError(
                f"{env}: 'next' and the specs have different entries. Missing: {key_str(missing) or 'none'}. "
                f"Not announced: {key_str(extra) or 'none'}. Change _step or the specs."
            )


def _record(env: EnvBase, num_steps: int, actions: list[TensorDictBase] | None = None) -> list[TensorDictBase]:
    """Steps with resets where trajectories end; random actions, or those given."""
    frames, td = [], env.reset()
    for t in range(num_steps):
        td = env.rand_action(td) if actions is None else td.update(actions[t])
        frame, td = env.step_and_maybe_reset(td)
        frames.append(frame)
    return frames


def flags(make_env: MakeEnv, seed: int, num_steps: int) -> None:
    """In every group of flags, ``done == terminated | truncated``."""
    with seeded(make_env, seed) as env:
        for t, frame in enumerate(_record(env, num_steps)):
            outcome = frame.get("next")
            for names in env.done_keys_groups:
                done, *causes = (outcome.get(name) for name in names)
                explained = torch.stack(causes).any(0) if causes else done
                if not torch.equal(done, explained):
                    raise EnvError(
                        f"{env}: in step {t}, {names[0]!r} is {done.tolist()} but {key_str(names[1:])} "
                        f"together are {explained.tolist()}. Return done = terminated | truncated."
                    )


def same_seed(make_env: MakeEnv, seed: int, num_steps: int) -> None:
    """One seed gives the same bits in two instances, and again in one of them."""
    with seeded(make_env, seed) as env:
        reference = _record(env, num_steps)
        env.set_seed(seed)
        again = _record(env, num_steps)
    with seeded(make_env, seed) as other:
        elsewhere = _record(other, num_steps)
    for what, frames in (("seeded again", again), ("in a new instance", elsewhere)):
        for t, (expected, got) in enumerate(zip(reference, frames, strict=True)):
            key = differing_key(expected, got)
            if key is not None:
                raise EnvError(
                    f"{env}: {what} with seed {seed}, {key!r} differs in step {t}. Draw from a generator "
                    "that _set_seed seeds, or from torch's, and let reset restore all state."
                )


def different_seeds(make_env: MakeEnv, seed: int, num_steps: int) -> None:
    """Two seeds give different data under the same actions."""
    with seeded(make_env, seed) as env:
        reference = _record(env, num_steps)
        actions = [frame.select(*env.action_keys).clone() for frame in reference]
    with seeded(make_env, seed + 1) as other:
        replayed = _record(other, num_steps, actions)
    if all(differing_key(one, two) is None for one, two in zip(reference, replayed, strict=True)):
        raise EnvError(
            f"{env}: seeds {seed} and {seed + 1} give the same data. Pass the seed on in _set_seed, or say "
            "stochastic=False if nothing is random."
        )


def partial_reset(make_env: MakeEnv, seed: int, num_steps: int) -> None:
    """A reset touches the rows that ``"_reset"`` marks; the others go on as without it."""
    with seeded(make_env, seed) as env:
        rows = rows_of(env)
    for marked in ([], rows[::2], rows):
        with seeded(make_env, seed) as env, seeded(make_env, seed) as control:
            env.set_seed(seed)
            td, td_control = env.reset(), _in_step(control.reset, control.set_seed, seed)
            for t in range(2):
                _, td, _, td_control = _step_both(env, td, control, td_control, seed + t)
            td = env.reset(_mark(env, td.clone(), marked))
            unmarked = [row for row in rows if row not in marked]
            if not env.allow_done_after_reset and any(_any_flag(env, td, row) for row in marked):
                raise EnvError(f"{env}: a row that '_reset' marks is still done after reset. Reset its flags.")
            _compare_rows(env, td, td_control, unmarked, "right after a reset of other rows")
            for t in range(num_steps // 2):
                frame, td, frame_control, td_control = _step_both(env, td, control, td_control, seed + 2 + t)
                outcome, expected = frame.get("next"), frame_control.get("next")
                _compare_rows(env, outcome, expected, unmarked, f"{t + 1} steps after a reset of other rows")
                unmarked = [row for row in unmarked if not _any_flag(env, outcome, row)]


def last_observation(make_env: MakeEnv, seed: int, num_steps: int) -> None:
    """The last observation of a trajectory is kept, and the first of the next one stands in the next root."""
    ends = replaced = moved = 0
    with seeded(make_env, seed) as env, seeded(make_env, seed) as control:
        env.set_seed(seed)
        td, by_hand = env.reset(), _in_step(control.reset, control.set_seed, seed)
        for t in range(num_steps):
            before = td.select(*env.observation_keys).clone()
            actions = _actions(env, td, seed + t)
            frame, td = env.step_and_maybe_reset(td.update(actions))
            torch.manual_seed(seed + t)
            single = control.step(by_hand.update(actions))
            by_hand = control.maybe_reset(control.step_mdp(single))
            outcome, seen = frame.get("next"), frame.get("next").select(*env.observation_keys)
            pairs = {
                "the root": (frame.select(*env.observation_keys), before),
                "'next'": (outcome, single.get("next")),
                "the next root": (td, by_hand),
            }
            for where, pair in pairs.items():
                _same_in_both_ways(env, t, where, *pair)
            first = td.select(*env.observation_keys)
            for row in rows_of(env):
                if _any_flag(env, outcome, row):
                    ends += 1
                    replaced += differing_key(seen[row], first[row]) is None
                else:
                    moved += differing_key(before[row], seen[row]) is not None
    if ends and moved and ends == replaced:
        raise EnvError(
            f"{env}: at the end of every trajectory, the observation in 'next' is the first of the new one. "
            "Return the last observation of the trajectory from _step, and begin anew in _reset only."
        )


def _same_in_both_ways(env: EnvBase, t: int, where: str, got: TensorDictBase, expected: TensorDictBase) -> None:
    key = differing_key(got, expected)
    if key is not None:
        raise EnvError(
            f"{env}: in step {t}, {key!r} of {where} is not what step followed by reset gives. Keep the last "
            "observation in 'next', and begin the next root with the first of the new trajectory."
        )


def aliasing(make_env: MakeEnv, seed: int, num_steps: int) -> None:
    """What a step returned is not overwritten by later ones."""
    with seeded(make_env, seed) as env:
        td = env.reset()
        returned = [(td, td.clone())]
        for _ in range(num_steps):
            frame, td = env.step_and_maybe_reset(env.rand_action(td.copy()))
            returned += [(frame, frame.clone()), (td, td.clone())]
        for t, (kept, copy) in enumerate(returned):
            key = differing_key(kept, copy)
            if key is not None:
                raise EnvError(
                    f"{env}: {key!r}, returned in step {t // 2}, was overwritten later. Return clones of "
                    "tensors that the environment goes on writing into."
                )


def close(make_env: MakeEnv, seed: int, num_steps: int) -> None:
    """Any use after closing raises, but for closing once more, and for a reset that opens it again."""
    env = make_env()
    td = env.rand_action(env.reset())
    env.close()
    if not env.is_closed:
        raise EnvError(f"{env}: is_closed is False after close(). Call super().close() from close().")
    env.close(raise_if_closed=False)
    uses: dict[str, Callable[[], object]] = {
        "step": lambda: env.step(td),
        "reset": env.reset,
    }
    for name, use in uses.items():
        try:
            use()
        except EnvError:
            continue
        if name == "reset" and not env.is_closed:
            env.close()
            continue
        raise EnvError(f"{env}: {name}() after close() raised no EnvError. Call super().{name}, which raises it.")


# What the checks share ---------------------------------------------------------------------------


def _in_step(call: Callable[[], TensorDictBase], set_seed: Callable[[int], object], seed: int) -> TensorDictBase:
    """The result of ``call`` with seeds set just before, so that a control environment draws the same numbers."""
    set_seed(seed)
    return call()


def _actions(env: EnvBase, td: TensorDictBase, seed: int) -> TensorDictBase:
    """Random actions; torch's global generator is then seeded for the step."""
    actions = env.rand_action(td.copy()).select(*env.action_keys)
    torch.manual_seed(seed)
    return actions


def _step_both(
    env: EnvBase, td: TensorDictBase, control: EnvBase, td_control: TensorDictBase, seed: int
) -> tuple[TensorDictBase, TensorDictBase, TensorDictBase, TensorDictBase]:
    """A step of each with the same actions and the same state of torch's global generator."""
    actions = _actions(env, td, seed)
    frame, td = env.step_and_maybe_reset(td.update(actions))
    torch.manual_seed(seed)
    frame_control, td_control = control.step_and_maybe_reset(td_control.update(actions.clone()))
    return frame, td, frame_control, td_control


def _mark(env: EnvBase, td: TensorDictBase, rows: list[tuple[int, ...]]) -> TensorDictBase:
    """``td`` with ``"_reset"`` set in ``rows``, in every group of flags."""
    for names, reset_key in zip(env.done_keys_groups, env.reset_keys, strict=True):
        mask = torch.zeros_like(td.get(names[0]))
        for row in rows:
            mask[row] = True
        td.set(reset_key, mask)
    return td


def _any_flag(env: EnvBase, td: TensorDictBase, row: tuple[int, ...]) -> bool:
    return any(bool(td.get(names[0])[row].any()) for names in env.done_keys_groups)


def _compare_rows(
    env: EnvBase, got: TensorDictBase, expected: TensorDictBase, rows: list[tuple[int, ...]], when: str
) -> None:
    for row in rows:
        key = differing_key(got[row], expected[row])
        if key is not None:
            raise EnvError(
                f"{env}: {when}, {key!r} of the unmarked row {list(row)} is not what it is without it. "
                "Let _reset change only the rows that '_reset' marks."
            )


def arrays(make_env: MakeEnv, seed: int, num_steps: int) -> None:
    """Frames collected on arrays, where the environment has that form, are those collected on TensorDicts."""
    with seeded(make_env, seed) as env:
        try:
            array_form(env, objects=True)
        except NotNative:
            return
    batches: list[Any] = []
    for use_buffers in (True, False):
        env = make_env()
        frames = num_steps * env.numel()
        with torch.random.fork_rng(), Collector(env, frames_per_batch=frames, use_buffers=use_buffers) as collector:
            torch.manual_seed(seed)
            collector.set_seed(seed)
            batches.append(collector.next())
    key = differing_key(*batches)
    if key is not None:
        one, other = (batch.get(key, None) for batch in batches)
        raise EnvError(
            f"{env}: on arrays, {key!r} is not what it is on TensorDicts: {_difference(one, other)}. Correct "
            "on_arrays of the transform that sets it, or take it out."
        )


def _difference(one: Any, other: Any) -> str:
    """How an entry differs from another, as a phrase."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return f"{one!r} in place of {other!r}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {list(one.shape)} in place of {other.dtype} {list(other.shape)}"
    where = tuple((one != other).nonzero()[0].tolist())
    apart = (one.double() - other.double()).abs().max().item()
    return f"at {list(where)} {one[where].item()!r} in place of {other[where].item()!r}; at most {apart:.3g} apart"
