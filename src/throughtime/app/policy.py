"""The gradient policy of a run: one of ours by name, or a class in the user's own file."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from throughtime import state as trees
from throughtime.app.config import DEFAULT_STRIDE, Config
from throughtime.app.user_class import ClassReference, is_reference
from throughtime.app.values import convert
from throughtime.carry.carried import Carried
from throughtime.errors import ConfigError, ThroughtimeError
from throughtime.gradient import RTRL, Adaptive, Exact, LossFn, Objective, Randomized, Truncated
from throughtime.gradient._memory import MemoryBudget
from throughtime.gradient.policy import Policy
from throughtime.stream import Stream

_POLICIES: dict[str, Callable[..., Policy]] = {
    "truncated": Truncated,
    "exact": Exact,
    "adaptive": Adaptive,
    "randomized": Randomized,
    "rtrl": RTRL,
}
_METHODS = ("init", "update", "state_dict", "load_state_dict")


def resolve_gradient(config: Config) -> Config:
    """The config with typed arguments of its gradient policy, and a user's file by its full path.

    Raises:
        ConfigError: see `make_policy`.
    """
    if is_reference(config.gradient):
        config = replace(config, gradient=str(ClassReference.parse("gradient", config.gradient)))
    make_policy(config)
    typed = _arguments(config, _policy_class(config.gradient))
    return replace(config, gradient_args={name: typed[name] for name in config.gradient_args})


def make_policy(config: Config) -> Policy:
    """The policy that the settings describe.

    Raises:
        ConfigError: no such class, or arguments that it does not take; its own are listed.
    """
    policy_class = _policy_class(config.gradient)
    arguments = _arguments(config, policy_class)
    try:
        return policy_class(**arguments)
    except ThroughtimeError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"gradient={config.gradient!r} refuses {arguments}: {error}") from error


def _policy_class(name: str) -> Callable[..., Policy]:
    if name in _POLICIES:
        return _POLICIES[name]
    policy_class = ClassReference.parse("gradient", name).load()
    missing = [method for method in _METHODS if not hasattr(policy_class, method)]
    if missing:
        raise ConfigError(
            f"gradient={name!r}: its class {policy_class.__name__} has no method {missing[0]};"
            " docs/how-to/extending.md shows a policy"
        )
    return policy_class


def _arguments(config: Config, policy_class: Callable[..., Policy]) -> dict[str, Any]:
    """The arguments of the policy in their types.

    Raises:
        ConfigError: unknown or missing arguments, or values of the wrong type; all are listed.
    """
    parameters = _parameters(policy_class)
    arguments = config.policy_arguments()
    required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty]
    if "stride" in required:
        arguments = {"stride": DEFAULT_STRIDE, **arguments}
    faults: list[str] = []
    for name in arguments:
        if name in parameters:
            arguments[name], fault = convert(name, arguments[name], parameters[name].annotation)
            faults += [fault] if fault else []
        else:
            faults.append(f"there is no argument '{name}'")
    faults += [f"'{name}' is missing" for name in required if name not in arguments]
    if faults:
        raise ConfigError(
            f"gradient={config.gradient!r}: {'; '.join(faults)}. Its arguments are"
            f" {', '.join(map(_describe, parameters.values()))}; write --gradient-arg NAME=VALUE,"
            " or the table [gradient] of a TOML file"
        )
    return arguments


def _parameters(policy_class: Callable[..., Policy]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(policy_class, eval_str=True).parameters
    except NameError as error:
        raise ConfigError(
            f"{policy_class.__qualname__}: the type of an argument is not known ({error})"
        ) from error


def _describe(parameter: inspect.Parameter) -> str:
    default = parameter.default
    return parameter.name + ("" if default is inspect.Parameter.empty else f"={default!r}")


def with_fixed_chunk(policy: Policy, net: Carried, stream: Stream, loss_fn: LossFn) -> Policy:
    """The exact policy with a fixed chunk length, measured on the first steps of the stream.

    Where a pass is cut decides how its sums are rounded, and a resumed run must round as before.
    So the length must not depend on the step at which a run resumes. Other policies are returned
    as they are. The stream must not have moved yet.
    """
    if not isinstance(policy, Exact):
        return policy
    device = next(net.parameters()).device
    first = stream.read(0, 1).to(device)
    state = trees.detach(net.initial_state(first.lanes, like=first.inputs))
    steps = min(policy.cut_every or stream.steps, stream.steps)
    budget = MemoryBudget(policy.memory, policy.chunk, policy.offload)
    chunk = budget.segment_steps(
        net,
        steps,
        lambda n: stream.read(0, min(n, stream.steps)).to(device),
        state,
        Objective(loss_fn),
    )
    return replace(policy, chunk=chunk)


def updates_per_epoch(policy: Policy, stream: Stream, ranks: int) -> int:
    """The number of updates in an epoch; an estimate if the data or the policy decide."""
    if isinstance(policy, Exact) and policy.cut_every is None:
        if stream.lanes * ranks == 1:
            return len(stream.recordings)
        return max(1, round(stream.steps / stream.steps_to_common_reset()))
    names = ("cut_every", "stride", "mean_horizon", "min")
    steps = (getattr(policy, name, None) for name in names)
    stride = next((n for n in steps if isinstance(n, int) and n > 0), DEFAULT_STRIDE)
    return math.ceil(stream.steps / stride)


def describe_policy(policy: Policy) -> str:
    """The policy in words: its own, or those of `repr`."""
    describe = getattr(policy, "describe", None)
    return str(describe()) if callable(describe) else repr(policy)
