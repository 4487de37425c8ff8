"""torchvision beside a torch that its compiled operators do not fit: its model definitions are importable all the same.

Importing torchvision registers the shapes of operators that its compiled library declares. Where the library does not
load (it was built for CUDA, torch was not), the declarations are missing, and with torchvision everything falls that
imports it: timm, transformers, accelerate. Networks need none of these operators, so declaring them is enough; one that
does call them gets an error that names the operator.

This file stands alone. Run as a program it puts itself beside the packages of an environment with such a torchvision,
so that commands of other packages (`accelerate launch`) find it whole too.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
SCHEMAS = tuple(f"{name}{BOXES}" for name in ("nms", "qnms"))
COPY = "torchvision_operators"
"""The name of the copy beside an environment's packages."""
_KEPT: list[object] = []
"""A library's declarations live as long as the library object."""


def declare_operators() -> bool:
    """Declare what torchvision's compiled library would; whether that was necessary."""
    spec = importlib.util.find_spec("torchvision") if "torchvision" not in sys.modules else None
    if spec is None or spec.origin is None or _loads(Path(spec.origin).parent):
        return False
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return False  # another copy of this file was here first
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    _KEPT.append(library)
    return True


def _loads(package: Path) -> bool:
    """Whether the compiled library is there and fits this torch; it is loaded then."""
    import torch

    try:
        for file in sorted(package.glob("_C*")):
            torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]
            return True
    except OSError:
        pass
    return False


class _Watch:
    """Stands first among the finders of modules until torchvision is looked for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            declare_operators()
        return None


def watch() -> None:
    """Declare the operators when torchvision is imported, and do nothing until then."""
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def mend() -> None:
    """Have every Python of this environment watch, if its torchvision needs it."""
    if declare_operators():
        packages = Path(sysconfig.get_path("purelib"))
        shutil.copyfile(__file__, packages / f"{COPY}.py")
        (packages / f"{COPY}.pth").write_text(f"import {COPY}; {COPY}.watch()\n")


if __name__ == "__main__":
    mend()
