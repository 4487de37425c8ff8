"""HTML of results for notebooks: a sentence and plain tables, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def render_html_sentence(text: str) -> str:
    """A paragraph in bold.

    >>> render_html_sentence("1 < 2")
    '<p><b>1 &lt; 2</b></p>'
    """
    return f"<p><b>{escape(text)}</b></p>" if text else ""


def render_html_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; nothing where there are no rows.

    >>> render_html_table(["group"], [["<b>"]])
    '<table><thead><tr><th>group</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    lines = [_render_cells("td", row) for row in rows]
    if not lines:
        return ""
    return f"<table><thead>{_render_cells('th', headings)}</thead><tbody>{''.join(lines)}</tbody></table>"


def _render_cells(tag: str, texts: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(text))}</{tag}>" for text in texts) + "</tr>"
