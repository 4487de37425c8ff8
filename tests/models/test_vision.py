"""torchvision beside a torch that it was not built for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import torchvision_operators

BROKEN = """
import torch
torch.library.register_fake("torchvision::nms")(lambda dets, scores, iou_threshold: dets)
"""


@pytest.mark.parametrize("watching", [True, False])
def test_a_package_whose_operators_do_not_load_is_importable(tmp_path: Path, watching: bool) -> None:
    """In a process of its own: operators that are registered with torch once stay registered."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(BROKEN)
    (package / "_C.so").write_bytes(b"built for another torch")
    alone = tmp_path / "alone.py"
    alone.write_text(Path(torchvision_operators.__file__).read_text())
    code = (
        "import alone; alone.watch_torchvision_import(); alone.watch_torchvision_import(); import torchvision"
        if watching
        else "import torchvision"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path += {sys.path!r}; {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == watching, done.stderr
    assert watching or "torchvision::nms does not exist" in done.stderr
