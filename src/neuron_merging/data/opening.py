"""A data set by the text that names it."""

from __future__ import annotations

from pathlib import Path

from neuron_merging.data.embedded import digits
from neuron_merging.data.folders import FolderImages
from neuron_merging.data.images import Images
from neuron_merging.data.search import Split, load


def open_data(text: str, split: Split, *, download: bool = False) -> Images | FolderImages:
    """The data set of `NAME` or `NAME:PATH`, where PATH is a folder or a file in it."""
    name, _, path = text.partition(":")
    if name == "digits":
        return digits(split)
    root = Path(path).expanduser() if path else None
    return load(name, split, root.parent if root and root.is_file() else root, download=download)
