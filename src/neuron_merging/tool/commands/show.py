"""show: tables and JSON go to stdout, messages to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from neuron_merging.progress import bar_at_terminal


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, header: bool = True) -> None:
    """Print a table; numbers that are not at a terminal get room to stand on one line."""
    grid = Table(title=shown(title) or None, title_justify="left", show_header=header)
    for column in columns:
        grid.add_column(shown(column), overflow="fold")
    for row in rows:
        grid.add_row(*(shown(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 160).print(grid)


def facts(found: dict[str, Any], as_json: bool) -> None:
    """A few named values."""
    if as_json:
        return json(found)
    table("", ("", ""), [(k, f"{v:.2e}" if isinstance(v, float) else v) for k, v in found.items()], header=False)


def json(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def say(message: str) -> None:
    """What is going on, for people."""
    messages().print(shown(message), style="dim", highlight=False)


@contextmanager
def working(message: str) -> Iterator[None]:
    """Say what is going on, with a bar where there is a terminal; nothing goes to stdout meanwhile."""
    console = messages()
    if not console.is_terminal:
        say(message)
    with bar_at_terminal(_printable(message)) if console.is_terminal else nullcontext(), aside():
        yield


def aside() -> AbstractContextManager[Any]:
    """What a network's own code prints is no part of the result: it goes to stderr."""
    return redirect_stdout(sys.stderr)


def warn(message: str) -> None:
    """What must not be missed."""
    messages().print(f"[bold white on red]{shown(message)}[/]", highlight=False)


def conclude(message: str, *, calm: bool) -> None:
    """What it comes to."""
    messages().print(shown(message), style="green" if calm else "yellow", highlight=False)


def error(message: str) -> None:
    """Why it did not work."""
    messages().print(f"[red]error:[/red] {shown(message)}", highlight=False)


def shown(text: str) -> str:
    """A text as it is: names of layers are no markup, and no commands to the terminal.

    >>> shown("[red]a\\x1b[2J")
    '\\\\[red]a\\\\x1b[2J'
    """
    return escape(_printable(text))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def messages() -> Console:
    """The console of progress and messages."""
    return Console(stderr=True, soft_wrap=True)
