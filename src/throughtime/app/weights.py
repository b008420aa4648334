"""Weights of classes in the loss.

Shapes: `C` classes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from throughtime.app.config import weights_in
from throughtime.app.data import class_name
from throughtime.errors import ConfigError


def class_weights(asked: str, classes: tuple[str, ...], counts: Mapping[str, int]) -> Tensor | None:
    """What each class weighs, `(C,)`; `None` if all weigh the same.

    Args:
        asked: `none`; `balanced`, by the inverse of its frequency; or `a=5,b=2`, other classes 1.
        classes: of the model, in its order.
        counts: how often each occurs; looked at only for `balanced`.

    Raises:
        ConfigError: a class that the model does not have.
    """
    if asked == "none":
        return None
    if asked == "balanced":
        found = torch.tensor([counts[name] for name in classes], dtype=torch.float64)
        return found.sum() / (len(found) * found)
    given = {class_name(name): weight for name, weight in weights_in(asked).items()}
    unknown = [name for name in given if name not in classes]
    if unknown:
        raise ConfigError(
            f"class_weights={asked!r}: there is no class '{unknown[0]}'; the training split has"
            f" {', '.join(classes)}"
        )
    return torch.tensor([given.get(name, 1.0) for name in classes], dtype=torch.float64)
