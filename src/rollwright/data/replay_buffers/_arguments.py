"""Checked arguments of replay buffers: their parts, transforms and elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from torch import nn

from rollwright._foreign import class_path, is_torchrl_transform, kind_in, overrides
from rollwright._keys import NestedKey
from rollwright._tensors import device_of
from rollwright.data.replay_buffers.limiter import SampleToInsertRatio
from rollwright.data.replay_buffers.samplers.prioritized import WEIGHT
from rollwright.data.replay_buffers.samplers.sampler import GENERATION, Sampler
from rollwright.data.replay_buffers.samplers.uniform import ConsumingSampler, RandomSampler
from rollwright.data.replay_buffers.storages import batches
from rollwright.data.replay_buffers.storages.batches import positive

Transform = Callable[[Any], Any]
_EXAMPLES = {"Storage": "LazyTensorStorage(size)", "Sampler": "RandomSampler()", "Writer": "RoundRobinWriter()"}
_PLACE = "_place"  # of elements in a batch, while a transform leaves some out


def made(name: str, given: Any, kind: type, default: Callable[[], Any]) -> Any:
    """A part of a buffer: given, made by a callable, or the default.

    Raises:
        TypeError: it is of another kind.
    """
    made = default() if given is None else given
    if not isinstance(made, kind) and callable(made):
        made = made()
    if not isinstance(made, kind):
        raise TypeError(
            f"{name}: expected a {kind.__name__} of rollwright.data or a callable that makes one, got "
            f"{_shown(made)}. {_remedy(made, kind)}"
        )
    return made


def _shown(part: Any) -> str:
    """A part that a buffer cannot use, without the text that an object of another library has for itself."""
    return f"{type(part).__name__}: {part!r}" if type(part).__module__ == "builtins" else class_path(part)


def _remedy(part: Any, wanted: type) -> str:
    example, names = _EXAMPLES[wanted.__name__], kind_in("torchrl", part)[:1]
    if not names:
        return f"Pass {example}, say, or an object of a subclass of yours."
    use = f"Use rollwright.data.{names[0]}" if names[0] in _names(wanted) else f"Use {example} of rollwright.data, say"
    return f"{use}; or leave it in a buffer of TorchRL, which collectors fill, too."


def _names(kind: type) -> set[str]:
    """Names of our classes of a kind."""
    below: list[type] = kind.__subclasses__()
    ours = {each.__name__ for each in below if each.__module__.startswith("rollwright.")}
    return ours.union(*map(_names, below))


def check_given(
    collate_fn: Any, transform: Any, transform_factory: Any, generator: Any, limiter: Any, *, pin_memory: bool
) -> None:
    """Refuse arguments of a buffer that it could not work with; see :class:`ReplayBuffer`.

    Raises:
        ValueError, TypeError: one is of another kind, or two contradict one another.
    """
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn: expected a callable, got {type(collate_fn).__name__}.")
    if transform is not None and transform_factory is not None:
        raise ValueError("transform and transform_factory were both given. Pass one of them.")
    if transform_factory is not None and not callable(transform_factory):
        raise TypeError(f"transform_factory: expected a callable, got {transform_factory!r}.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator, got {generator!r}.")
    if limiter is not None and not isinstance(limiter, SampleToInsertRatio):
        raise TypeError(f"limiter: expected a SampleToInsertRatio, got {type(limiter).__name__}: {limiter!r}.")
    if pin_memory and not torch.cuda.is_available():
        raise ValueError("pin_memory: torch sees no CUDA device to pin memory for. Leave it out.")


def size_of_batch(given: int | None, default: int | None) -> int:
    """How many elements a batch has.

    Raises:
        ValueError, TypeError: it is no number, or there is none.
    """
    size = default if given is None else positive("batch_size", given)
    if size is None:
        raise ValueError("batch_size: expected it in sample() or in the constructor, got it in neither.")
    return size


def dimension(name: str, value: int | None, ndim: int) -> int:
    """A dimension, counted from the front; None: the last.

    Raises:
        ValueError: there is no such dimension.
    """
    value = ndim - 1 if value is None else value
    if not isinstance(value, int) or not -ndim <= value < ndim:
        raise ValueError(f"{name}: expected a dimension of a storage of ndim={ndim}, got {value!r}.")
    return value % ndim


def checked_transform(transform: Any) -> Transform:
    """A transform that a buffer can apply; one of TorchRL is put into evaluation mode, as TorchRL's buffers do.

    Raises:
        TypeError: it cannot be called.
    """
    if not callable(transform):
        raise TypeError(f"transform: expected a transform, a module or a callable, got {transform!r}.")
    if is_torchrl_transform(transform):
        cast(nn.Module, transform).eval()
    return cast(Transform, transform)


def insert(transforms: list[Transform], index: int, transform: Transform) -> None:
    """Put a transform before the one at ``index``.

    Raises:
        IndexError: ``index`` lies outside the transforms.
    """
    most = len(transforms)
    if not -most <= index <= most:
        raise IndexError(f"index: expected one from {-most} to {most}, got {index}.")
    transforms.insert(index, transform)


class Inverted:
    """A transform the other way round: applied to what is written, and its inverse, if it has one, to batches.

    Args:
        transform: a transform, a module or a callable.

    Example:
        >>> double = Inverted(lambda batch: batch * 2)
        >>> double.inv(torch.ones(2)), double(torch.ones(2))
        (tensor([2., 2.]), tensor([1., 1.]))
    """

    def __init__(self, transform: Transform) -> None:
        self.transform, self._inverse = transform, inverse_of(transform)

    def __call__(self, batch: Any) -> Any:
        return batch if self._inverse is None else self._inverse(batch)

    def inv(self, data: Any) -> Any:
        """What is written, transformed; transforms change entries in place, so a copy that shares them is passed."""
        return self.transform(data.clone(recurse=False) if is_tensor_collection(data) else data)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transform!r})"


def parts_of(change: Any) -> tuple[Any, ...]:
    """The transforms of a chain, or the one that it is."""
    chain = type(change).__name__ == "Compose" and hasattr(change, "__iter__")
    return tuple(part for one in change for part in parts_of(one)) if chain else (change,)


def applied(change: Transform, batch: Any) -> Any:
    """A batch after a transform.

    Raises:
        TypeError: it returned nothing.
    """
    result = change(batch)
    if result is None:
        raise TypeError(f"transform: expected {change!r} to return the batch, got None. Let it return one.")
    return result


def ends_slices(change: Transform) -> bool:
    """Whether what a transform leaves of a batch is no slices: it says so by ``ends_slices``."""
    given = change.transform if isinstance(change, Inverted) else change
    return any(getattr(part, "ends_slices", False) for part in parts_of(given))


def changed(
    change: Transform, batch: Any, info: Mapping[str, Any], mark: Callable[[TensorDictBase, torch.Tensor], Any]
) -> tuple[Any, Mapping[str, Any]]:
    """A batch after a transform, and what belongs to the elements that this has left in it.

    Args:
        change: the transform. One that leaves elements out says so by ``leaves_out``.
        batch: the batch, which may be changed.
        info: what the sampler returned, with ``"index"`` for each element.
        mark: called with a batch that has lost elements, and the places, int64 ``[n]``, where the others were.
    """
    given = change.transform if isinstance(change, Inverted) else change
    number, drops = len(info["index"]), any(getattr(part, "leaves_out", False) for part in parts_of(given))
    if drops and isinstance(batch, TensorDictBase):
        places = torch.arange(number, device=device_of(batch)).reshape(-1, *[1] * (batch.ndim - 1))
        batch = batch.copy().set(_PLACE, places.expand(batch.batch_size))
    result = applied(change, batch)
    left = result.pop(_PLACE, None) if drops and isinstance(result, TensorDictBase) else None
    if left is not None:
        kept = cast(torch.Tensor, left if left.ndim == 1 else left.flatten(1)[:, 0])
        info = {
            name: value[kept.to(getattr(value, "device", "cpu"))] if len(value) == number else value
            for name, value in info.items()
        }
        if 0 < len(kept) < number:
            result = mark(result, kept)
    return result, info


_OWN = {"index": "the places of elements", WEIGHT: "importance weights", GENERATION: "generations of places"}


def check_names(name: str, data: Any, own: Iterable[str]) -> None:
    """Test that data hold no entries of their own where batches get one of a buffer.

    What a batch of a buffer has there is replaced when that batch was stored in another buffer.

    Args:
        name: what to call the data in messages.
        data: a batch, several, or one element; what is no TensorDict has no entries.
        own: names of entries that batches get.

    Raises:
        ValueError: they do.
    """
    for td in data if isinstance(data, list) else (data,):
        while isinstance(td, LazyStackedTensorDict):
            td = td.tensordicts[0]
        there = td.keys() if isinstance(td, TensorDictBase) else ()
        for key in own:
            value = td.get(key) if key in there and key in _OWN else None
            if value is not None and not _is_of_a_buffer(td, key, value):
                form = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(
                    f"{name}: expected no entry {key!r}, under which batches of the buffer hold {_OWN[key]}, got one "
                    f"of {form}. Rename it: data.rename_key_({key!r}, 'my_{key}'), or a RenameTransform of the "
                    "environment. Or use a ReplayBuffer, whose sample(return_info=True) returns them beside the batch."
                )


def _is_of_a_buffer(td: TensorDictBase, key: str, value: Any) -> bool:
    """Whether an entry may be what a batch of a buffer has under that name: nothing that an environment observes."""
    if td.get(("next", key), None) is not None:
        return False
    if not isinstance(value, torch.Tensor):  # of an ensemble
        return key == "index" and isinstance(value, TensorDictBase) and value.get("buffer_ids", None) is not None
    lead, shape = td.batch_size, value.shape
    has_dims = key == "index" and shape[:-1] == lead and shape[-1:].numel() > 1
    return (shape == lead or has_dims) and (value.is_floating_point() if key == WEIGHT else value.dtype == torch.int64)


def with_info(batch: Any, info: Mapping[str, Any]) -> Any:
    """A batch with what the sampler returned for its elements; changes it.

    Raises:
        TypeError: it is no TensorDict.
        ValueError: it has entries of its own under these names.
    """
    if not isinstance(batch, TensorDictBase):
        raise TypeError(
            f"include_info: expected batches that are TensorDicts, got {type(batch).__name__}. Pass return_info=True."
        )
    check_names("sample", batch, info)
    for name, value in info.items():
        for _ in range(batch.ndim - 1):  # elements with a batch size of their own: the same for all of each
            value = value.unsqueeze(1)
        batch.set(name, value.expand(*batch.batch_size, *value.shape[batch.ndim :]))
    return batch


def consuming(times: Any, sampler: Any, prefetch: Any, shared: bool) -> Sampler:
    """The sampler of a buffer whose elements are drawn so many times.

    Raises:
        ValueError, TypeError: another option cannot go with it.
    """
    count = positive("consume_after_n_samples", times)
    if sampler is not None and not isinstance(sampler, RandomSampler) and sampler is not RandomSampler:
        raise ValueError(
            f"consume_after_n_samples: expected no sampler beside it, or a RandomSampler, got {sampler!r}. Leave one "
            "out."
        )
    if prefetch:
        raise ValueError(
            "consume_after_n_samples: batches that are prefetched would be consumed too. Pass prefetch=None."
        )
    if shared:
        raise ValueError(
            "consume_after_n_samples: each process would consume for itself. Make the buffer with "
            "service_backend='process' instead of shared=True."
        )
    return ConsumingSampler(count)


def inverse_of(change: Transform) -> Transform | None:
    """The inverse of a transform that has one, of this library or of another.

    Ours know whether there is anything to invert, and TorchRL's where their classes define nothing of the kind. Those
    of others are asked with all data: ``inv`` returns as they are what it has nothing to do with.

    Raises:
        TypeError: a transform has an inverse that cannot be called.
    """
    is_ours = hasattr(change, "inverts")
    parts = getattr(change, "transforms", None)
    if is_ours and parts is not None:
        return cast(Any, change).inv if any(inverse_of(part) is not None for part in parts) else None
    if is_ours and not (getattr(change, "in_keys_inv", None) or cast(Any, change).inverts):
        return None
    if is_torchrl_transform(change) and not (_keys_inv(change) or overrides(change, *_INVERSES)):
        return None
    inverse: Transform | None = getattr(change, "inv", None)
    if callable(inverse):
        return _on_batches(inverse) if is_torchrl_transform(change) else inverse
    named = [name for name in ("_inv_call", "_inv_apply_transform") if callable(getattr(change, name, None))]
    if named:
        raise TypeError(
            f"transform: {type(change).__name__} has an inverse ({', '.join(named)}), and no method inv() that takes a "
            "batch: what is written would not be inverted. Give it one, or pass a function without."
        )
    return None


def inverted(inverse: Transform, data: Any) -> Any:
    """What is written, past an inverse; None: it has left nothing.

    A list of elements is given as a batch where they are of one form, else one by one.
    """
    batch = stacked(data) if isinstance(data, list) else data
    if isinstance(data, list) and isinstance(batch, list | LazyStackedTensorDict):
        return [item for item in map(inverse, data) if item is not None] or None
    return inverse(batch)


def _on_batches(inverse: Transform) -> Transform:
    """The inverse of a transform of TorchRL, some of which (``MultiStepTransform``) need a dimension of time."""

    def inverted(data: Any) -> Any:
        if not isinstance(data, TensorDictBase) or data.ndim:
            return inverse(data)
        found = inverse(data.unsqueeze(0))
        return found[0] if isinstance(found, TensorDictBase) and found.shape == (1,) else found

    return inverted


_INVERSES = ("inv", "_inv_call", "_inv_apply_transform")


def _keys_inv(change: Any) -> list[NestedKey]:
    """What a transform of TorchRL, or those of a chain, change on the way in."""
    if "Compose" in kind_in("torchrl", change):
        return [key for part in change for key in _keys_inv(part)]
    return list(change.in_keys_inv)


def stacked(items: list[Any]) -> Any:
    """Elements as a batch, where they are tensors, TensorDicts, or structures of those; else the list."""
    if not items:
        return items
    try:
        return batches.stacked(items)
    except ValueError:
        return items


def priorities_in(data: TensorDictBase, key: NestedKey) -> dict[str, Any]:
    """The priorities that were written to a batch of ``sample``, as arguments of ``update_priority``.

    Raises:
        KeyError: the batch has no such entry, or no ``"index"``.
    """
    missing = [name for name in (key, "index") if data.get(name, None) is None]
    if missing:
        raise KeyError(
            f"data: expected the entries {missing}, got {sorted(map(str, data.keys(True)))}. Pass a batch of sample(), "
            f"and first write what each element is worth into it: batch[{key!r}] = error.abs(). priority_key= "
            "of the buffer names another entry."
        )
    index, generation = cast(torch.Tensor, data.get("index")), data.get(GENERATION, None)
    for _ in range(data.ndim - 1):
        index, generation = index[:, 0], None if generation is None else generation[:, 0]
    return {"index": index, "priority": data.get(key), "generation": generation}


def entry_of(elements: Any, key: NestedKey) -> Any:
    """An entry of elements.

    Raises:
        TypeError: they are no TensorDicts.
    """
    if not isinstance(elements, TensorDictBase):
        raise TypeError(f"index: {key!r} names an entry, and the elements here have none. Pass places, such as [:].")
    return elements[key]
