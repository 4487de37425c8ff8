"""The README's Python examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), str(README), "exec"), {})
    said = capsys.readouterr().out
    assert "parameters" in said and "channels" in said
    assert (tmp_path / "small" / "plan.json").is_file()
