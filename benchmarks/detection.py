"""Average precision of FastestDet (AP50), measured in onnxruntime.

    python benchmarks/detection.py [small.onnx ...]     # the original, then the given files
    python benchmarks/detection.py --compress 80%       # the original, compressed without data and with 32 pictures
    python benchmarks/detection.py --compress 80% --effort best --data pictures     # only with pictures, and distilled

With `--compress`, AP50 is measured on the 96 pictures that the fit does not use.

The original and the pictures are read from the folder $NEURON_MERGING_DATA: `fastestdet_coco.onnx`, as its authors
export it, and `coco_val128.zip`, the first 128 pictures of COCO val2017 at 352 × 352 pixels with their boxes.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from PIL import Image

import neuron_merging as nm

Array = NDArray[np.float64]
MODEL_FILE, PICTURE_FILE = "fastestdet_coco.onnx", "coco_val128.zip"
MIN_SCORE, MAX_OVERLAP, MATCH_OVERLAP = 0.01, 0.45, 0.5
"""Least score of a detection; overlap above which a weaker box is dropped; overlap from which a box counts as found."""
FIT_PICTURES = 32
"""Pictures to calibrate on."""
DATA_KINDS = "none", "pictures"
OBJECT_POWER, CLASS_POWER = 0.6, 0.4
"""score = objectness^0.6 · class score^0.4"""


@dataclass(frozen=True)
class Picture:
    """A picture as the network takes it (BGR in 0..1), and its boxes: class, then left, top, right, bottom."""

    pixels: NDArray[np.float32]
    boxes: Array


def find_data(name: str) -> Path:
    folder = os.environ.get("NEURON_MERGING_DATA")
    if not folder:
        sys.exit("Set NEURON_MERGING_DATA to the folder that holds the network and the pictures.")
    return Path(folder) / name


@cache
def read_pictures() -> tuple[Picture, ...]:
    """Read all pictures with their boxes."""
    with zipfile.ZipFile(find_data(PICTURE_FILE)) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        return tuple(_read_picture(archive, name) for name in names)


def _read_picture(archive: zipfile.ZipFile, name: str) -> Picture:
    image = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
    pixels = np.asarray(image, np.float32)[:, :, ::-1].transpose(2, 0, 1) / 255
    rows = [line.split() for line in archive.read(name.replace(".jpg", ".txt")).decode().splitlines() if line.strip()]
    given = np.array(rows, float).reshape(-1, 5)
    return Picture(np.ascontiguousarray(pixels[None]), np.c_[given[:, 0], to_corners(given[:, 1:])])


def to_corners(boxes: Array) -> Array:
    """Convert boxes from centre and size to left, top, right, bottom."""
    return np.c_[boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2]


def decode(output: Array) -> Array:
    """Return the detections of one output (85, rows, columns): class, score, left, top, right, bottom."""
    _, rows, columns = output.shape
    cell_y, cell_x = np.mgrid[:rows, :columns]
    offsets, sizes = np.tanh(output[1:3]), 1 / (1 + np.exp(-output[3:5]))
    centre = np.stack([(offsets[0] + cell_x) / columns, (offsets[1] + cell_y) / rows])
    classes = output[5:].argmax(0)
    score = output[0] ** OBJECT_POWER * output[5:].max(0) ** CLASS_POWER
    boxes = to_corners(np.concatenate([centre, sizes]).reshape(4, -1).T)
    found = np.c_[classes.ravel(), score.ravel(), boxes]
    return suppress_overlaps(found[found[:, 1] > MIN_SCORE])


def suppress_overlaps(found: Array) -> Array:
    """Drop boxes that overlap a stronger one of the same class."""
    left, kept = found[np.argsort(-found[:, 1], kind="stable")], []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        overlaps = compute_overlaps(best[2:], left[:, 2:])
        left = left[(left[:, 0] != best[0]) | (overlaps <= MAX_OVERLAP)]
    return np.array(kept).reshape(-1, 6)


def compute_overlaps(box: Array, others: Array) -> Array:
    """Return intersection over union of one box with others."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    shared = np.clip(high - low, 0, None).prod(1)
    union = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - shared
    return np.asarray(shared / np.maximum(union, 1e-12))


def compute_ap50(detections: Sequence[Array], truths: Sequence[Array]) -> float:
    """Return the mean over the classes present of the area under the precision-recall curve, in percent."""
    present = sorted({int(kind) for boxes in truths for kind in boxes[:, 0]})
    return 100 * float(np.mean([_compute_class_ap(kind, detections, truths) for kind in present]))


def _compute_class_ap(kind: int, detections: Sequence[Array], truths: Sequence[Array]) -> float:
    boxes = [own[own[:, 0] == kind, 1:] for own in truths]
    claims = [(row[1], i, row[2:]) for i, own in enumerate(detections) for row in own[own[:, 0] == kind]]
    taken = [np.zeros(len(own), bool) for own in boxes]
    hits = []
    for _, i, box in sorted(claims, key=lambda claim: -claim[0]):
        overlaps = compute_overlaps(box, boxes[i]) if len(boxes[i]) else np.zeros(1)
        best = int(overlaps.argmax())
        hit = overlaps[best] >= MATCH_OVERLAP and not taken[i][best]
        if hit:
            taken[i][best] = True
        hits.append(hit)
    found = np.cumsum(hits)
    recall, precision = found / sum(map(len, boxes)), found / np.arange(1, len(hits) + 1)
    # The precision at a recall is the best one at that recall or a higher one.
    envelope = np.maximum.accumulate(precision[::-1])[::-1] if len(hits) else precision
    return float((np.diff(np.r_[0.0, recall]) * envelope).sum())


def measure_ap50(file: str | Path, pictures: Sequence[Picture] | None = None) -> float:
    """Run a file in onnxruntime on the pictures and return its AP50 in percent."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    name, chosen = session.get_inputs()[0].name, read_pictures() if pictures is None else pictures
    outputs = [session.run(None, {name: picture.pixels})[0][0].astype(float) for picture in chosen]
    return compute_ap50([decode(output) for output in outputs], [picture.boxes for picture in chosen])


def compress_and_measure(budget: str, effort: str, kinds: Sequence[str]) -> None:
    """Compress the original once for each kind of data, and print AP50 on other pictures and seconds of CPU."""
    pictures = read_pictures()
    fit, test = torch.cat([torch.from_numpy(own.pixels) for own in pictures[:FIT_PICTURES]]), pictures[FIT_PICTURES:]
    print(f"original: AP50 {measure_ap50(find_data(MODEL_FILE), test):.1f}", flush=True)
    rows = {"none": ("without data", None), "pictures": (f"{FIT_PICTURES} pictures", [fit])}
    for label, data in (rows[kind] for kind in kinds):
        start = time.process_time()
        small = nm.compress(
            find_data(MODEL_FILE), budget={"macs": budget}, scope="all", calibration=data, effort=effort
        )
        seconds = time.process_time() - start
        with tempfile.TemporaryDirectory() as folder:
            small.save(Path(folder) / "small.onnx")
            score = measure_ap50(Path(folder) / "small.onnx", test)
        print(f"{budget} of the MACs, {label}: AP50 {score:.1f} ({seconds:.0f} s of CPU)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="files made from the original")
    parser.add_argument("--compress", metavar="SHARE", help="compress the original to this share of the MACs, as 80%%")
    parser.add_argument("--effort", default="normal", help='effort of the compression: "best" distils on the pictures')
    parser.add_argument("--data", choices=DATA_KINDS, help="compress with this data only")
    arguments = parser.parse_args()
    if arguments.compress:
        kinds = [arguments.data] if arguments.data else DATA_KINDS
        return compress_and_measure(arguments.compress, arguments.effort, kinds)
    for file in [find_data(MODEL_FILE), *arguments.files]:
        print(f"{file.name}: AP50 {measure_ap50(file):.1f}", flush=True)
    return None


if __name__ == "__main__":
    main()
