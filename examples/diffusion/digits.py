"""What training and sampling share: the path from an image to noise, its batches, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.data.labelled import Labelled
from tinyforge.rng import Stream
from tinyforge.train.objectives import Arrays

STEPS = 50  # of Euler's method


def features(t: np.ndarray, count: int) -> np.ndarray:
    """(B,), times of 0 to 1, to (B, count): sines and cosines of 1000 t at `count` / 2 frequencies."""
    angles = t[:, None] * 1000 * 10_000.0 ** (-np.arange(count // 2) / (count // 2))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def as_pixels(images: np.ndarray) -> np.ndarray:
    """(B, K, S, S) bytes to (B, S, S, K) of -1 to 1."""
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1), np.float32) / 127.5 - 1


def noised(images: np.ndarray, labels: np.ndarray, t: np.ndarray, noise: np.ndarray, count: int) -> Arrays:
    """The inputs of `UNet.forward`: x_t = (1 - t) x_0 + t noise, the time, the label, and the velocity noise - x_0."""
    x0 = as_pixels(images)
    at = t[:, None, None, None]
    mixed = ((1 - at) * x0 + at * noise).astype(np.float32)
    return Arrays((mixed, features(t, count), labels.astype(np.int32), (noise - x0).astype(np.float32)))


def batch_of(data: Labelled, rows: np.ndarray, stream: Stream, count: int) -> Arrays:
    """Some images at random times."""
    images = data.inputs[rows]
    batch, channels, height, width = images.shape
    noise = stream.fork("noise").normal((batch, height, width, channels))
    return noised(images, data.labels[rows], stream.fork("time").uniform((batch,)), noise, count)


def sampled(model: Any, labels: np.ndarray, seed: int, steps: int = STEPS) -> np.ndarray:
    """Images of these labels, (B, S, S, K) bytes: Euler's method from noise at t = 1 to t = 0."""
    backend, config = model.backend, model.config
    shape = (len(labels), config.image, config.image, config.channels)
    x = Stream(seed, "sample").normal(shape)
    ids = backend.asarray(labels.astype(np.int32))
    for step in range(steps):
        t = np.full(len(labels), 1 - step / steps)
        v = model.predict(backend.asarray(x), backend.asarray(features(t, config.features)), ids)
        x -= backend.to_numpy(v) / steps
    return np.clip((x + 1) * 127.5, 0, 255).astype(np.uint8)


def draw(images: np.ndarray, across: int, target: Path) -> None:
    """Images side by side, `across` in a row, as a PNG."""
    from matplotlib.image import imsave

    count, height, width, channels = images.shape
    down = -(-count // across)
    sheet = np.zeros((down * height, across * width, channels), np.uint8)
    for i, image in enumerate(images):
        r, c = divmod(i, across)
        sheet[r * height : (r + 1) * height, c * width : (c + 1) * width] = image
    sheet = np.kron(sheet, np.ones((2, 2, 1), np.uint8))
    imsave(target, np.repeat(sheet, 3, axis=2) if channels == 1 else sheet)
