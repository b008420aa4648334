"""Settings that are each in range and do not go together: what is wrong, and what to leave out.

A text has {name} where a setting and its value belong. This module imports no torch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from throughtime.app.values import rows_ahead
from throughtime.errors import listed

if TYPE_CHECKING:
    from throughtime.app.config import Config

# Settings that are short for an argument of a gradient policy, and the policies that have it.
SHORT = {
    "stride": {"truncated", "adaptive"},
    "horizon": {"truncated"},
    "cut_every": {"exact"},
}
LOSSES = {
    "cross-entropy": {"classify", "multilabel"},
    "mse": {"regress"},
    "mae": {"regress"},
    "huber": {"regress"},
}
"""The tasks of each loss."""


def contradictions(config: "Config") -> list[str]:
    """Every fault of the settings of a run beyond the range of one of them."""
    checks = (_of_gradient, _of_inputs, _of_labels, _of_forecasts, _of_stream, _of_training)
    return [fault for check in checks for fault in check(config)]


def _of_gradient(config: "Config") -> Iterator[str]:
    """Settings that do not go with the policy."""
    own = ":" in config.gradient
    for name, policies in SHORT.items():
        if getattr(config, name) is None:
            continue
        if name in config.gradient_args:
            yield f"{{{name}}} is given again by --gradient-arg: leave one of them out"
        if config.gradient == "exact" and name != "cut_every":
            yield (
                f"{{gradient}} and {{{name}}} are both given: the exact gradient cuts no credit, so"
                f" it has no {name}. Leave one of them out; --cut-every N makes an update every N"
                " steps"
            )
        elif not own and config.gradient not in policies:
            yield (
                f"{{{name}}} belongs to --gradient {' or '.join(sorted(policies))}, got"
                " {gradient}: leave one of them out"
            )
    horizon, stride = config.horizon, config.update_steps()
    if config.gradient == "truncated" and horizon and stride and horizon < stride:
        yield (
            f"{{horizon}} is below --stride {stride}: the first losses of every stride would reach"
            f" back no step at all. Write --horizon {stride} or more, or --stride {horizon}"
        )
    if config.train_on == "windows" and not own and config.gradient != "truncated":
        yield (
            "{gradient} and {train_on} are both given: credit ends with a window, and within one"
            " the truncated gradient is exact. Leave one of them out"
        )


def _of_inputs(config: "Config") -> Iterator[str]:
    """Faults of how inputs are standardised."""
    if config.static and config.standardise not in {"split", "none"}:
        yield (
            "{standardise} has no statistics of {static}, which are the same at each step of a"
            " recording: take --standardise split, or leave --static out"
        )
    if config.missing == "mask" and config.standardise.startswith("first:"):
        yield (
            "{standardise} would count steps of {missing} as zeros: fill them, or take"
            " --standardise split"
        )


def _of_labels(config: "Config") -> Iterator[str]:
    """Contradictions between the settings of data, columns, classes and the loss."""
    if "://" in config.data:
        yield "{data} is an address: download it, and write the path of the file"
    if both := sorted({*config.exclude} & {*config.inputs, *config.targets}):
        names = listed(both).replace("{", "{{").replace("}", "}}")
        yield f"{{exclude}}: {names} is among the inputs or targets, too: leave one out"
    task, loss = config.task, config.loss
    for name in ("background_class", *["class_weights"] * (task == "regress")):
        if task not in {None, "classify"} and getattr(config, name) not in {None, "none"}:
            yield f"{{{name}}} belongs to classes: leave it out, or write --task classify"
    if task is not None and loss in LOSSES and task not in LOSSES[loss]:
        fitting = [name for name, tasks in LOSSES.items() if task in tasks]
        yield f"{{loss}} does not fit {{task}}: take --loss {' or '.join(fitting)}"


def _of_forecasts(config: "Config") -> Iterator[str]:
    """Contradictions between the settings of rows, frames and forecasts."""
    ahead, frame = rows_ahead(config.ahead), config.frame_size
    rows = {"target_every": config.target_every, "season": config.season}
    for name, several in {**{name: [n or 0] for name, n in rows.items()}, "ahead": ahead}.items():
        if any(n % frame for n in several):
            yield (
                f"{{{name}}} rows are no whole number of frames of {frame}: expected a multiple of"
                f" {frame}"
            )
    if len(ahead) > 1 and config.task == "classify":
        yield "{ahead} are several forecasts, which are of numbers: take one"
    for name in ("season", "difference") if not ahead else ():
        if getattr(config, name):
            yield f"{{{name}}} belongs to forecasts: leave it out, or write --ahead 24 or so"
    if config.difference and config.task not in {None, "regress"}:
        yield "{difference} belongs to numbers: leave it out, or write --task regress"
    if config.difference and config.standardise == "recording":
        yield (
            "{difference} adds to the inputs of the net, which {standardise} takes out of their"
            " units: take --standardise split or first:400"
        )


def _of_stream(config: "Config") -> Iterator[str]:
    if config.offset and config.hand_off:
        yield (
            "{offset} moves the boundaries between parts from epoch to epoch, and {hand_off} passes"
            " states on at these boundaries: leave one of them out"
        )
    for name in ("offset", "hand_off") if config.train_on == "windows" else ():
        if getattr(config, name):
            yield (
                f"{{{name}}} and {{train_on}} are both given: windows start at the same steps in"
                " every epoch. Leave one of them out"
            )


def _of_training(config: "Config") -> Iterator[str]:
    """Contradictions between the settings of a run's length, optimizer and schedule."""
    if config.updates and config.epochs:
        yield "{updates} and {epochs} are both given: one of them says when to stop"
    if config.updates and config.lr_warmup >= config.updates:
        yield "{lr_warmup} of {updates}: expected fewer, the learning rate would only rise"
    for name in ("patience", "schedule") if config.valid_every == 0 else ():
        if getattr(config, name) not in {None, "constant", "cosine"}:
            yield (
                f"{{{name}}} counts validations, and {{valid_every}} has none before the end: leave"
                " one of them out"
            )
    if config.lr_warmup and config.schedule == "plateau":
        yield "{lr_warmup} and {schedule} are both given: a plateau counts validations, not updates"
    if config.momentum and config.optimizer in {"adam", "adamw"}:
        yield "{momentum} belongs to --optimizer sgd: write that, or leave --momentum out"
    if config.weight_decay and config.optimizer == "adam":
        yield "{weight_decay} belongs to --optimizer adamw, got {optimizer}: take adamw"
