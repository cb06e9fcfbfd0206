"""Writes frames as a video: an mp4 or gif file, or the bytes of a gif."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright.errors import require

__all__ = ["VideoFiles", "as_frames", "check_video_path", "gif_of", "grid", "save_video"]

_SUFFIXES = (".mp4", ".gif")


def check_video_path(name: str, path: str | os.PathLike[str]) -> Path:
    """The path of a video that can be written here.

    Raises:
        ValueError: its suffix is none of a video.
        MissingExtraError: what writes such a video is not installed.
    """
    found = Path(path)
    if found.suffix not in _SUFFIXES:
        raise ValueError(f"{name}: expected a path that ends in .mp4 or .gif, got {str(path)!r}.")
    require("imageio", extra="video", purpose=f"writing a {found.suffix} file")
    if found.suffix == ".mp4":
        require("imageio_ffmpeg", extra="video", purpose="writing an .mp4 file (a .gif needs no ffmpeg)")
    return found


def as_frames(name: str, video: Any) -> NDArray[np.uint8]:
    """A video as uint8 ``[T, H, W, 3]``.

    Args:
        name: of the argument, for the message.
        video: ``[T, C, H, W]`` or ``[N, T, C, H, W]`` (videos that are shown side by side) with one or three channels;
            integers from 0 to 255, or floats from 0 to 1.

    Raises:
        ValueError: it has another shape, or no frame.

    Example:
        >>> as_frames("frames", torch.ones(2, 5, 1, 4, 6)).shape
        (5, 4, 12, 3)
    """
    given = torch.as_tensor(video).detach().cpu()
    if given.ndim == 5:
        given = torch.stack([grid(frames) for frames in given.unbind(1)]) if len(given) > 1 else given[0]
    if given.ndim != 4 or given.shape[1] not in (1, 3) or not given.numel():
        raise ValueError(
            f"{name}: expected frames [T, C, H, W] or [N, T, C, H, W] with 1 or 3 channels, got shape "
            f"{list(given.shape)}. Bring the dimensions into that order."
        )
    if given.dtype.is_floating_point:
        given = given.clamp(0, 1).mul(255).round()
    shape = (-1, 3, -1, -1)
    found: NDArray[np.uint8] = given.to(torch.uint8).expand(shape).permute(0, 2, 3, 1).contiguous().numpy()
    return found


def grid(images: torch.Tensor) -> torch.Tensor:
    """Images ``[N, C, H, W]`` side by side in a square of them, ``[C, rows * H, columns * W]``; the rest is black."""
    count, channels, height, width = images.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    missing = images.new_zeros((rows * columns - count, channels, height, width))
    tiles = torch.cat([images, missing]).reshape(rows, columns, channels, height, width)
    return tiles.permute(2, 0, 3, 1, 4).reshape(channels, rows * height, columns * width)


def gif_of(frames: NDArray[np.uint8], fps: float) -> bytes:
    """Frames ``[T, H, W, 3]`` as an animated gif."""
    imageio: Any = require("imageio.v3", extra="video", purpose="writing a video")
    with io.BytesIO() as file:
        imageio.imwrite(file, frames, extension=".gif", duration=1000 / fps, loop=0)
        return file.getvalue()


def save_video(path: Path, frames: NDArray[np.uint8], fps: float) -> None:
    """Write frames ``[T, H, W, 3]``; the file is there whole, or not at all.

    Raises:
        MissingExtraError: what writes such a video is not installed.
        OSError: the disk is full or failing.
    """
    check_video_path("path", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        if path.suffix == ".gif":
            partial.write_bytes(gif_of(frames, fps))
        else:
            height, width = (-(-size // 2) * 2 for size in frames.shape[1:3])  # most players want even sizes
            even = np.zeros((len(frames), height, width, 3), np.uint8)
            even[:, : frames.shape[1], : frames.shape[2]] = frames
            imageio: Any = require("imageio", extra="video", purpose="writing a video")
            imageio.mimwrite(partial, even, fps=fps, macro_block_size=2)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class VideoFiles:
    """Writes videos into a folder, ``folder/NAME_STEP.mp4``, or to a path: ``run.gif``, then ``run_1.gif``...

    Args:
        target: a folder, or the path of an mp4 or gif file.
        suffix: of files in a folder; None: ``".mp4"`` where it can be written, else ``".gif"``.

    Raises:
        ValueError, MissingExtraError: see :func:`check_video_path`.
    """

    def __init__(self, target: str | os.PathLike[str], suffix: str | None = None) -> None:
        self._path = Path(target)
        self._is_file = self._path.suffix in _SUFFIXES
        if suffix is None and not self._is_file:
            suffix = ".gif" if _lacks_ffmpeg() else ".mp4"
        self._suffix = suffix or self._path.suffix
        check_video_path("format", f"x{self._suffix}")
        self._written = 0

    def log_video(self, name: str, frames: Any, step: int | None = None, fps: float = 30.0) -> Path:
        """Write a video; returns its path."""
        number = self._written if step is None else step
        if not self._is_file:
            path = self._path / f"{name}_{number}{self._suffix}"
        else:
            path = self._path if not self._written else self._path.with_stem(f"{self._path.stem}_{self._written}")
        save_video(path, as_frames("frames", frames), fps)
        self._written += 1
        return path


def _lacks_ffmpeg() -> bool:
    try:
        require("imageio_ffmpeg", extra="video", purpose="mp4")
    except ImportError:
        return True
    return False
