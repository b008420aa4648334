"""Settings that are each in range and do not go together, or that nothing has: what is wrong.

This module imports no torch, as `throughtime.app.config`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from throughtime.app.user_class import is_reference
from throughtime.app.values import named_series, rows_ahead, weights_by_class
from throughtime.errors import ConfigError, did_you_mean, listed

if TYPE_CHECKING:
    from throughtime.app.config import Config

MODEL_NAMES = ("lstm", "gru", "rnn")
POLICY_NAMES = ("truncated", "exact", "adaptive", "randomized")
# Settings that are short for an argument of a gradient policy, and the policies that have it.
SHORT = {
    "stride": {"truncated", "adaptive"},
    "horizon": {"truncated"},
    "cut_every": {"exact"},
}


def contradictions(config: "Config") -> list[str]:
    """Every fault of the settings of a run beyond the range of one of them."""
    checks = (_of_names, _of_gradient, _of_inputs, _of_labels, _of_stream, _of_length)
    return [fault for check in checks for fault in check(config)]


def _of_names(config: "Config") -> Iterator[str]:
    """Values that are neither one of the names nor a class in a file."""
    for setting, names in (("model", MODEL_NAMES), ("gradient", POLICY_NAMES)):
        value = getattr(config, setting)
        if not _is_named(value, names):
            hint = did_you_mean(value.lower(), names)
            yield f"{setting}={value!r}: expected {', '.join(names)}, or FILE.py:Class{hint}"


def _is_named(value: str, names: Sequence[str]) -> bool:
    return value in names or is_reference(value)


def _of_gradient(config: "Config") -> Iterator[str]:
    """Settings that do not go with the policy."""
    if not _is_named(config.gradient, POLICY_NAMES):
        return
    for name, policies in SHORT.items():
        value = getattr(config, name)
        if value is None:
            continue
        if name in config.gradient_args:
            yield f"{name}={value} is given again among the arguments of the gradient"
        if config.gradient == "exact" and name != "cut_every":
            yield (
                f"gradient='exact' and {name}={value} are both given: the exact gradient cuts"
                f" no credit, so it has no {name}. Leave one of them out; cut_every=N makes an"
                " update every N steps"
            )
        elif not is_reference(config.gradient) and config.gradient not in policies:
            yield (
                f"{name}={value} belongs to gradient={' or '.join(sorted(policies))} (such as"
                f" --gradient {min(policies)}), got gradient={config.gradient!r}: leave one out"
            )
    if config.train_on == "windows" and config.gradient in {*POLICY_NAMES} - {"truncated"}:
        yield (
            f"gradient={config.gradient!r} and train_on='windows' are both given: credit ends"
            " with a window, and within one the truncated gradient is exact. Leave one of them"
            " out"
        )


def _of_inputs(config: "Config") -> Iterator[str]:
    """Faults of how inputs are standardised."""
    how = f"standardise={config.standardise!r}"
    if not re.fullmatch("split|recording|none|first:[1-9][0-9]*", config.standardise):
        yield f"{how}: expected split, recording, none, or first:N, such as first:400"
    if config.static and config.standardise not in ("split", "none"):
        yield (
            f"{how} has no statistics of static={listed(config.static)}, which are the same at each"
            " step of a recording; take split, or leave static out"
        )
    if config.missing == "mask" and config.standardise.startswith("first:"):
        yield f"{how} would count steps of missing='mask' as zeros; fill them, or take split"


def _of_labels(config: "Config") -> Iterator[str]:
    """Contradictions between the settings of targets and class weights."""
    both = sorted({*config.exclude} & {*config.inputs, *config.targets})
    if both:
        yield f"exclude={','.join(both)} is among the inputs or targets, too: leave one out"
    try:
        named_series(config.series)
    except ConfigError as error:
        yield str(error)
    frame, weights = config.frame_size, config.class_weights
    for name in ("target_every", "season"):
        rows = getattr(config, name)
        if rows is not None and frame > 0 and rows % frame:
            yield _no_frames(name, rows, frame)
    yield from _of_forecasts(config)
    for_classes = {"background_class": config.background_class}
    if config.task == "regress":
        for_classes["class_weights"] = None if weights == "none" else weights
    for name, value in for_classes.items() if config.task not in {None, "classify"} else ():
        if value is not None:
            yield f"{name}={value!r} belongs to classes: leave it out, or set task='classify'"
    if weights not in {"none", "balanced"}:
        try:
            weights_by_class(weights)
        except ConfigError as error:
            yield str(error)


def _no_frames(name: str, rows: object, frame: int) -> str:
    return f"{name}={rows} rows are no whole number of frames of {frame}: expected a multiple"


def _of_forecasts(config: "Config") -> Iterator[str]:
    """Contradictions between the settings of a forecast."""
    try:
        ahead = rows_ahead(config.ahead)
    except ConfigError as error:
        yield str(error)
        return
    if ahead and ahead[0] < 0:
        yield f"ahead={config.ahead}: expected at least 0"
    elif config.frame_size > 0 and any(rows % config.frame_size for rows in ahead):
        yield _no_frames("ahead", config.ahead, config.frame_size)
    if len(ahead) > 1 and config.task == "classify":
        yield f"ahead={config.ahead!r} are several forecasts, which are of numbers: take one"
    forecasts = {"season": config.season, "difference": config.difference or None}
    for name, value in forecasts.items() if not ahead else ():
        if value is not None:
            yield f"{name}={value} belongs to forecasts: leave it out, or set ahead=24 or so"
    if config.difference and config.task not in {None, "regress"}:
        yield "difference=True belongs to numbers: leave it out, or set task='regress'"
    if config.difference and config.standardise == "recording":
        yield (
            "difference=True adds to the inputs of the net, which standardise='recording' takes out"
            " of their units: take split or first:400"
        )


def _of_stream(config: "Config") -> Iterator[str]:
    if isinstance(config.workers, int) and config.workers < 0:
        yield f"workers={config.workers}: expected a number of processes, 0 for none, or 'thread'"
    if config.offset and config.hand_off:
        yield (
            f"offset={config.offset} moves the boundaries between parts from epoch to epoch, and"
            " hand_off=True passes states on at these boundaries: leave one of them out"
        )
    for name in ("offset", "hand_off") if config.train_on == "windows" else ():
        if value := getattr(config, name):
            yield (
                f"{name}={value} and train_on='windows' are both given: windows start at the"
                " same steps in every epoch. Leave one of them out"
            )


def _of_length(config: "Config") -> Iterator[str]:
    """Contradictions between the settings of a run's length."""
    if config.seed >= 2**63:
        yield f"seed={config.seed}: expected a number below 2**63"
    if config.updates is not None and config.epochs is not None:
        yield (
            f"updates={config.updates} and epochs={config.epochs} are both given: one of them says"
            " when to stop"
        )
    if config.updates is not None and config.lr_warmup >= config.updates:
        yield (
            f"lr_warmup={config.lr_warmup} of updates={config.updates}: expected fewer, the"
            " learning rate would only rise"
        )
    if config.valid_every == 0 and config.patience is not None:
        yield (
            f"patience={config.patience} counts validations, and valid_every=0 has none before"
            " the end: leave one of them out"
        )
