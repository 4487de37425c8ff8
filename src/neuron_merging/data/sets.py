"""sets: the table of data sets: which files, read by which reader, make up each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from neuron_merging.data.readers import Part, read_binary, read_idx, read_npz, read_python


@dataclass(frozen=True)
class Form:
    """One way in which a split lies on a disk: files (gzipped or not), or an archive of them."""

    read: Callable[[bytes], Part]
    files: tuple[str, ...]
    archive: str = ""
    partial: bool = False

    @property
    def downloads(self) -> tuple[str, ...]:
        """What is published of it."""
        return (self.archive,) if self.archive else tuple(f"{name}.gz" for name in self.files)


@dataclass(frozen=True)
class Set:
    """A data set: what its images are like, and where its files may lie."""

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sizes: Mapping[str, int]
    url: str
    forms: Mapping[str, tuple[Form, ...]]
    """By split; the first is the one to download."""
    subfolders: tuple[str, ...] = ("",)
    system: tuple[str, ...] = ()


def _fashion(stem: str) -> tuple[Form, ...]:
    return (Form(read_idx, (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")),)


def _cifar(classes: int, split: str, *batches: str) -> tuple[Form, ...]:
    ten = classes == 10
    binary, python = ("batches-bin", "batches-py") if ten else ("binary", "python")
    from_binary = partial(read_binary, label_bytes=1 if ten else 2)
    from_python = partial(read_python, label="labels" if ten else "fine_labels")
    bins = tuple(f"cifar-{classes}-{binary}/{batch}.bin" for batch in batches)
    pickles = tuple(f"cifar-{classes}-{python}/{batch}" for batch in batches)
    some = Form(read_npz, (f"cifar{classes}_train_2k.npz",), partial=True)
    return (
        Form(from_binary, bins, f"cifar-{classes}-binary.tar.gz"),
        Form(from_python, pickles, f"cifar-{classes}-python.tar.gz"),
        Form(read_npz, (f"cifar{classes}_{split}.npz",)),
        *([some] if split == "train" else []),
    )


MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
}
"""As published, for downloads only: the same data packed by someone else has another sum."""

_FASHION = Set(
    shape=(1, 28, 28),
    classes=10,
    mean=(0.5,),
    std=(0.5,),
    sizes={"train": 60_000, "test": 10_000},
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    forms={"train": _fashion("train"), "test": _fashion("t10k")},
    subfolders=("", "FashionMNIST/raw"),
    system=("/usr/share/datasets/fashion-mnist",),
)
_CIFAR10 = Set(
    shape=(3, 32, 32),
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    sizes={"train": 50_000, "test": 10_000},
    url="https://www.cs.toronto.edu/~kriz/",
    forms={
        "train": _cifar(10, "train", *(f"data_batch_{i}" for i in range(1, 6))),
        "test": _cifar(10, "test", "test_batch"),
    },
)
_CIFAR100 = replace(_CIFAR10, classes=100, forms={split: _cifar(100, split, split) for split in ("train", "test")})
SETS = {"fashion-mnist": _FASHION, "cifar-10": _CIFAR10, "cifar-100": _CIFAR100}
