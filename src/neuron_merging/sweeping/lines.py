"""lines: tables as text for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence


def as_csv(lines: Sequence[Mapping[str, object]]) -> bytes:
    """Lines with the same keys, under a heading; None is left empty.

    >>> as_csv([{"ratio": 0.5, "error": None}])
    b'ratio,error\\n0.5,\\n'
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in line.items()} for line in lines)
    return text.getvalue().encode()
