"""The pictures of the error pages: the graph behind the loss of the loop that fails.

    python docs/draw_errors.py

The first block of every page runs with `tt.draw` before each `backward()`; the last picture is
kept. Where a sum of losses holds the graphs, the sum is drawn.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import throughtime as tt

PAGES = Path(__file__).parent / "errors"
PICTURES = PAGES / "pictures"


def drawing(page: Path) -> tt.Drawing:
    """The graph of the first block of a page, at its last backward pass."""
    block = re.search(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    if block is None:
        raise ValueError(f"{page}: no block of Python")
    names: dict[str, Any] = {"__name__": "__main__"}
    drawings: list[tt.Drawing] = []
    backward = torch.Tensor.backward

    def draw_and_run(loss: torch.Tensor, *args: Any, **options: Any) -> None:
        drawings.append(tt.draw(loss, modules(names)))
        backward(loss, *args, **options)

    with (
        mock.patch.object(torch.Tensor, "backward", draw_and_run),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(RuntimeError),
    ):
        exec(compile(block[1], str(page), "exec"), names)
    total = names.get("total")
    return drawings[-1] if total is None else tt.draw(total, modules(names))


def modules(names: dict[str, Any]) -> nn.Module:
    """The layers of a page, which name the weights."""
    layers = {k: v for k, v in names.items() if isinstance(v, nn.Module)}
    return nn.ModuleDict({k: v for k, v in layers.items() if not isinstance(v, nn.ModuleList)})


def drawn_pages() -> list[Path]:
    """The pages that show a picture of their own name."""
    return [
        page
        for page in sorted(PAGES.glob("*.md"))
        if f"pictures/{page.stem}.svg" in page.read_text("utf-8")
    ]


if __name__ == "__main__":
    for page in drawn_pages():
        print(drawing(page).save(PICTURES / f"{page.stem}.svg"))
