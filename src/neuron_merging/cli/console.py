"""Print tables and JSON to stdout, messages and progress to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from neuron_merging.progress import ProgressLines, hear_announcements, listen_to_progress, show_terminal_bar


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, header: bool = True, one_line: bool = False
) -> None:
    """Print a table, 160 columns wide if stdout is not a terminal, so that lines do not wrap in files.

    With `one_line` no cell wraps: the table may be wider than the terminal.
    """
    grid = Table(title=escape_text(title) or None, title_justify="left", show_header=header)
    for column in columns:
        grid.add_column(escape_text(column), overflow="fold", no_wrap=one_line)
    for row in rows:
        grid.add_row(*(escape_text(str(cell)) for cell in row))
    console = _TableConsole(width=None if sys.stdout.isatty() else 160)
    if one_line:
        console.width = max(
            console.width, console.measure(grid, options=console.options.update(max_width=10_000)).maximum
        )
    console.print(grid)


class _TableConsole(Console):
    """Leaves a closed pipe to `main`, for which that is no failure; rich exits with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_line(text: str) -> None:
    """Print a sentence of the result to stdout."""
    sys.stdout.write(_make_printable(text) + "\n")


def print_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Print named values as a table of two columns, or as JSON."""
    if as_json:
        return print_json(facts)
    print_table("", ("", ""), [(k, f"{v:.2e}" if isinstance(v, float) else v) for k, v in facts.items()], header=False)


def print_json(value: Any) -> None:
    """Print one JSON document to stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def print_message(message: str) -> None:
    """Print a dim message to stderr."""
    get_message_console().print(escape_text(message), style="dim", highlight=False)


@contextmanager
def show_step(message: str) -> Iterator[None]:
    """Print a message, with a progress bar on a terminal or a line every ten seconds elsewhere; keep stdout clean."""
    console = get_message_console()
    if not console.is_terminal:
        print_message(message)
    with (
        show_terminal_bar(_make_printable(message))
        if console.is_terminal
        else listen_to_progress(ProgressLines(message, print_message)),
        hear_announcements(print_message),
        redirect_stdout_to_stderr(),
    ):
        yield


def redirect_stdout_to_stderr() -> AbstractContextManager[Any]:
    """Send what the network's code prints to stderr, because stdout is for results."""
    return redirect_stdout(sys.stderr)


def print_warning(message: str) -> None:
    """Print a message in white on red to stderr."""
    get_message_console().print(f"[bold white on red]{escape_text(message)}[/]", highlight=False)


def print_verdict(message: str, *, calm: bool) -> None:
    """Print the verdict to stderr, green if `calm`, else yellow."""
    get_message_console().print(escape_text(message), style="green" if calm else "yellow", highlight=False)


def print_error(message: str) -> None:
    """Print an error message to stderr."""
    get_message_console().print(f"[red]error:[/red] {escape_text(message)}", highlight=False)


def escape_text(text: str) -> str:
    """Escape rich's markup and control characters, which the names of layers may contain.

    >>> escape_text("[red]a\\x1b[2J")
    '\\\\[red]a\\\\x1b[2J'
    """
    return escape(_make_printable(text))


def _make_printable(text: str) -> str:
    # Names in a stranger's folder may hold escape sequences, which a terminal would obey.
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def get_message_console() -> Console:
    """Return the console for progress and messages, on stderr."""
    return Console(stderr=True, soft_wrap=True)
