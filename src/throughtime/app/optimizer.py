"""The gradient policy of a run, its optimizer, and its schedule of learning rates.

    constant:  lr
    cosine:    lr * (1 + cos(pi * s)) / 2     s: the share of the run that is done, of its updates,
               or, in one by epochs, of its steps
    plateau:   lr / 2^m           m: how often two validations in a row have brought no better score

References: I. Loshchilov and F. Hutter, SGDR: stochastic gradient descent with warm restarts, ICLR
(2017), for the cosine; no restarts here. Decoupled weight decay regularization, ICLR (2019).
"""

import inspect
import math
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from throughtime.app.settings import DEFAULT_STRIDE, Config
from throughtime.app.user_class import ClassReference
from throughtime.errors import ConfigError, ThroughtimeError
from throughtime.gradient import Adaptive, Exact, Policy, Randomized, Truncated, UpdatePolicy
from throughtime.optim import SGD, Adam, AdamW
from throughtime.stream import Stream

_POLICIES = {
    "truncated": Truncated,
    "exact": Exact,
    "adaptive": Adaptive,
    "randomized": Randomized,
}
_RULES = {"adam": Adam, "adamw": AdamW, "sgd": SGD}
_PATIENCE = 2  # validations without a better one after which the plateau's rate is halved


def make_policy(config: Config) -> Policy:
    """The policy that the settings describe.

    Raises:
        ConfigError: no such class, or arguments that it does not take; its own are listed.
    """
    name, arguments = config.gradient, config.policy_arguments()
    kind: Any = _POLICIES.get(name) or ClassReference.parse("gradient", name).load()
    if not hasattr(kind, "plan") and not hasattr(kind, "update"):
        raise ConfigError(
            f"--gradient {name}: its class {kind.__name__} has neither a method plan nor"
            " update; docs/how-to/extending.md shows a policy"
        )
    signature = inspect.signature(kind)
    stride = signature.parameters.get("stride")
    if stride is not None and stride.default is stride.empty:
        arguments = {"stride": DEFAULT_STRIDE, **arguments}
    try:
        return kind(**arguments)
    except ThroughtimeError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--gradient {name} with {arguments}: {error}. It takes {signature}; write"
            " --gradient-arg NAME=VALUE"
        ) from error


def updates_per_epoch(policy: Policy | UpdatePolicy, stream: Stream, ranks: int) -> int:
    """The number of updates in an epoch; an estimate if the data or the policy decide."""
    if isinstance(policy, Exact) and policy.cut_every is None:
        if stream.lanes * ranks == 1:
            return len(stream.recordings)
        return max(1, round(stream.steps / stream.steps_to_common_reset()))
    names = ("cut_every", "stride", "mean_horizon", "min")
    steps = (getattr(policy, name, None) for name in names)
    stride = next((n for n in steps if isinstance(n, int) and n > 0), DEFAULT_STRIDE)
    return math.ceil(stream.steps / stride)


def make_optimizer(net: nn.Module, config: Config) -> Optimizer:
    """The optimizer that the settings name, which clips by the global norm.

    Matrices decay. Biases, gains of norms and other vectors do not: zero is no better for them.

    Raises:
        ConfigError: a net without weights, or a class of the user's that is no optimizer.
    """
    every = [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in every if group["params"]]
    if not groups:
        raise ConfigError(f"--model {config.model}: has no weights, so there is nothing to train")
    options = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer in _RULES:
        return _RULES[config.optimizer](groups, max_norm=config.max_norm, **options)
    if not config.weight_decay:
        del options["weight_decay"]  # a rule of one's own has its own default
    own = ClassReference.parse("optimizer", config.optimizer)
    optimizer = own.make(Optimizer, {"params": groups, **options}, options)

    def clip(*_: object) -> None:
        clip_grad_norm_(net.parameters(), config.max_norm)

    optimizer.register_step_pre_hook(clip)
    return optimizer


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
        epoch = stream.epoch + stream.position / stream.steps
        share = epoch / (config.epochs or 1) if config.updates is None else done / updates
        cosine = (1 + math.cos(math.pi * min(1.0, share))) / 2
        return cosine if config.schedule == "cosine" else 1.0

    return LambdaLR(optimizer, factor)
