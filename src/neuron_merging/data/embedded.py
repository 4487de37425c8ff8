"""embedded: real images that come with a Python package."""

from __future__ import annotations

import numpy as np
import torch

from neuron_merging.data.faults import need
from neuron_merging.data.images import Images
from neuron_merging.data.search import Split


def digits(split: Split = "test") -> Images:
    """scikit-learn's 1,797 handwritten digits (8x8): of each class every fourth is for the test.

    Parameters
    ----------
    split
        "train" or "test".

    Returns
    -------
    Images
        Labelled images, in memory.

    Raises
    ------
    MergingError
        scikit-learn is not installed.

    Examples
    --------
    >>> len(digits("train")), len(digits("test"))
    (1352, 445)
    """
    bunch = need("sklearn.datasets", "scikit-learn").load_digits()
    x, y = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None], bunch.target
    rank = np.array([np.sum(y[:i] == label) for i, label in enumerate(y)])
    chosen = (rank % 4 == 3) == (split == "test")
    pixels, labels = torch.from_numpy(x[chosen]), torch.from_numpy(y[chosen].astype(np.int64))
    return Images(pixels, labels, (0.3053,), (0.3761,), f"digits {split}", 10)
