"""The optimizer of a run and the learning rate of each update, a function of its number alone.

So a resumed run needs no state of a schedule: the same settings give the same rates.

    u <= w:    lr * u / w                                  u: number of the update, from 1
    constant:  lr                                          w: updates of warm-up
    cosine:    lr * (1 + cos(pi * (u - w - 1) / (n - w))) / 2     n: updates of the run

References: I. Loshchilov and F. Hutter, SGDR: stochastic gradient descent with warm restarts, ICLR
(2017), for the cosine; no restarts here. Decoupled weight decay regularization, ICLR (2019).
"""

import math

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from throughtime.app.config import Config
from throughtime.errors import ConfigError
from throughtime.optim import AdamW


def make_optimizer(config: Config, net: nn.Module) -> AdamW:
    """AdamW, which clips by the global norm; without weight decay it is Adam.

    Matrices decay. Biases, gains of norms and other vectors do not: zero is no better for them.

    Raises:
        ConfigError: a net without weights.
    """
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError(f"model={config.model!r}: has no weights, so there is nothing to train")
    return AdamW(groups, lr=config.lr, weight_decay=config.weight_decay, max_norm=config.max_norm)


def make_schedule(optimizer: AdamW, config: Config, updates: int) -> LambdaLR:
    """The learning rate of each update of so many."""
    return LambdaLR(optimizer, lambda count: learning_rate(config, count + 1, updates) / config.lr)


def learning_rate(config: Config, update: int, updates: int) -> float:
    """The learning rate of an update.

    Args:
        config: the settings `lr`, `lr_warmup` and `schedule`.
        update: its number, from 1.
        updates: those of the run, or an estimate; the cosine is 0 in later ones.

    Example:
        >>> config = Config(
        ...     data="data", task="classify", out="out", lr=0.4, lr_warmup=2, schedule="cosine"
        ... )
        >>> [round(learning_rate(config, update, 6), 3) for update in range(1, 7)]
        [0.2, 0.4, 0.4, 0.341, 0.2, 0.059]
    """
    warmup = config.lr_warmup
    if update <= warmup:
        return config.lr * update / warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (update - warmup - 1) / max(1, updates - warmup))
    return config.lr * (1 + math.cos(math.pi * progress)) / 2


def in_words(config: Config) -> str:
    """Optimizer, learning rate, schedule and clipping, as a clause.

    Example:
        >>> settings = {"lr": 0.01, "weight_decay": 0.1, "schedule": "constant"}
        >>> print(in_words(Config(data="data", task="classify", out="out", **settings)))
        AdamW with weight decay 0.1 and learning rate 0.01, gradients clipped to norm 1
    """
    decay = f"weight decay {config.weight_decay:g} and " if config.weight_decay else ""
    warmup = f", rising over the first {config.lr_warmup} updates" if config.lr_warmup else ""
    falling = ", then falling to 0 along a cosine" if warmup else ", falling to 0 along a cosine"
    return (
        f"Adam{'W' if decay else ''} with {decay}learning rate {config.lr:g}{warmup}"
        f"{falling if config.schedule == 'cosine' else ''}, gradients clipped to norm"
        f" {config.max_norm:g}"
    )
