"""Forwarder: what is published for several receivers is taken once for all of them, and copied once."""

from __future__ import annotations

import torch

from rollwright.weight_update.schemes import Publisher
from rollwright.weight_update.subscribing import Copies, Forwarder


def followers(publisher, *groups):
    found = [Forwarder() for _ in groups]
    for forwarder, receivers in zip(found, groups, strict=True):
        for receiver in receivers:
            forwarder.follow(receiver, publisher.weights_of(receiver))
    return found


def publish(publisher, value, version, receivers=None):
    publisher.publish(version, {"policy": {"weight": torch.full((3,), float(value))}}, receivers)


def weights(forwarded):
    return forwarded.models["policy"][0]["weight"]


def test_groups_that_take_the_same_share_one_copy():
    publisher = Publisher(4)
    first, second = followers(publisher, (0, 1), (2, 3))
    publish(publisher, 1, 1)
    copies: Copies = {}
    [mine], [theirs] = first.take(copies), second.take(copies)
    assert weights(mine) is weights(theirs)
    assert weights(mine).tolist() == [1, 1, 1]
    publish(publisher, 2, 2)
    assert weights(mine).tolist() == [1, 1, 1]


def test_one_that_is_behind_takes_the_newest_for_itself():
    publisher = Publisher(2)
    first, second = followers(publisher, (0,), (1,))
    copies: Copies = {}
    publish(publisher, 1, 1)
    [old] = first.take(copies)
    publish(publisher, 2, 2)
    [new] = second.take(copies)
    assert (old.version, new.version) == (1, 2)
    assert weights(new).tolist() == [2, 2, 2]
    assert [each.version for each in first.take(copies)] == [2]
    assert not list(first.take(copies))
    assert not list(second.take(copies))


def test_weights_of_one_receiver_reach_its_group_alone():
    publisher = Publisher(2)
    first, second = followers(publisher, (0,), (1,))
    publish(publisher, 1, 1, [1])
    copies: Copies = {}
    assert not list(first.take(copies))
    assert [each.receiver for each in second.take(copies)] == [1]
