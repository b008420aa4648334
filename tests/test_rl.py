"""Recurrent agents of sb3-contrib and TorchRL train as before, with resets in one call."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from strategies import apart, weights
from throughtime.errors import LawError, ModelError
from throughtime.integrations import rl

sb3_contrib = pytest.importorskip("sb3_contrib", reason="needs throughtime[rl]")
torchrl = pytest.importorskip("torchrl.modules", reason="needs throughtime[rl]")

from benchmarks.rl import Positions  # noqa: E402  # CartPole without velocities
from sb3_contrib.common.recurrent.type_aliases import RNNStates  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402
from tensordict import TensorDict  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::UserWarning",  # of the two libraries
)
STEPS, LANES = 14, 3


def agent(**options: Any) -> Any:
    kwargs = {"lstm_hidden_size": 16, "net_arch": [8], **options}
    return sb3_contrib.RecurrentPPO(
        "MlpLstmPolicy",
        DummyVecEnv([Positions] * 2),
        n_steps=64,
        batch_size=64,
        n_epochs=2,
        seed=0,
        device="cpu",
        policy_kwargs=kwargs,
    )


@pytest.mark.parametrize("shared", [False, True])
def test_recurrent_ppo_trains_to_the_same_weights(shared: bool) -> None:
    plain, fused = (agent(shared_lstm=shared, enable_critic_lstm=not shared) for _ in range(2))
    start = copy.deepcopy(plain.policy)
    assert rl.fuse(fused.policy) is fused.policy
    for model in (plain, fused):
        model.set_random_seed(3)
        model.learn(256)
    assert apart(weights(fused.policy), weights(plain.policy)) < 1e-5
    assert apart(weights(start), weights(plain.policy)) > 1e-3


def plays(policy: Any) -> Any:
    """The policy over `(T, B, ...)`: logits and values, and both states."""

    def play(x: Tensor, state: Any, starts: Tensor) -> tuple[Any, Any]:
        rows, flags = x.transpose(0, 1).flatten(0, 1), starts.t().flatten().float()
        shape = (x.shape[1], len(x), -1)
        distribution, pi = policy.get_distribution(rows, state.pi, flags)
        logits = distribution.distribution.logits.reshape(shape).transpose(0, 1)
        values = policy.predict_values(rows, state.vf, flags).reshape(shape).transpose(0, 1)
        features = policy.extract_features(rows)
        _, vf = policy._process_sequence(features, state.vf, flags, policy.lstm_critic)
        return (logits, values), RNNStates(pi, vf)

    return play


def rollout(width: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    starts = torch.zeros(STEPS, LANES, dtype=torch.bool)
    starts[0] = starts[4, 1] = starts[9, 0] = True
    return torch.randn(STEPS, LANES, width, generator=draws), starts


def check_policy(policy: Any) -> None:
    zeros = torch.zeros(1, LANES, 16), torch.zeros(1, LANES, 16)
    state = RNNStates(zeros, zeros)
    tt.testing.check_rollout(plays(policy), *rollout(2), state)


def test_the_policy_obeys_the_laws_of_a_rollout_and_without_resets_does_not() -> None:
    policy = agent().policy
    check_policy(policy)
    check_policy(rl.fuse(policy))
    policy._process_sequence = lambda features, states, starts, lstm: rl._process_sequence(
        features, states, torch.zeros_like(starts), lstm
    )
    with pytest.raises(LawError):
        check_policy(policy)


def test_what_is_no_recurrent_policy_is_refused() -> None:
    with pytest.raises(ModelError, match=r"fuse\(model.policy\)"):
        rl.fuse(nn.Linear(1, 1))
    policy = agent().policy
    policy.lstm_actor.__class__ = type("Own", (nn.LSTM,), {})
    with pytest.raises(ModelError, match=r"inherit from tt\.nn\.LSTM"):
        rl.fuse(policy)
    with pytest.raises(AttributeError, match="no attribute 'Module'"):
        rl.Module  # noqa: B018  # not there


def module(kind: str, source: Any = rl, **options: Any) -> Any:
    torch.manual_seed(2)
    states = ["h", "c"][: 2 if kind == "LSTMModule" else 1]
    return getattr(source, kind)(
        input_size=3,
        hidden_size=5,
        in_keys=["x", *states],
        out_keys=["y", *(("next", name) for name in states)],
        **options,
    )


def tensordict(x: Tensor, starts: Tensor, **states: Tensor) -> Any:
    """TorchRL's layout, `(B, T, ...)`."""
    data = {"x": x.transpose(0, 1), "is_init": starts.t().unsqueeze(-1)}
    for name, leaf in states.items():  # (L, B, H), stored at each step
        data[name] = leaf.transpose(0, 1)[:, None].repeat(1, len(x), 1, 1)
        data[name] = data[name] * ~data["is_init"].unsqueeze(-1)
    return TensorDict(data, batch_size=(x.shape[1], len(x)))


@pytest.mark.parametrize("kind", ["LSTMModule", "GRUModule"])
def test_a_rollout_gives_what_torchrl_gives(kind: str) -> None:
    layers, (x, starts), results = 2, rollout(3), list[Any]()
    starts = starts & (torch.arange(STEPS) > 0)[:, None]  # the first episodes go on
    states = {name: torch.randn(layers, LANES, 5) for name in ("h", "c")}
    for source in (torchrl, rl):
        net = module(kind, source, num_layers=layers, default_recurrent_mode=True)
        leaf = x.clone().requires_grad_()
        data = net(tensordict(leaf, starts, **states))
        last = data["next", "h"][:, -1]
        (data["y"].cos().sum() + last.sum()).backward()
        weights = [p.grad for p in net.parameters()]
        results.append([data["y"].detach(), last.detach(), leaf.grad, *weights])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    plain = module(kind, rl, num_layers=layers, default_recurrent_mode=True)
    without = plain(tensordict(x, torch.zeros_like(starts), **states))["y"]
    assert (without - results[0][0]).abs().max() > 1e-2  # the mutant: no reset


def test_a_state_that_enters_an_episode_is_refused() -> None:
    x, starts = rollout(3)
    data = tensordict(x, starts, h=torch.ones(1, LANES, 5), c=torch.ones(1, LANES, 5))
    data["h"][:] = 1.0
    with pytest.raises(ModelError, match="make_tensordict_primer"):
        module("LSTMModule", default_recurrent_mode=True)(data)
