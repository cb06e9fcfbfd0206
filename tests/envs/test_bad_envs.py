"""Environments that break their contract are told so: by name, with the key, and with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from rollwright.collectors import Collector
from rollwright.data import Bounded, Composite, Unbounded
from rollwright.envs import EnvBase, check_env_specs
from rollwright.errors import EnvError, EnvKeyError
from rollwright.testing.mocking_classes import (
    CountingEnv,
    EnvThatErrorsAfter10Iters,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)


class Robot(EnvBase):
    """A sound environment whose ``step`` and ``reset`` results a test may spoil."""

    spoil_step: Callable[[TensorDict, TensorDictBase], Any] = staticmethod(lambda out, given: out)
    spoil_reset: Callable[[TensorDict, TensorDictBase | None], Any] = staticmethod(lambda out, given: out)

    def __init__(self, batch_size: tuple[int, ...] = (2,), **kwargs: Any) -> None:
        super().__init__(batch_size=batch_size, **kwargs)
        self.observation_spec = Composite(
            joints=Unbounded((*batch_size, 3)),
            head=Composite(camera=Bounded(0, 255, (*batch_size, 4, 4), dtype=torch.uint8), shape=batch_size),
            shape=batch_size,
        )
        self.action_spec = Bounded(-1.0, 1.0, (*batch_size, 3))

    def _observe(self) -> TensorDict:
        batch = self.batch_size
        camera = torch.zeros((*batch, 4, 4), dtype=torch.uint8)
        return TensorDict({"joints": torch.zeros((*batch, 3)), "head": {"camera": camera}}, batch)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self.spoil_reset(self._observe(), tensordict)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        outcome = self._observe().update({"joints": tensordict["action"] * 2})
        flags = {"reward": torch.zeros((*self.batch_size, 1)), "done": torch.zeros((*self.batch_size, 1)).bool()}
        return self.spoil_step(outcome.update(flags), tensordict)

    def _set_seed(self, seed: int | None) -> None:
        pass


def raising(error: Exception) -> Callable[..., Any]:
    def spoil(out: TensorDict, given: object) -> Any:
        raise error

    return spoil


def setting(key: Any, value: Any) -> Callable[..., Any]:
    return lambda out, given: out.set(key, value)


def leaving_out(*keys: Any) -> Callable[..., Any]:
    return lambda out, given: out.exclude(*keys)


def flag(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool)


class Case(NamedTuple):
    """What is done to the result, and what is to be said: the error's type and a pattern of its message."""

    spoil: Callable[..., Any]
    error: type[Exception]
    message: str


BAD_STEPS = {
    "raises": Case(raising(RuntimeError("motor is off")), EnvError, "raised in step: RuntimeError: motor is off"),
    "raises a key error": Case(raising(KeyError("torque")), EnvError, "raised in step: KeyError: 'torque'"),
    "raises our own": Case(raising(EnvError("out of fuel")), EnvError, "^out of fuel$"),
    "no observation": Case(leaving_out("joints"), EnvKeyError, "step returned no 'joints'.*observation_spec"),
    "no nested observation": Case(leaving_out(("head", "camera")), EnvKeyError, r"no \('head', 'camera'\)"),
    "no nest": Case(leaving_out("head"), EnvKeyError, r"no \('head', 'camera'\)"),
    "no reward": Case(leaving_out("reward"), EnvKeyError, r"step returned no 'reward'.*reward_spec = Composite\("),
    "no flags": Case(leaving_out("done"), EnvKeyError, "step returned no 'done'.*done_spec"),
    "nothing": Case(lambda out, given: out.empty(), EnvKeyError, "returned nothing"),
    "observation shape": Case(
        setting("joints", torch.zeros(2, 4)), EnvError, r"'joints' with shape \[2, 4\].*\[2, 3\]"
    ),
    "observation lacks a dimension": Case(setting("joints", torch.zeros(2)), EnvError, r"'joints' with shape \[2\]"),
    "nested shape": Case(
        setting(("head", "camera"), torch.zeros(2, 4, 5, dtype=torch.uint8)), EnvError, r"camera'\) with shape"
    ),
    "observation dtype": Case(
        setting("joints", torch.zeros(2, 3, dtype=torch.float64)),
        EnvError,
        "'joints' with dtype torch.float64.*float32",
    ),
    "nested dtype": Case(
        setting(("head", "camera"), torch.zeros(2, 4, 4)), EnvError, "with dtype torch.float32.*uint8"
    ),
    "object for a tensor": Case(setting("joints", NonTensorData("left", batch_size=[2])), EnvError, "'joints' of type"),
    "nest for a tensor": Case(setting("joints", TensorDict({}, [2])), EnvError, "'joints' of type TensorDict"),
    "reward shape": Case(setting("reward", torch.zeros(2, 2)), EnvError, r"'reward' with shape \[2, 2\].*\[2, 1\]"),
    "reward dtype": Case(setting("reward", torch.zeros(2, 1, dtype=torch.float64)), EnvError, "'reward' with dtype"),
    "integer reward": Case(setting("reward", torch.zeros(2, 1).long()), EnvError, "'reward' with dtype torch.int64"),
    "done shape": Case(setting("done", flag(2, 3)), EnvError, r"'done' with shape \[2, 3\].*\[2, 1\]"),
    "done dtype": Case(setting("done", torch.zeros(2, 1)), EnvError, "'done' with dtype torch.float32.*torch.bool"),
    "integer done": Case(setting("done", torch.zeros(2, 1).long()), EnvError, "'done' with dtype torch.int64"),
    "terminated shape": Case(setting("terminated", flag(2, 2)), EnvError, r"'terminated' with shape \[2, 2\]"),
    "terminated dtype": Case(setting("terminated", torch.zeros(2, 1)), EnvError, "'terminated' with dtype"),
    "its argument": Case(lambda out, given: given, EnvError, "_step returned the TensorDict it was given"),
    "next": Case(lambda out, given: TensorDict({"next": out}, [2]), EnvError, "_step returned an entry 'next'"),
    "None": Case(lambda out, given: None, EnvError, "_step must return a TensorDict, got NoneType"),
    "a dict": Case(lambda out, given: out.to_dict(), EnvError, "_step must return a TensorDict, got dict"),
    "a tuple": Case(lambda out, given: (out, 0.0), EnvError, "_step must return a TensorDict, got tuple"),
    "a tensor": Case(lambda out, given: out["joints"], EnvError, "_step must return a TensorDict, got Tensor"),
    "another batch size": Case(
        lambda out, given: torch.cat([out, out]), EnvError, r"_step returned batch size \[4\], expected \[2\]"
    ),
    "an unbatched entry": Case(
        lambda out, given: TensorDict({**out, "joints": torch.zeros(3)}),
        EnvError,
        r"_step returned batch size \[\], expected \[2\].*an entry does not begin with that",
    ),
}

BAD_RESETS = {
    "raises": Case(raising(OSError("no such arm")), EnvError, "raised in reset: OSError: no such arm"),
    "no observation": Case(leaving_out("joints"), EnvKeyError, "reset returned no 'joints'"),
    "observation shape": Case(setting("joints", torch.zeros(2, 4)), EnvError, r"reset returned 'joints' with shape"),
    "observation dtype": Case(
        setting("joints", torch.zeros(2, 3).half()), EnvError, "'joints' with dtype torch.float16"
    ),
    "done": Case(setting("done", ~flag(2, 1)), EnvError, "'done' is True right after reset"),
    "one row done": Case(
        setting("terminated", torch.tensor([[False], [True]])), EnvError, "'done' is True right after reset"
    ),
    "done shape": Case(setting("done", flag(2, 3)), EnvError, r"'done' with shape \[2, 3\]"),
    "done dtype": Case(setting("done", torch.zeros(2, 1)), EnvError, "reset returned 'done' with dtype"),
    "next": Case(setting("next", TensorDict({}, [2])), EnvError, "_reset returned an entry 'next'"),
    "None": Case(lambda out, given: None, EnvError, "_reset must return a TensorDict, got NoneType"),
    "an (observation, info) pair": Case(lambda out, given: (out, {}), EnvError, "must return a TensorDict, got tuple"),
    "another batch size": Case(
        lambda out, given: out[:1], EnvError, r"_reset returned batch size \[1\], expected \[2\]"
    ),
}


def run(env: Robot) -> TensorDictBase:
    return env.step(env.reset().set("action", torch.zeros(2, 3)))


def test_the_sound_environment_is_sound() -> None:
    check_env_specs(Robot())
    run(Robot())


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_steps(name: str) -> None:
    env, case = Robot(), BAD_STEPS[name]
    env.spoil_step = case.spoil
    assert_told(env, case, lambda: run(env))


@pytest.mark.parametrize("name", BAD_RESETS)
def test_bad_resets(name: str) -> None:
    env, case = Robot(), BAD_RESETS[name]
    env.spoil_reset = case.spoil
    assert_told(env, case, env.reset)


@pytest.mark.parametrize("name", [name for name in BAD_STEPS if name not in ("raises our own",)])
def test_bad_steps_in_a_rollout(name: str) -> None:
    env, case = Robot(), BAD_STEPS[name]
    env.spoil_step = case.spoil
    for going_on in (True, False):
        assert_told(env, case, lambda going_on=going_on: env.rollout(3, break_when_any_done=going_on))


def assert_told(env: Robot, case: Case, call: Callable[[], Any]) -> None:
    with pytest.raises(case.error, match=case.message) as caught:
        call()
    assert isinstance(caught.value, EnvError)
    message = str(caught.value)
    if message == "out of fuel":  # an error of ours is handed on as it is
        return
    assert message.startswith("Robot(batch_size=[2], device=None)")
    assert " raised in " in message or ". " in message, "the message ends with what to do"


def test_the_cause_is_kept() -> None:
    env, error = Robot(), ValueError("too hot")
    env.spoil_step = raising(error)
    with pytest.raises(EnvError) as caught:
        run(env)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass_unchanged(stop: type[BaseException]) -> None:
    env = Robot()
    env.spoil_step = raising(stop())  # type: ignore[arg-type]
    with pytest.raises(stop):
        run(env)


def test_missing_keys_are_key_errors_with_plain_messages() -> None:
    env = Robot()
    env.spoil_step = leaving_out("reward")
    with pytest.raises(KeyError) as caught:
        run(env)
    assert not str(caught.value).startswith(("'", '"'))


def test_nan_is_data() -> None:
    env = Robot()
    env.spoil_step = setting("joints", torch.full((2, 3), torch.nan))
    assert run(env)["next", "joints"].isnan().all()


def test_values_outside_the_domain_are_named_when_checked() -> None:
    env = Robot(run_type_checks=True)
    env.observation_spec = Composite(joints=Bounded(-1.0, 1.0, (2, 3)), head=env.observation_spec["head"], shape=[2])
    with pytest.raises(EnvError, match=r"(?s)Robot.*step returned 'joints' = .* lies outside .*Bounded"):
        env.step(env.reset().set("action", torch.ones(2, 3)))


# What users hand in -----------------------------------------------------------------------------------

BAD_DATA = {
    "no action": (lambda env, td: env.step(td), EnvKeyError, r"step got no 'action'. It got .*'joints'.*the policy"),
    "unbatched data": (lambda env, td: env.step(td[0]), EnvError, r"step expected data of batch size \[2\], got \[\]"),
    "too many rows": (
        lambda env, td: env.step(torch.cat([td, td])),
        EnvError,
        r"step expected data of batch size \[2\], got \[4\]",
    ),
    "a dict": (
        lambda env, td: env.step({"action": torch.zeros(2, 3)}),
        TypeError,
        "step expected a TensorDict, got dict",
    ),
    "a tensor": (lambda env, td: env.step(torch.zeros(2, 3)), TypeError, "step expected a TensorDict, got Tensor"),
    "nothing": (lambda env, td: env.step(None), TypeError, "step expected a TensorDict, got NoneType"),
    "a seed for reset": (lambda env, td: env.reset(3), TypeError, "reset expected a TensorDict, got int"),
    "rows to reset": (
        lambda env, td: env.reset(TensorDict({}, [3])),
        EnvError,
        r"reset expected data of batch size \[2\], got \[3\]",
    ),
    "mask shape": (
        lambda env, td: env.reset(td.set("_reset", flag(2, 3))),
        EnvError,
        r"'_reset' has shape \[2, 3\], expected \[2, 1\]",
    ),
    "mask dtype": (
        lambda env, td: env.reset(td.set("_reset", torch.ones(2, 1))),
        EnvError,
        "'_reset' is torch.float32",
    ),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_from_users(name: str) -> None:
    call, error, message = BAD_DATA[name]
    env = Robot()
    with pytest.raises(error, match=message) as caught:
        call(env, env.reset())
    assert "Robot(batch_size=[2], device=None)" in str(caught.value)


# Specs -------------------------------------------------------------------------------------------------

BAD_SPECS = {
    "observation leading shape": (
        "observation_spec",
        Composite(a=Unbounded((3, 1)), shape=[3]),
        ValueError,
        r"\[2\], got \[3\]",
    ),
    "observation without a batch": ("observation_spec", Composite(a=Unbounded((2, 1))), ValueError, r"\[2\], got \[\]"),
    "state leading shape": ("state_spec", Composite(shape=[1]), ValueError, r"state_spec.*\[2\], got \[1\]"),
    "observation leaf": ("observation_spec", Unbounded((3, 1)), ValueError, r"\[2\], got|3"),
    "state leaf": ("state_spec", Unbounded((2, 1)), TypeError, "state_spec: expected a Composite"),
    "action leading shape": ("action_spec", Unbounded((3, 1)), ValueError, "3"),
    "reward leading shape": ("reward_spec", Unbounded((3, 1)), ValueError, "3"),
    "done leading shape": ("done_spec", Unbounded((3, 1), dtype=torch.bool), ValueError, "3"),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_specs_that_do_not_fit_the_batch(name: str) -> None:
    attribute, spec, error, message = BAD_SPECS[name]
    with pytest.raises(error, match=message):
        setattr(Robot(), attribute, spec)


class Announces(Robot):
    """Specs that say something else than what steps hold."""

    def __init__(self, name: str, spec: Any, drop: bool = False) -> None:
        super().__init__()
        full = self.full_observation_spec
        if drop:
            del full[name]
        else:
            full[name] = spec


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        (lambda: Announces("joints", None, drop=True), EnvKeyError, "Only in the rollout: 'joints', .'next', 'joints'"),
        (lambda: Announces("speed", Unbounded((2, 1))), EnvKeyError, "reset returned no 'speed'"),
        (lambda: Announces("joints", Unbounded((2, 4))), EnvError, r"'joints' with shape \[2, 3\]"),
        (lambda: Announces("joints", Unbounded((2, 3), dtype=torch.float64)), EnvError, "'joints' with dtype"),
        (lambda: Announces("joints", Bounded(0.0, 1e-9, (2, 3))), EnvError, "(?s)'joints' = .* lies outside"),
    ],
)
def test_check_env_specs_compares_steps_and_specs(env: Callable[[], EnvBase], error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        check_env_specs(env(), seed=0)
    assert str(caught.value).startswith("Announces(")


def test_entries_with_an_underscore_need_no_announcement() -> None:
    env = Robot()
    env.spoil_step = setting("_cache", torch.zeros(2))
    check_env_specs(env)


# Elsewhere ----------------------------------------------------------------------------------------------


def test_an_environment_that_fails_in_the_middle_of_a_rollout() -> None:
    with pytest.raises(EnvError, match=r"EnvThatErrorsAfter10Iters.* raised in step: RuntimeError: max steps!"):
        EnvThatErrorsAfter10Iters().rollout(20)


@pytest.mark.parametrize(
    ("make_env", "key"),
    [
        (lambda: NestedCountingEnv(batch_size=[2]), ("data", "action")),
        (lambda: MultiKeyCountingEnv(batch_size=[2]), ("nested_2", "azione")),
        (lambda: CountingEnv(batch_size=[2]), "action"),
    ],
)
def test_a_missing_action_is_named_wherever_it_lies(make_env: Callable[[], EnvBase], key: Any) -> None:
    env = make_env()
    td = env.rand_action(env.reset()).exclude(key)
    with pytest.raises(EnvKeyError) as caught:
        env.step(td)
    assert str(env) in str(caught.value)
    assert repr(key) in str(caught.value)


@pytest.mark.parametrize("what", ["nested_1", "nested_2"])
def test_a_missing_nested_reward_is_named(what: str) -> None:
    env = MultiKeyCountingEnv()
    step, key = env._step, next(key for key in env.reward_keys if key[0] == what)
    env._step = lambda td: step(td).exclude(key)  # type: ignore[method-assign]
    with pytest.raises(EnvKeyError) as caught:
        env.rand_step()
    assert repr(key) in str(caught.value)


def test_a_missing_entry_of_one_agent_is_named() -> None:
    env = HeterogeneousCountingEnv()
    observe = env._observe

    def without_lidar() -> TensorDictBase:
        seen = observe()
        del seen["lazy"].tensordicts[0]["lidar"]
        return seen

    env._observe = without_lidar  # type: ignore[method-assign]
    with pytest.raises(EnvKeyError, match=r"HeterogeneousCountingEnv.*no \('lazy', 'lidar'\)"):
        env.reset()


def test_observations_of_one_number_may_lack_that_dimension() -> None:
    class Flat(Robot):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__((2,), **kwargs)
            self.observation_spec = Composite(place=Unbounded((2, 1)), shape=(2,))

        def _observe(self) -> TensorDict:
            return TensorDict({"place": torch.tensor([1.0, 2.0])}, [2])

    assert Flat().reset()["place"].tolist() == [[1.0], [2.0]]
    assert Flat().rollout(3)["next", "place"].shape == (2, 3, 1)
    for options in ({}, {"use_buffers": False}):
        collector = Collector(Flat(), None, frames_per_batch=6, total_frames=6, **options)
        assert collector.next()["next", "place"].shape == (2, 3, 1)
        collector.shutdown()
    with pytest.raises(EnvError, match=r"'place' with shape \[2\]; observation_spec says \[2, 1\]"):
        Flat(run_type_checks=True).reset()
