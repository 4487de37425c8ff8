"""Print tables and JSON to stdout, messages and progress to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from neuron_merging.progress import show_terminal_bar


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, header: bool = True) -> None:
    """Print a table; numbers that are not at a terminal get room to stand on one line."""
    grid = Table(title=escape_text(title) or None, title_justify="left", show_header=header)
    for column in columns:
        grid.add_column(escape_text(column), overflow="fold")
    for row in rows:
        grid.add_row(*(escape_text(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 160).print(grid)


def print_facts(found: dict[str, Any], as_json: bool) -> None:
    """A few named values."""
    if as_json:
        return print_json(found)
    print_table("", ("", ""), [(k, f"{v:.2e}" if isinstance(v, float) else v) for k, v in found.items()], header=False)


def print_json(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def print_message(message: str) -> None:
    """What is going on, for people."""
    get_message_console().print(escape_text(message), style="dim", highlight=False)


@contextmanager
def show_step(message: str) -> Iterator[None]:
    """Say what is going on, with a bar where there is a terminal; nothing goes to stdout meanwhile."""
    console = get_message_console()
    if not console.is_terminal:
        print_message(message)
    with (
        show_terminal_bar(_make_printable(message)) if console.is_terminal else nullcontext(),
        redirect_stdout_to_stderr(),
    ):
        yield


def redirect_stdout_to_stderr() -> AbstractContextManager[Any]:
    """What a network's own code prints is no part of the result: it goes to stderr."""
    return redirect_stdout(sys.stderr)


def print_warning(message: str) -> None:
    """What must not be missed."""
    get_message_console().print(f"[bold white on red]{escape_text(message)}[/]", highlight=False)


def print_verdict(message: str, *, calm: bool) -> None:
    """What it comes to."""
    get_message_console().print(escape_text(message), style="green" if calm else "yellow", highlight=False)


def print_error(message: str) -> None:
    """Why it did not work."""
    get_message_console().print(f"[red]error:[/red] {escape_text(message)}", highlight=False)


def escape_text(text: str) -> str:
    """A text as it is: names of layers are no markup, and no commands to the terminal.

    >>> escape_text("[red]a\\x1b[2J")
    '\\\\[red]a\\\\x1b[2J'
    """
    return escape(_make_printable(text))


def _make_printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def get_message_console() -> Console:
    """The console of progress and messages."""
    return Console(stderr=True, soft_wrap=True)
