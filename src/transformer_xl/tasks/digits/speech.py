"""Speech as features: WAV files, log-mel frames, and augmentation."""

import io
import tarfile
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import numpy as np
from jaxtyping import Float

from transformer_xl.data import opened
from transformer_xl.errors import DataError

RATE = 8_000
"""Samples a second."""
WINDOW, HOP, FFT = 200, 80, 256
"""Samples of a window (25 ms), between two windows (10 ms), and of its transform."""
N_MELS = 40
STACKED, STRIDE = 4, 2
"""Frames that are one input, and frames between two inputs (20 ms)."""
_LOWEST, _HIGHEST = 60.0, 3_900.0
SHRINKAGE = 0.25
"""Share of the identity in the correlations between bands that :func:`normalized` removes."""
_FLOOR, _LOUDNESS = 1e-4, 0.1


def mel_filters(warp: float = 1.0) -> Float[np.ndarray, "mels bins"]:
    """Return triangular filters, evenly spaced on the mel scale 2595 log10(1 + f / 700).

    A ``warp`` moves the filters along the frequency axis, as a vocal tract of another length does
    (Jaitly and Hinton, 2013).
    """
    low, high = (2595 * np.log10(1 + f / 700) for f in (_LOWEST, _HIGHEST))
    centers = 700 * (10 ** (np.linspace(low, high, N_MELS + 2) / 2595) - 1)
    centers = np.clip(centers * warp, 0, RATE / 2)
    bins = np.arange(FFT // 2 + 1) * RATE / FFT
    low, middle, high = (centers[k : N_MELS + k, None] for k in range(3))
    rising = (bins - low) / np.maximum(middle - low, 1e-9)
    falling = (high - bins) / np.maximum(high - middle, 1e-9)
    return np.clip(np.minimum(rising, falling), 0, None)


def log_mel(
    samples: Float[np.ndarray, " samples"], warp: float = 1.0
) -> Float[np.ndarray, "frames mels"]:
    """Return the logarithms of mel-filtered power spectra of Hann windows, 100 a second.

    The recording is scaled to one loudness, so that what is added below the logarithm is the same
    share of each.
    """
    scaled = samples * (_LOUDNESS / (np.sqrt((samples**2).mean()) + 1e-9))
    padded = np.pad(scaled, (0, max(0, WINDOW - len(samples))))
    emphasized = np.append(padded[0], padded[1:] - 0.97 * padded[:-1])
    frames = np.lib.stride_tricks.sliding_window_view(emphasized, WINDOW)[::HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW), FFT)) ** 2
    return np.log(power @ mel_filters(warp).T + _FLOOR)


def normalized(
    recordings: Sequence[Float[np.ndarray, "_ mels"]],
) -> list[Float[np.ndarray, "_ mels"]]:
    """Return the frames of one speaker's recordings with mean 0, deviation 1 and less correlation.

    Over several recordings, the means are those of the voice and the channel, and not of the words
    (mean and variance normalization by speaker), and so are the correlations between bands. A share
    of these is left (:data:`SHRINKAGE`), as few recordings do not tell them well; the bands stay
    what they are (ZCA whitening: the inverse square root of the correlations).
    """
    together = np.concatenate(recordings)
    mean, deviation = together.mean(0), together.std(0) + 1e-3
    scaled = (together - mean) / deviation
    correlations = scaled.T @ scaled / len(scaled)
    shrunk = (1 - SHRINKAGE) * correlations + SHRINKAGE * np.eye(len(correlations))
    values, vectors = np.linalg.eigh(shrunk)
    whitening = vectors @ np.diag(values**-0.5) @ vectors.T
    return [(frames - mean) / deviation @ whitening for frames in recordings]


def stacked(frames: Float[np.ndarray, "frames mels"]) -> Float[np.ndarray, "inputs features"]:
    """Return inputs of several frames each, which end with the newest one."""
    padded = np.concatenate([np.repeat(frames[:1], STACKED - 1, 0), frames])
    windows = np.lib.stride_tricks.sliding_window_view(padded, STACKED, axis=0)
    return windows[STRIDE - 1 :: STRIDE].transpose(0, 2, 1).reshape(-1, STACKED * frames.shape[1])


def resampled(samples: Float[np.ndarray, " n"], factor: float) -> Float[np.ndarray, " m"]:
    """Play samples ``factor`` times as fast, which raises pitch and formants alike."""
    n = len(samples)
    m = max(1, round(n / factor))
    spectrum = np.fft.rfft(samples)
    resized = np.zeros(m // 2 + 1, dtype=complex)
    kept = min(len(spectrum), len(resized))
    resized[:kept] = spectrum[:kept]
    return np.fft.irfft(resized, m) * (m / n)


def augmented(
    samples: Float[np.ndarray, " samples"], draw: np.random.Generator, warp: float
) -> Float[np.ndarray, "frames mels"]:
    """Return log-mel frames of a recording as another speaker might have spoken it elsewhere.

    Speed, tempo, room, silence around it and noise are drawn, and the length of the vocal tract
    around ``warp``.
    """
    x = resampled(samples, float(np.exp(draw.uniform(-0.15, 0.15))))
    if draw.random() < 0.2:
        length = int(RATE * draw.uniform(0.03, 0.2))
        decay = draw.standard_normal(length) * np.exp(-6.9 * np.arange(length) / length)
        decay *= draw.uniform(0.1, 0.5) / np.sqrt((decay**2).sum())
        decay[0] = 1.0
        x = np.convolve(x, decay)[: len(x)]
    silence = [int(n) for n in draw.integers(0, RATE // 8, 2)]
    x = np.pad(x, silence)
    noise = draw.standard_normal(len(x))
    if draw.random() < 0.5:
        # Brown noise, which has its power in low frequencies.
        noise = np.cumsum(noise)
        noise -= np.convolve(noise, np.ones(200) / 200, mode="same")
    level = 10 ** (-draw.uniform(25, 60) / 20)
    x = x + noise * level * x.std() / (noise.std() + 1e-12)
    frames = log_mel(x, warp=warp * float(np.exp(draw.uniform(-0.05, 0.05))))
    times = np.arange(0, len(frames) - 1, np.exp(draw.uniform(-0.4, 0.4)))
    below = times.astype(int)
    part = (times - below)[:, None]
    return frames[below] * (1 - part) + frames[np.minimum(below + 1, len(frames) - 1)] * part


def masked(
    frames: Float[np.ndarray, "frames mels"], draw: np.random.Generator
) -> Float[np.ndarray, "frames mels"]:
    """Return frames with a band and a span of time at the mean (SpecAugment, Park et al. 2019)."""
    frames = frames.copy()
    first = draw.integers(0, N_MELS)
    frames[:, first : first + draw.integers(0, N_MELS // 4)] = 0.0
    span, start = draw.integers(0, max(1, len(frames) // 6)), draw.integers(0, len(frames))
    frames[start : start + span] = 0.0
    return frames


def recordings_in(path: Path) -> Iterator[tuple[str, Float[np.ndarray, " samples"]]]:
    """Yield names and samples, between -1 and 1, of the WAV files of an archive, sorted by name.

    Raises:
        OSError: The archive cannot be read.
        DataError: It is no gzip-compressed tar archive, or a file in it is no mono 16-bit WAV file
            at 8 kHz.
    """
    with opened(path) as stream:
        # In memory, as members are not read in the order of the archive.
        content = io.BytesIO(stream.read())
    try:
        with tarfile.open(fileobj=content, mode="r:") as files:
            members = [x for x in files.getmembers() if x.isfile() and x.name.endswith(".wav")]
            for member in sorted(members, key=lambda x: x.name):
                try:
                    with wave.open(cast(IO[bytes], files.extractfile(member))) as file:
                        about = file.getnchannels(), file.getsampwidth(), file.getframerate()
                        data = file.readframes(file.getnframes())
                except (wave.Error, EOFError) as error:
                    raise DataError(f"{path}, {member.name}: no WAV file: {error}") from error
                if about != (1, 2, RATE):
                    raise DataError(
                        f"{path}, {member.name}: a WAV file of {about[0]} channels, {about[1]} "
                        f"bytes a sample and {about[2]} Hz: mono files of 2 bytes and {RATE} Hz "
                        "are read"
                    )
                if len(data) % 2:
                    raise DataError(f"{path}, {member.name}: a WAV file that ends within a sample")
                yield Path(member.name).stem, np.frombuffer(data, "<i2").astype(np.float64) / 2**15
    except tarfile.TarError as error:
        raise DataError(f"{path} is no tar archive: {error}") from error
