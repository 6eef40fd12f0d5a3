"""Small HTML elements that several parts of a report share."""

from collections.abc import Iterable, Sequence
from html import escape


def text_block(name: str, text: str, *, kind: str = "", title: str = "") -> str:
    """Return a named block of text.

    Args:
        kind: class of the block in `report.css`.
        title: shown in bold before the text.
    """
    bold = f"<b>{escape(title)}</b> " if title else ""
    return (
        f'<div class="message {kind}"><b class="role">{escape(name)}</b>'
        f'<div class="text">{bold}{escape(text)}</div></div>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells of text."""
    return html_table(head, ([escape(cell) for cell in row] for row in rows))


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells of HTML, with a head of text."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
