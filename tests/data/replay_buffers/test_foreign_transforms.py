"""Transforms of other libraries in a replay buffer: their inverses are applied, or they are refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rollwright.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SamplerWithoutReplacement


class Foreign(nn.Module):
    """A transform of another library: it always has an inverse, and need not say what for."""

    in_keys = ("serial",)
    in_keys_inv = ()

    def forward(self, data):
        return data.set("serial", data["serial"] + 100)

    def inv(self, data):
        return self._inv_call(data.copy())

    def _inv_call(self, data):
        return data.set("serial", data["serial"] - 100)


class ForeignCompose(nn.Module):
    def __init__(self, *transforms):
        super().__init__()
        self.transforms = nn.ModuleList(transforms)

    def forward(self, data):
        for transform in self.transforms:
            data = transform(data)
        return data

    def inv(self, data):
        for transform in reversed(self.transforms):
            data = transform.inv(data)
        return data


@pytest.mark.parametrize("transform", [Foreign, lambda: ForeignCompose(Foreign(), Foreign())])
def test_a_transform_of_another_library_is_inverted_on_what_is_written(transform):
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=30, transform=transform())
    data = TensorDict({"serial": torch.arange(10)}, [10])
    buffer.extend(data)
    buffer.add(data[0])
    assert data["serial"].tolist() == list(range(10))
    assert (buffer.storage[:]["serial"] < 0).all()
    assert set(buffer.sample()["serial"].tolist()) <= set(range(10))
    assert "inverse" in buffer.direct_writes()


def test_an_inverse_that_cannot_be_applied_is_refused_by_name():
    class Half:
        def __call__(self, data):
            return data

        def _inv_call(self, data):
            return data

    buffer = ReplayBuffer(storage=LazyTensorStorage(20))
    with pytest.raises(TypeError, match=r"Half has an inverse \(_inv_call\), and no method inv"):
        buffer.append_transform(Half())
    with pytest.raises(TypeError, match="Half"):
        ReplayBuffer(storage=LazyTensorStorage(20), transform=Half())
    assert buffer.transforms == []
    with pytest.raises(TypeError, match=r"Foreign has an inverse.*each member"):
        ReplayBufferEnsemble(buffer, transform=Foreign())


@pytest.mark.parametrize("index", [1, 10, -1])
def test_a_transform_beyond_the_end_is_refused(index):
    buffer = ReplayBuffer(storage=LazyTensorStorage(20))
    with pytest.raises(IndexError, match="index: expected one from 0 to 0, got"):
        buffer.insert_transform(index, lambda data: data)


class TestOfTorchRL:
    """Stand-ins that say that they are of TorchRL."""

    def base(self):
        class Transform(nn.Module):
            in_keys = in_keys_inv = ()

            def _inv_call(self, td):
                return td

            def inv(self, td):
                return self._inv_call(td.copy())

        Transform.__module__ = "torchrl.stand_in"
        return Transform

    def double(self):
        class Double(self.base()):
            factor = 2

            def forward(self, td):
                return td.set("x", td["x"] * self.factor)

            def _inv_call(self, td):
                return td.set("x", td["x"] / self.factor)

        return Double()

    def test_buffers(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, transform=(double := self.double()))
        assert not double.training
        buffer.extend(TensorDict(x=torch.full((4, 1), 8.0), batch_size=4))
        assert buffer.sample()["x"].flatten().tolist() == [8.0] * 4
        double.factor = 4
        assert buffer.sample()["x"].flatten().tolist() == [16.0] * 4

    def test_ensembles_take_what_inverts_nothing(self):
        class Sign(self.base()):
            def forward(self, td):
                return td.set("x", -td["x"])

        members = [ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4) for _ in range(2)]
        ensemble = ReplayBufferEnsemble(*members, batch_size=8).append_transform(Sign())
        for member in members:
            member.extend(TensorDict(x=torch.ones(4, 1), batch_size=4))
        assert (ensemble.sample()["x"] == -1).all()
        with pytest.raises(TypeError, match="Double has an inverse"):
            ensemble.append_transform(self.double())

    def test_a_chain_of_them(self):
        class Sign(self.base()):
            def forward(self, td):
                return td.set("x", -td["x"])

        class Compose(self.base()):
            def __iter__(self):
                return iter(self.parts)

            def forward(self, td):
                return self.parts[-1](td)

        Compose.__module__ = "torchrl.stand_in"
        chain = Compose()
        chain.parts = [Sign()]
        ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(10)), batch_size=2).append_transform(chain)
        chain.parts = [Sign(), self.double()]
        with pytest.raises(TypeError, match="Compose has an inverse"):
            ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(10)), batch_size=2).append_transform(chain)


class TestWithTorchRL:
    """Samples equal those of TorchRL's buffers."""

    def data(self):
        done = (torch.arange(20) % 5 == 4).reshape(20, 1)
        flags = {"done": done, "terminated": done.clone(), "truncated": torch.zeros(20, 1, dtype=torch.bool)}
        entries = {"observation": torch.arange(1, 21.0).reshape(20, 1), "reward": torch.ones(20, 1), **flags}
        root = {"observation": torch.arange(20.0).reshape(20, 1), "action": torch.zeros(20, 1)}
        return TensorDict({**root, "next": TensorDict(entries, [20])}, [20])

    @pytest.fixture
    def theirs(self):
        return SimpleNamespace(envs=pytest.importorskip("torchrl.envs"), data=pytest.importorskip("torchrl.data"))

    @pytest.mark.parametrize(
        "make",
        [
            lambda t: t.envs.RandomCropTensorDict(3, sample_dim=-1),
            lambda t: t.envs.MultiStepTransform(3, 0.9),
            lambda t: t.envs.Reward2GoTransform(gamma=0.9),
            lambda t: t.envs.RenameTransform(["observation"], ["obs"]),
            lambda t: t.envs.ObservationNorm(1.0, 2.0, in_keys=["observation"]),
            lambda t: t.envs.CatFrames(N=3, dim=-1, in_keys=["observation"]),
            lambda t: t.envs.Compose(
                t.envs.DTypeCastTransform(torch.float32, torch.float64, in_keys=["action"], in_keys_inv=["action"]),
                lambda td: td.set("more", td["action"] + 1),
            ),
        ],
        ids=["crop", "multistep", "reward2go", "rename", "norm", "frames", "chain"],
    )
    def test_samples(self, theirs, make):
        found = []
        for kinds in (
            SimpleNamespace(
                ReplayBuffer=ReplayBuffer,
                LazyTensorStorage=LazyTensorStorage,
                SamplerWithoutReplacement=SamplerWithoutReplacement,
            ),
            theirs.data,
        ):
            torch.manual_seed(0)
            sampler = kinds.SamplerWithoutReplacement(shuffle=False)
            buffer = kinds.ReplayBuffer(storage=kinds.LazyTensorStorage(100), sampler=sampler, batch_size=6)
            buffer.append_transform(make(theirs))
            buffer.extend(self.data())
            found.append(torch.cat([buffer.sample(), buffer.sample()]).exclude("index"))
        ours, expected = found
        assert set(ours.keys(True, True)) == set(expected.keys(True, True))
        for key in expected.keys(True, True):
            assert torch.equal(ours[key], expected[key]), key


def test_steps_of_several_are_made_of_elements_that_are_added_one_by_one():
    envs = pytest.importorskip("torchrl.envs")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), transform=envs.MultiStepTransform(n_steps=3, gamma=0.5))
    for i in range(6):
        flags = {"done": torch.zeros(1, dtype=torch.bool), "terminated": torch.zeros(1, dtype=torch.bool)}
        after = {"obs": torch.tensor([i + 1.0]), "reward": torch.ones(1), **flags}
        index = buffer.add(TensorDict({"obs": torch.tensor([float(i)]), "next": after}))
        assert (index == i - 3) if i >= 3 else (index.numel() == 0)
    stored = buffer.storage[:]
    assert stored["obs"].flatten().tolist() == [0.0, 1.0, 2.0]
    assert stored["next", "obs"].flatten().tolist() == [3.0, 4.0, 5.0]
    assert stored["next", "reward"].flatten().tolist() == [1.75] * 3
