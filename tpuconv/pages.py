"""Pages of HTML for people: one file, without scripts and without other files, for light and dark screens."""

from collections.abc import Iterable, Sequence

from tpuconv.text import html as escape

MADE_BY = "Made by tpuconv"
"""The mark near the beginning of each page and recipe of ours. A file without it is another's, and is not replaced."""
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff;
overflow-wrap:anywhere}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}
td,th{padding:.2rem .6rem;text-align:left;border-bottom:1px solid #e4e7eb}td.n,th.n{text-align:right}
.wide{overflow-x:auto}.wide td,.wide th{overflow-wrap:normal}
svg text{font:12px system-ui,sans-serif;fill:currentColor}.dot{fill:#2f6fde;fill-opacity:.55}
.front{fill:none;stroke:#2f6fde;stroke-width:2}.point{fill:#2f6fde}.chosen{fill:#d6452b}
.bars{fill:#2f6fde}.other{fill:none;stroke:#d6452b}.bad{color:#d6452b;font-weight:600}
details{border-bottom:1px solid #e4e7eb;padding:.3rem 0 .3rem 1rem}summary{cursor:pointer;margin-left:-1rem}
summary svg{width:10rem;height:1.5rem;float:right}
.facts{color:#57606a;font-size:13px}td svg{width:8rem;height:1.3rem}
@media(prefers-color-scheme:dark){body{background:#15181c;color:#e3e6ea}td,th,details{border-color:#30363d}
.facts{color:#9aa4af}}
"""

MARKED_BYTES = 4096
"""The bytes at the beginning of a file, among which is the mark."""


def is_marked(data: bytes) -> bool:
    """Returns True if a file that begins with these bytes is a page or a recipe of ours."""
    return MADE_BY.encode() in data[:MARKED_BYTES]


POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The content security policy of a page: nothing is loaded and no script runs."""

Column = tuple[str, bool]
"""The title of a column, and whether it has numbers."""


def html_page(title: str, body: str) -> str:
    """Returns a page with a heading.

    Args:
        title: text, which is escaped.
        body: HTML.
    """
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=generator content='{MADE_BY}'>"
        f'<meta http-equiv=Content-Security-Policy content="{POLICY}">'
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style>\n<h1>{escape(title)}</h1>\n{body}\n"
    )


def html_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table, which scrolls by itself where the page is too narrow.

    Args:
        columns: their titles, which are escaped.
        rows: of each the cells, as HTML.
    """
    classes = [" class=n" if is_number else "" for _, is_number in columns]
    heads = "".join(f"<th{kind}>{escape(title)}" for (title, _), kind in zip(columns, classes, strict=True))
    lines = (
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<div class=wide><table><tr>{heads}</tr>{''.join(lines)}</table></div>"
