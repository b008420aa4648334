"""The optimizer of a run and its schedule of learning rates.

    u <= w:    lr * u / w                                  u: number of the update, from 1
    constant:  lr                                          w: updates of warm-up
    cosine:    lr * (1 + cos(pi * (u - w - 1) / (n - w))) / 2     n: updates of the run; in one by
               epochs the shares of its steps count, not those of its updates
    plateau:   lr / 2^m           m: how often two validations in a row have brought no better score

References: I. Loshchilov and F. Hutter, SGDR: stochastic gradient descent with warm restarts, ICLR
(2017), for the cosine; no restarts here. Decoupled weight decay regularization, ICLR (2019).
"""

import math
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from throughtime.app.config import Config
from throughtime.app.user_class import ClassReference
from throughtime.app.values import flag
from throughtime.errors import ConfigError
from throughtime.optim import SGD, Adam, AdamW
from throughtime.stream import Stream

_RULES = {"adam": Adam, "adamw": AdamW, "sgd": SGD}
_PATIENCE = 2  # validations without a better one after which the plateau's rate is halved


def make_optimizer(net: nn.Module, config: Config) -> Optimizer:
    """The optimizer that the settings name, which clips by the global norm.

    Matrices decay. Biases, gains of norms and other vectors do not: zero is no better for them.

    Raises:
        ConfigError: a net without weights, or a class of the user's that is no optimizer.
    """
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError(f"--model {config.model}: has no weights, so there is nothing to train")
    options = {"lr": config.lr}
    options |= {"momentum": config.momentum} if config.momentum else {}
    if config.optimizer in _RULES:
        options["weight_decay"] = config.weight_decay  # 0, too: a rule may have another default
        return _RULES[config.optimizer](groups, max_norm=config.max_norm, **options)
    options |= {"weight_decay": config.weight_decay} if config.weight_decay else {}
    own = ClassReference.parse("optimizer", config.optimizer)
    needed = {name: flag(name) for name in options}
    optimizer = own.make(Optimizer, {"params": groups, **options}, needed)

    def clip(*_: object) -> None:
        clip_grad_norm_(net.parameters(), config.max_norm)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def learning_rate(config: Config, done: int, progress: float, warmup: float = 0.0) -> float:
    """The learning rate of the next update, unless a plateau changes it.

    Args:
        config: the settings `lr`, `lr_warmup` and `schedule`.
        done: updates so far.
        progress: share of the run that they are.
        warmup: share of the run that is warm-up.

    Example:
        >>> config = Config(data="data", lr=0.4, lr_warmup=2, schedule="cosine")
        >>> [round(learning_rate(config, n, n / 6, 2 / 6), 3) for n in range(6)]
        [0.2, 0.4, 0.4, 0.341, 0.2, 0.059]
    """
    if done < config.lr_warmup:
        return config.lr * (done + 1) / config.lr_warmup
    if config.schedule != "cosine":
        return config.lr
    share = min(1.0, max(0.0, progress - warmup) / max(1e-9, 1 - warmup))
    return config.lr * (1 + math.cos(math.pi * share)) / 2


def make_schedule(
    optimizer: Optimizer, config: Config, stream: Stream, updates: int
) -> LRScheduler:
    """The schedule of torch that the settings describe.

    `step()` belongs after each update; that of a plateau after each validation, with a loss.

    Args:
        optimizer: of the run.
        config: its settings.
        stream: which knows how far a run by epochs has come: its updates are only estimated.
        updates: of the run, or an estimate.
    """
    if config.schedule == "plateau":
        rule: dict[str, Any] = {"factor": 0.5, "patience": _PATIENCE - 1, "threshold": 0, "eps": 0}
        return ReduceLROnPlateau(optimizer, **rule)

    def factor(done: int) -> float:
        progress = done / updates
        if config.updates is None:
            epoch = stream.epoch + stream.position / stream.steps
            progress = epoch / (config.epochs or 1)
        return learning_rate(config, done, progress, config.lr_warmup / updates) / config.lr

    return LambdaLR(optimizer, factor)


def in_words(config: Config) -> str:
    """Optimizer, learning rate, schedule and clipping, as a clause.

    Example:
        >>> print(in_words(Config(data="data", lr=0.01, weight_decay=0.1)))
        AdamW with weight decay 0.1 and learning rate 0.01, gradients clipped to norm 1
    """
    own = config.optimizer.rpartition(":")[2]
    adam = "AdamW" if config.weight_decay else "Adam"
    name = {"adam": adam, "adamw": adam, "sgd": "SGD"}.get(config.optimizer, own)
    decay = f"weight decay {config.weight_decay:g} and " if config.weight_decay else ""
    momentum = f"momentum {config.momentum:g} and " if config.momentum else ""
    warmup = f", rising over the first {config.lr_warmup} updates" if config.lr_warmup else ""
    later = {
        "cosine": f", {'then ' if warmup else ''}falling to 0 along a cosine",
        "plateau": f", halved after {_PATIENCE} validations without a better one",
    }
    return (
        f"{name} with {decay}{momentum}learning rate {config.lr:g}{warmup}"
        f"{later.get(config.schedule, '')}, gradients clipped to norm {config.max_norm:g}"
    )
