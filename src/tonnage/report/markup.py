"""Building blocks of the HTML pages: style, document frame, tables, colour keys, escaped text.

There are no scripts, no fonts and no requests.  Text from values is escaped, because it may be untrusted.
"""

import json
from collections.abc import Iterable
from html import escape
from typing import Any, Final

from tonnage.printable import make_printable

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

STYLE: Final = """
.tonnage { font: 14px/1.5 system-ui, sans-serif; max-width: 780px; overflow-wrap: anywhere; }
.tonnage h3 { font-size: 14px; margin: 1.6em 0 .4em; }
.tonnage p { margin: .2em 0; }
.tonnage .answer { font-size: 17px; font-weight: 600; }
.tonnage .fits { color: #009E73; } .tonnage .tight { color: #B77F00; } .tonnage .full { color: #D55E00; }
.tonnage table { border-collapse: collapse; margin: 0; font-size: inherit; }
.tonnage table { display: block; max-width: 100%; overflow-x: auto; overflow-wrap: normal; border: none; }
.tonnage tr { background: none; }
.tonnage th, .tonnage td { padding: .15em 1.2em .15em 0; text-align: left; vertical-align: top; background: none; }
.tonnage th { font-weight: 400; opacity: .65; white-space: nowrap; }
.tonnage .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tonnage .quiet { opacity: .65; }
.tonnage pre { white-space: pre-wrap; margin: .4em 0; font-size: 12px; }
.tonnage code { font-size: 13px; white-space: nowrap; }
.tonnage svg { display: block; margin: .2em 0 .5em; width: 100%; height: auto; }
.tonnage svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.tonnage .swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; }
@media (max-width: 600px) {
.tonnage th, .tonnage td { padding-right: .7em; }
.tonnage th, .tonnage code { white-space: normal; }
}
.tonnage .none { border: 1px solid currentColor; opacity: .5; box-sizing: border-box; }
"""


def document(title: str, body: str, data: dict[str, Any]) -> str:
    """Return a whole page, which also contains the shown value as JSON data that cannot run."""
    inert = json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n"
        "<style>:root { color-scheme: light dark; } body { margin: 2em auto; max-width: 780px; padding: 0 1em; }"
        "</style>\n</head>\n<body>\n"
        f'{body}\n<script type="application/json" class="tonnage-estimate">{inert}</script>\n'
        "</body>\n</html>\n"
    )


def fragment(parts: Iterable[str]) -> str:
    """Return the parts as one `<div>` with its own style."""
    return f'<div class="tonnage"><style>{STYLE}</style>\n' + "\n".join(parts) + "\n</div>"


def table(headings: Iterable[str], rows: Iterable[tuple[str, ...]], numbers: tuple[int, ...] = ()) -> str:
    """Return a table of cells that are HTML already; the columns in `numbers` are aligned to the right."""

    def line(tag: str, cells: Iterable[str]) -> str:
        tagged = (
            f'<{tag} class="number">{cell}</{tag}>' if column in numbers else f"<{tag}>{cell}</{tag}>"
            for column, cell in enumerate(cells)
        )
        return f"<tr>{''.join(tagged)}</tr>"

    head = line("th", headings)
    return f"<table>{head if headings else ''}{''.join(line('td', row) for row in rows)}</table>"


def text(value: str) -> str:
    """Return a value as escaped text."""
    return escape(make_printable(value))


def key(name: str, colour: str) -> str:
    """Return the entry of a colour key: a swatch and its name."""
    return f'<span class="swatch" style="background: {colour}"></span> <span class="quiet">{text(name)}</span>'
