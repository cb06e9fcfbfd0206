"""VideoRecorder: gathers the images of an environment, and writes them as videos."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys, key_str
from rollwright._video import VideoFiles, grid
from rollwright.envs.transforms.base import Transform

__all__ = ["VideoRecorder"]

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
