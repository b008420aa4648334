"""A page that runs exported nets in a browser: one HTML file, which loads nothing.

The inputs scroll; outputs and the norm of the state are drawn. Buttons reset the state, or cut it
every N steps, as training on windows does. The nets are the ES modules of `source.py`.
"""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from throughtime.deploy.chain import Array, Chain
from throughtime.deploy.source import render, summary, write_javascript

SIGNAL = 20_000  # steps in a page, at most
_CUT = 100  # steps, at first


class PageNet(NamedTuple):
    """A net of a page: its name there, its chain and what its file says of itself."""

    title: str
    chain: Chain
    description: Mapping[str, Any]


def write_page(
    title: str, nets: Sequence[PageNet], signal: Array, labels: Array | None = None
) -> bytes:
    """The page.

    Args:
        title: of the page.
        nets: with the same inputs.
        signal: what the nets get, `(T, D)` or `(T,)` indices; it starts again at its end.
        labels: the right classes, `(T,)` from 0 to 255, to be drawn beside it.
    """
    first = nets[0].chain
    sources = [_module(net.chain, net.description) for net in nets]
    marks = b"" if labels is None else np.asarray(labels[:SIGNAL], np.uint8).tobytes()
    rows = np.ascontiguousarray(signal[:SIGNAL], dtype="<f4")
    values = {
        "title": html.escape(title),
        "summary": " and ".join(dict.fromkeys(html.escape(summary(net.chain)) for net in nets)),
        "sources": sources,
        "titles": json.dumps([net.title for net in nets]).replace("</", "<\\/"),
        "width": first.width,
        "indexed": first.is_indexed,
        "signal": base64.b64encode(rows.tobytes()).decode(),
        "labels": base64.b64encode(marks).decode(),
        "cut": _CUT,
    }
    return render("net.html.j2", values)


def _module(chain: Chain, description: Mapping[str, Any]) -> str:
    """The ES module as the body of a function."""
    text = write_javascript(chain, description, "net")[".js"].decode()
    return text.replace("\nexport ", "\n")
