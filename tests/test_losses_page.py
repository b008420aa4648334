"""The losses of docs/how-to/losses.md are what the page says: sums over steps, or over recordings.

So segments of any length give the loss, the weight and the gradient of the whole epoch. That these
are those of autograd is tested by test_sequence_loss.py.
"""

from typing import Any

import pytest
import torch

import throughtime as tt
from test_docs import blocks

Example = tuple[Any, tt.Stream, Any]  # net, stream and loss


def examples() -> dict[str, Example]:
    """What the page trains, by the name of its loss."""
    found: dict[str, Example] = {}
    names: dict[str, Any] = {}

    def note(net: Any, stream: Any, loss_fn: Any, gradient: Any = None) -> None:
        del gradient
        name = getattr(getattr(loss_fn, "fn", loss_fn), "__name__", type(loss_fn).__name__)
        ordered = tt.Stream(stream.recordings, stream.lanes, 50, seed=None)  # as in every epoch
        found.setdefault(name, (net, ordered, loss_fn))

    for block in blocks("docs/how-to/losses.md", "python"):
        exec(block, names)
        names["train"] = note  # instead of the function of the page that trains
    return found


EXAMPLES = examples()
# a root over each window is no such sum, which the page says
NAMES = sorted(EXAMPLES.keys() - {"root", "<lambda>"})


@pytest.mark.parametrize("chunk", [7, 40])
@pytest.mark.parametrize("name", NAMES)
def test_segments_give_loss_weight_and_gradient_of_the_epoch(name: str, chunk: int) -> None:
    net, stream, loss_fn = EXAMPLES[name]
    results: list[Any] = []
    for policy in (tt.Exact(chunk=chunk), tt.Exact(chunk=1000)):
        (update,) = tt.updates(net.double(), stream, loss_fn, gradient=policy)
        grads = [weight.grad.flatten() for weight in net.parameters()]
        results.append((update.loss, torch.tensor(update.weight), torch.cat(grads)))
        net.zero_grad()
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-14)
    assert results[0][2].norm() > 1e-3


def test_the_page_has_losses_of_many_kinds() -> None:
    assert len(NAMES) >= 8
