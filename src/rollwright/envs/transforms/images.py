"""Transforms of images: ToTensorImage, GrayScale, Resize, CenterCrop, and VideoRecorder, which writes videos."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.nn import functional

from rollwright._keys import NestedKey, as_keys, key_str
from rollwright._video import VideoFiles, grid
from rollwright.data.specs import Bounded, TensorSpec, Unbounded
from rollwright.envs.transforms.base import EntryTransform, KeySeq, Transform

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


_CHANNELS = (1, 3)


class VideoRecorder(Transform):
    """Gathers the images of an environment until :meth:`dump` writes them as a video. It changes nothing.

    An :class:`~rollwright.collectors.Evaluator` calls ``dump()`` after each evaluation. Closing the environment writes
    what was not written yet. Frames are held in memory until then, a byte for each colour of each pixel.

    It sees the images as they are where it stands: put it before transforms that make them small or grey. Put it around
    a batch of environments, not on each of them.

    Args:
        logger: a logger of :mod:`rollwright.collectors.loggers`, or any object with ``log_video(name, video, step=)``,
            those of TorchRL too; or a path: a folder, for files ``TAG_0.mp4``, ``TAG_1.mp4``... (gif where ffmpeg is
            missing), or one that ends in ``.mp4`` or ``.gif``. None: :meth:`dump` drops the frames.
        tag: name of the video.
        in_keys: images ``[*env, H, W, C]`` or ``[*env, C, H, W]`` with one or three channels, or ``[*env, H, W]``;
            integers from 0 to 255, or floats from 0 to 1. Default ``["pixels"]``.
        skip: keep every so-manyth image. None: 2 for a single environment, else 1.
        center_crop: size of a square to cut out of the middle of each image.
        make_grid: show the environments of a batch side by side; False: their images follow one another. None: True on
            an environment, False on data.
        out_keys: must equal ``in_keys``, which stay as they are.
        fps: frames per second; None: the logger's default.
        **kwargs: more arguments for ``logger.log_video``.

    Raises:
        ValueError, TypeError: an argument is wrong.
        MissingExtraError: ``logger`` is a path, and imageio is not installed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from rollwright.envs import GymEnv
        >>> from rollwright.envs.transforms import TransformedEnv
        >>> folder = tempfile.TemporaryDirectory()
        >>> recorder = VideoRecorder(Path(folder.name) / "run.gif", tag="run", skip=1)
        >>> recorder._apply_transform(torch.zeros(8, 6, 3, dtype=torch.uint8)).shape
        torch.Size([8, 6, 3])
        >>> recorder.dump()
        >>> (Path(folder.name) / "run.gif").read_bytes()[:3]
        b'GIF'
        >>> folder.cleanup()
    """

    _not_saved = ("logger", "obs", "_begun")

    def __init__(
        self,
        logger: Any,
        tag: str | None,
        in_keys: Sequence[NestedKey] | None = None,
        skip: int | None = None,
        center_crop: int | None = None,
        make_grid: bool | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        fps: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(["pixels"] if in_keys is None else in_keys)
        if out_keys is not None and as_keys(out_keys) != self.in_keys:
            raise ValueError(
                f"out_keys: expected {key_str(self.in_keys)}, the in_keys, which a recorder leaves as they are; got "
                f"{out_keys!r}. Leave it out."
            )
        for name, value in (("skip", skip), ("center_crop", center_crop)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}: expected an integer of at least 1, or None, got {value!r}.")
        if isinstance(logger, str | os.PathLike):
            logger = VideoFiles(logger)
        if logger is not None and not callable(getattr(logger, "log_video", None)):
            raise TypeError(
                f"logger: expected a path, or an object with log_video(), got {type(logger).__name__}. Pass for "
                "example 'videos', or a rollwright.collectors.loggers.CSVLogger."
            )
        if logger is not None and not isinstance(tag, str):
            raise TypeError(f"tag: expected the name of the video, got {tag!r}.")
        self.logger, self.tag, self.center_crop = logger, tag, center_crop
        self.skip, self.make_grid = skip, make_grid
        self.video_kwargs = kwargs if fps is None else {**kwargs, "fps": fps}
        self.iter = self.count = 0
        self.obs: list[torch.Tensor] = []
        self._begun: list[torch.Tensor] = []  # of a reset after which no step was taken: they are of the next video

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        self.obs += self._gathered(obs)
        return obs

    def _gathered(self, obs: torch.Tensor) -> list[torch.Tensor]:
        skip = self.skip or (2 if self.parent is not None and not self.parent.batch_size else 1)
        self.count += 1
        if self.count % skip:
            return []
        images = self._images(obs)
        make_grid = self.parent is not None if self.make_grid is None else self.make_grid
        return [grid(images)] if make_grid and len(images) > 1 else [*images.unbind(0)]

    def _images(self, obs: torch.Tensor) -> torch.Tensor:
        """Images as uint8 ``[N, C, H, W]``, copied."""
        ndim = 0 if self.parent is None else self.parent.ndim
        found = obs.unsqueeze(-3) if obs.ndim == ndim + 2 else obs
        if found.ndim >= 3 and found.shape[-3] not in _CHANNELS and found.shape[-1] in _CHANNELS:
            found = found.movedim(-1, -3)
        if found.ndim < 3 or found.shape[-3] not in _CHANNELS:
            raise ValueError(
                f"VideoRecorder: expected images [*env, H, W, C] or [*env, C, H, W] with 1 or 3 channels in "
                f"{key_str(self.in_keys)}, got shape {list(obs.shape)}. Correct in_keys, or make the environment with "
                "from_pixels=True."
            )
        if self.center_crop is not None:
            height, width = found.shape[-2:]
            size = min(self.center_crop, height, width)
            top, left = (height - size) // 2, (width - size) // 2
            found = found[..., top : top + size, left : left + size]
        if found.dtype.is_floating_point:
            found = found.clamp(0, 1).mul(255).round()
        found = found.expand(*found.shape[:-3], 3, -1, -1).reshape(-1, 3, *found.shape[-2:])
        return found.to("cpu", torch.uint8, copy=True)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        begun, self._begun = self._begun, []
        self.obs += begun
        self._apply_to(next_tensordict, may_lack=False)
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        marks = None if tensordict is None else tensordict.get("_reset", None)
        if marks is None or bool(marks.all()):  # of a part of a batch, the other rows hold nothing new
            found = (tensordict_reset.get(key, None) for key in self.in_keys)
            self._begun = [image for value in found if value is not None for image in self._gathered(value)]
        return tensordict_reset

    def dump(self, suffix: str | None = None, step: int | None = None, **kwargs: Any) -> None:
        """Write the images gathered since the last call as a video; without any, only count the call.

        Args:
            suffix: put behind the tag, ``TAG_SUFFIX``.
            step: of the video; None: the number of calls before.
            **kwargs: more arguments for ``logger.log_video``.
        """
        images, self.obs, self.count = self.obs, [], 0
        if images and self.logger is not None:
            name = str(self.tag) if suffix is None else f"{self.tag}_{suffix}"
            video = torch.stack(images).unsqueeze(0)
            self.logger.log_video(
                name, video, step=self.iter if step is None else step, **{**self.video_kwargs, **kwargs}
            )
        self.iter += 1

    def close(self) -> None:
        """Write what was not written yet."""
        if self.obs:
            self.dump()

    def __repr__(self) -> str:
        return f"VideoRecorder(tag={self.tag!r}, keys={key_str(self.in_keys)}, frames={len(self.obs)})"
