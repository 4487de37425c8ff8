"""Make torchvision importable beside a torch that its compiled operators do not fit. Importing torchvision
registers the shapes of operators that its compiled library declares. Where that library does not load (it was
built for CUDA, torch was not), the declarations are missing, and every package that imports torchvision fails:
timm, transformers, accelerate. Networks need none of these operators, so declaring them is enough; calling one
raises an error that names it.

This file imports nothing of the package. Run as a program it installs itself into an environment with such a
torchvision, so that commands of other packages (`accelerate launch`) can import it too.
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

BOX_OPERATOR_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPERATOR_SCHEMAS = tuple(f"{name}{BOX_OPERATOR_SIGNATURE}" for name in ("nms", "qnms"))
COPIED_MODULE = "torchvision_operators"
"""The name of the copy beside an environment's packages."""
_LIBRARIES: list[object] = []
"""A library's declarations live as long as the library object."""


def declare_operators() -> bool:
    """Declare what torchvision's compiled library would; whether that was necessary."""
    spec = importlib.util.find_spec("torchvision") if "torchvision" not in sys.modules else None
    if spec is None or spec.origin is None or _can_load_library(Path(spec.origin).parent):
        return False
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return False  # another copy of this file was here first
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in OPERATOR_SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)
    return True


def _can_load_library(package: Path) -> bool:
    """Whether the compiled library is there and fits this torch; it is loaded then."""
    import torch

    try:
        for file in sorted(package.glob("_C*")):
            torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]
            return True
    except OSError:
        pass
    return False


class _TorchvisionFinder:
    """Stands first among the finders of modules until torchvision is looked for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            declare_operators()
        return None


def watch_torchvision_import() -> None:
    """Declare the operators when torchvision is imported, and do nothing until then."""
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())


def install_into_environment() -> None:
    """Have every Python of this environment watch, if its torchvision needs it."""
    if declare_operators():
        packages = Path(sysconfig.get_path("purelib"))
        shutil.copyfile(__file__, packages / f"{COPIED_MODULE}.py")
        (packages / f"{COPIED_MODULE}.pth").write_text(
            f"import {COPIED_MODULE}; {COPIED_MODULE}.watch_torchvision_import()\n"
        )


if __name__ == "__main__":
    install_into_environment()
