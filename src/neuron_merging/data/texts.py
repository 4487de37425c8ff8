"""Text files as batches of tokens, for language models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuron_merging.errors import MergingError
from neuron_merging.graph.process_state import silence_logging
from neuron_merging.inputs.text import load_tokenizer

TEXT_SUFFIXES = (".txt", ".md")
"""Suffixes of files that `--calibrate` and `--eval` read as text."""
MAX_TEXT_CHARACTERS = 2**24
"""Characters of a file that are read; the rest is not used."""
TEXTS_PER_BATCH = 4
MAX_CALIBRATION_TEXTS, MAX_EVAL_TEXTS, EVAL_LENGTH = 64, 40, 512
"""Texts that the command line calibrates on (of 256 tokens) and judges on, and tokens of the latter."""


@dataclass(frozen=True)
class TextFile:
    """A text file whose tokens depend on the network's tokenizer."""

    path: str

    def __iter__(self) -> Iterator[Any]:
        """Raise an error: text has no batches before a tokenizer encoded it."""
        raise MergingError("a text file is only used by compress", where=self.path, fix="Give batches: nm.texts.")

    def encode(self, tokenizer: Any, length: int, count: int) -> list[dict[str, Tensor]]:
        """Return batches of tokens."""
        return texts(self.path, tokenizer, length=length, count=count)


def texts(
    place: str | Path, tokenizer: Any, *, length: int = 256, count: int | None = None, batch: int = TEXTS_PER_BATCH
) -> list[dict[str, Tensor]]:
    """Read a text file as batches of tokens, for `compress(calibration=, evaluate=)` of a language model.

    Parameters
    ----------
    place
        A file of plain text.
    tokenizer
        A tokenizer of transformers, or the folder or name that it is loaded from; nothing is downloaded.
    length
        Tokens per text. A text is any part of the file of this length.
    count
        The largest number of texts, taken at equal distances; None takes all.
    batch
        Texts in a batch.

    Returns
    -------
    list[dict[str, Tensor]]
        Batches with `input_ids` and `attention_mask`, each of `batch` × `length` tokens.

    Raises
    ------
    MergingError
        The file cannot be read, or is shorter than one text.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
    ...     _ = file.write("one two three four " * 100)
    ...     file.flush()
    ...     found = texts(file.name, lambda text: {"input_ids": [len(word) for word in text.split()]}, length=50)
    >>> [batch["input_ids"].shape for batch in found]
    [torch.Size([4, 50]), torch.Size([4, 50])]
    """
    encode = load_tokenizer(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
    with silence_logging():  # transformers warns of texts beyond the model's length, which are cut here
        tokens = torch.as_tensor(encode(_read_text(place))["input_ids"], dtype=torch.int64).flatten()
    # Texts follow each other without a gap; what is left at the end is shorter than one text.
    available = len(tokens) // length
    if not available:
        what = f"{place} has {len(tokens):,} tokens, fewer than the {length:,} of one text"
        raise MergingError(what, where=str(place), fix="Give a longer text, or a smaller length=.")
    step = max(1, available // min(available, count or available))
    rows = tokens[: available * length].view(available, length)[::step][: count or available]
    parts = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]


def _read_text(place: str | Path) -> str:
    try:
        with open(Path(place).expanduser(), encoding="utf-8", errors="replace") as file:
            return file.read(MAX_TEXT_CHARACTERS)
    except OSError as error:
        raise MergingError(
            f"the text cannot be read: {error.strerror}", where=str(place), fix="Give a file of plain text."
        ) from error
