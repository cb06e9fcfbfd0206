"""Transforms of images: ToTensorImage, GrayScale, Resize, CenterCrop."""

from __future__ import annotations

import torch
from torch.nn import functional

from rollwright.data.specs import Bounded, TensorSpec, Unbounded
from rollwright.envs.transforms.base import EntryTransform, KeySeq

__all__ = ["CenterCrop", "GrayScale", "Resize", "ToTensorImage"]

_LUMA = (0.2989, 0.587, 0.114)  # of red, green and blue, ITU-R BT.601
_MODES = ("nearest", "nearest-exact", "bilinear", "bicubic")
_SMOOTH = ("bilinear", "bicubic")


class _Image(EntryTransform):
    """A change of images, whose elements lie between the least and the greatest value of what they are made of."""

    def __init__(self, in_keys: KeySeq, out_keys: KeySeq) -> None:
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)

    def _limit(self, value: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
        """What a bound of all elements becomes."""
        return value.to(example.dtype)

    def _change_spec(self, spec: TensorSpec) -> TensorSpec:
        example = self._apply_transform(spec.zero())
        if not isinstance(spec, Bounded):
            return Unbounded(example.shape, device=spec.device, dtype=example.dtype)
        low, high = (self._limit(end, example) for end in (spec.low.min(), spec.high.max()))
        return Bounded(low, high, example.shape, spec.device, example.dtype)

    def _check_image(self, obs: torch.Tensor, wanted: str, channels: tuple[int, ...] = ()) -> None:
        if obs.ndim < 3 or (channels and obs.shape[-3] not in channels):
            raise ValueError(
                f"{type(self).__name__}: expected images {wanted}, got shape {tuple(obs.shape)}. Correct in_keys, or "
                "put ToTensorImage before it."
            )


class ToTensorImage(_Image):
    """Turns images ``[..., H, W, C]`` into ``[..., C, H, W]``, and integers from 0 to 255 into floats from 0 to 1.

    Args:
        from_int: whether to divide by 255; None: where elements are integers.
        unsqueeze: add a dimension before the channels.
        dtype: of the result; None: torch's default dtype.
        in_keys: images; default ``["pixels"]``.
        out_keys: where to write; default: ``in_keys``.
        shape_tolerant: leave images alone whose last dimension is not 1 or 3, which have channels in front.

    Example:
        >>> from tensordict import TensorDict
        >>> image = ToTensorImage()(TensorDict({"pixels": torch.full((8, 6, 3), 255, dtype=torch.uint8)}))["pixels"]
        >>> image.shape, image.max()
        (torch.Size([3, 8, 6]), tensor(1.))
    """

    def __init__(
        self,
        from_int: bool | None = None,
        unsqueeze: bool = False,
        dtype: torch.dtype | None = None,
        *,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        shape_tolerant: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.from_int, self.unsqueeze, self.shape_tolerant = from_int, unsqueeze, shape_tolerant
        self.dtype = torch.get_default_dtype() if dtype is None else dtype

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        self._check_image(obs, "[..., H, W, C]")
        if not self.shape_tolerant or obs.shape[-1] in (1, 3):
            obs = obs.movedim(-1, -3)
        if self._divides(obs.dtype):
            obs = obs.div(255)
        obs = obs.to(self.dtype)
        return obs.unsqueeze(-4) if self.unsqueeze else obs

    def _divides(self, dtype: torch.dtype) -> bool:
        return self.from_int if self.from_int is not None else not dtype.is_floating_point

    def _limit(self, value: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
        return (value.div(255) if self._divides(value.dtype) else value).to(example.dtype)


class GrayScale(_Image):
    """Turns images of three channels, ``[..., 3, H, W]``, into grey ones, ``[..., 1, H, W]``.

    The value is ``0.2989 * red + 0.587 * green + 0.114 * blue`` (ITU-R BT.601), cut off to an integer for integers.

    Args:
        in_keys: images; default ``["pixels"]``.
        out_keys: where to write; default: ``in_keys``.

    Raises:
        ValueError: an image has neither three channels nor one, which is grey already.

    Example:
        >>> from tensordict import TensorDict
        >>> GrayScale()(TensorDict({"pixels": torch.ones(3, 8, 6)}))["pixels"].shape
        torch.Size([1, 8, 6])
    """

    def __init__(self, in_keys: KeySeq = None, out_keys: KeySeq = None) -> None:
        super().__init__(in_keys, out_keys)

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        self._check_image(obs, "[..., 3, H, W]", (1, 3))
        if obs.shape[-3] == 1:
            return obs
        red, green, blue = obs.unbind(-3)
        return (_LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue).to(obs.dtype).unsqueeze(-3)

    def _change_spec(self, spec: TensorSpec) -> TensorSpec:
        changed = super()._change_spec(spec)
        if not isinstance(changed, Bounded):
            return changed
        low, high = changed.low.min(), changed.high.max()  # the weights sum up to a little less than 1
        low, high = torch.minimum(low, low * sum(_LUMA)), torch.maximum(high, high * sum(_LUMA))
        low, high = (end.to(changed.low.dtype) for end in (low, high))
        return Bounded(low, high, changed.shape, changed.device, changed.dtype)


class Resize(_Image):
    """Changes the size of images ``[..., C, H, W]``, by ``torch.nn.functional.interpolate``.

    Args:
        w: new size of the last dimension but one.
        h: new size of the last dimension; None: as ``w``.
        interpolation: ``"nearest"``, ``"nearest-exact"``, ``"bilinear"`` or ``"bicubic"``; the last two with
            antialiasing.
        in_keys: images; default ``["pixels"]``.
        out_keys: where to write; default: ``in_keys``.

    Raises:
        ValueError: a size below 1, or an unknown interpolation.

    Example:
        >>> from tensordict import TensorDict
        >>> Resize(84)(TensorDict({"pixels": torch.rand(3, 210, 160)}))["pixels"].shape
        torch.Size([3, 84, 84])
    """

    def __init__(
        self,
        w: int,
        h: int | None = None,
        interpolation: str = "bilinear",
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.w, self.h = _sizes(w, h)
        if interpolation not in _MODES:
            raise ValueError(f"interpolation: expected one of {_MODES}, got {interpolation!r}.")
        self.interpolation = interpolation

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        self._check_image(obs, "[..., C, H, W]")
        if obs.shape[-2:] == (self.w, self.h):
            return obs
        flat, smooth = obs.reshape(-1, *obs.shape[-3:]), self.interpolation in _SMOOTH
        is_computed = flat.dtype.is_floating_point or flat.dtype == torch.uint8
        given = flat if is_computed else flat.to(torch.float32)
        found = functional.interpolate(given, (self.w, self.h), mode=self.interpolation, antialias=smooth)
        if not is_computed:
            found = found.round().to(flat.dtype)
        return found.reshape(*obs.shape[:-2], self.w, self.h)

    def _change_spec(self, spec: TensorSpec) -> TensorSpec:
        changed = super()._change_spec(spec)
        if self.interpolation != "bicubic" or changed.dtype == torch.uint8:
            return changed
        dtype = changed.dtype or torch.float32
        return Unbounded(changed.shape, device=changed.device, dtype=dtype)  # cubic curves overshoot

    def __repr__(self) -> str:
        return f"Resize(w={self.w}, h={self.h}, interpolation={self.interpolation!r}, keys={self.in_keys})"


class CenterCrop(_Image):
    """Cuts out the middle of images ``[..., H, W]``.

    Args:
        w: new size of the last dimension but one.
        h: new size of the last dimension; None: as ``w``.
        in_keys: images; default ``["pixels"]``.
        out_keys: where to write; default: ``in_keys``.

    Raises:
        ValueError: a size below 1; or an image is smaller.

    Example:
        >>> from tensordict import TensorDict
        >>> CenterCrop(2)(TensorDict({"pixels": torch.arange(16).view(1, 4, 4)}))["pixels"]
        tensor([[[ 5,  6],
                 [ 9, 10]]])
    """

    def __init__(self, w: int, h: int | None = None, in_keys: KeySeq = None, out_keys: KeySeq = None) -> None:
        super().__init__(in_keys, out_keys)
        self.w, self.h = _sizes(w, h)

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        self._check_image(obs, "[..., C, H, W]")
        spare = obs.shape[-2] - self.w, obs.shape[-1] - self.h
        if min(spare) < 0:
            raise ValueError(
                f"w, h: expected images of at least {self.w} x {self.h}, got {tuple(obs.shape[-2:])}. Put "
                "Resize before it."
            )
        top, left = (round(each / 2) for each in spare)
        return obs[..., top : top + self.w, left : left + self.h]


def _sizes(w: int, h: int | None) -> tuple[int, int]:
    for name, size in (("w", w), ("h", h)):
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{name}: expected an integer of at least 1, got {size!r}.")
    return w, w if h is None else h
