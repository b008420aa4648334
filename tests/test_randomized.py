"""Randomized truncation: unbiased, to the last digit where every pattern of cuts can be written
down, and by statistics elsewhere.

Shapes: `T` steps, `B` lanes, `P` weights.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import PolicyData, UpdateGrads, data_for, deviation, plain, policy_gradients, train
from quick import examples
from strategies import (
    Row,
    Weights,
    apart,
    gradients,
    inputs,
    named,
    recordings,
    some_nets,
    start,
    states_apart,
    weights,
)
from throughtime.carry import Carried
from throughtime.chunk import Chunk, Source
from throughtime.errors import ConfigError, DataError, RunError
from throughtime.gradient import Objective, Policy, Probe, Progress
from throughtime.gradient.randomized import Survival

EXACT = 1e-12
Lengths = tuple[int, ...]


def cut_at(patch: pytest.MonkeyPatch, lengths: Sequence[int]) -> None:
    """Stretches of these lengths, one after another, instead of drawn ones.

    The last one for ever.
    """
    coming = itertools.chain(lengths, itertools.repeat(lengths[-1]))
    patch.setattr(Survival, "draw", lambda _: next(coming))


def patterns(steps: int, grain: int, survival: Survival) -> Iterator[tuple[Lengths, float]]:
    """Every way to cut `steps` steps, and its chance.

    The last stretch may be longer than what is left.
    """
    places = (steps - 1) // grain
    for cuts in itertools.product((False, True), repeat=places):
        stops = [grain * (i + 1) for i, cut in enumerate(cuts) if cut] + [steps]
        lengths = tuple(b - a for a, b in itertools.pairwise([0, *stops]))
        chance = 1.0
        for length in lengths[:-1]:
            chance *= survival(length - grain) - survival(length)
        yield lengths, chance * survival(((lengths[-1] - 1) // grain) * grain)


def summed(results: UpdateGrads, policy: tt.Randomized, data: PolicyData) -> Weights:
    """The gradient of an epoch's mean loss from the sum of its updates: one factor for all."""
    factor = policy.mean_horizon * data.mask.shape[1] / int(data.mask.sum())
    return {
        name: torch.stack([g[name] for *_, g in results]).sum(0) * factor for name in results[0][2]
    }


def expectation(net: Carried, data: PolicyData, policy: tt.Randomized) -> Weights:
    """The mean of the estimate over every pattern of cuts."""
    mean = {name: torch.zeros_like(w) for name, w in weights(net).items()}
    whole = 0.0
    for lengths, chance in patterns(len(data.x), policy._grain, policy._survival):
        with pytest.MonkeyPatch.context() as patch:
            cut_at(patch, lengths)
            results = policy_gradients(net, [data.chunk], policy)
        whole += chance
        for name, estimate in summed(results, policy, data).items():
            mean[name] += chance * estimate
    assert whole == pytest.approx(1.0, abs=1e-14)
    return mean


def exact(net: Carried, data: PolicyData) -> Weights:
    ((_, _, results),) = plain(net, data)
    return results


@examples(10)
@given(
    size=st.sampled_from([(2, 1), (3, 1), (4, 1), (4, 2), (5, 2), (5, 3)]),
    mean=st.sampled_from([3, 7]),
    alpha=st.sampled_from([1.5, 6.0]),
    lanes=st.sampled_from([1, 2]),
    seed=st.integers(0, 999),
    resets=st.sampled_from([0.0, 0.3]),
    masked=st.sampled_from([0.0, 0.3]),
)
@some_nets("tensor-state", "lstm", "dict-state", "learnt-start")
def test_expectation_over_all_patterns_of_cuts_is_the_exact_gradient(
    row: Row,
    size: tuple[int, int],
    mean: int,
    alpha: float,
    lanes: int,
    seed: int,
    resets: float,
    masked: float,
) -> None:
    (steps, grain), net = size, row.net()
    data = data_for(net, steps, lanes, seed, resets, masked)
    assume(bool(data.mask.any()))
    assert (
        apart(expectation(net, data, tt.Randomized(mean, alpha, grain)), exact(net, data)) < EXACT
    )


Change = Callable[[pytest.MonkeyPatch], None]
Factor = Callable[[tt.Randomized, int], float]  # of the credit, so many steps after the last cut


def weigh(patch: pytest.MonkeyPatch, factor: Factor) -> None:
    """Scale credit by another factor where it passes a possible cut."""
    right = tt.Randomized.plan

    def plan(policy: tt.Randomized, source: Source, at: Progress, probe: Probe) -> Any:
        def gate(step: int, credit: Sequence[Tensor | None]) -> list[Tensor | None]:
            return [
                leaf if leaf is None else leaf * factor(policy, step - at.step) for leaf in credit
            ]

        window, memory = right(policy, source, at, probe)
        return window and window._replace(gate=gate), memory

    patch.setattr(tt.Randomized, "plan", plan)


def no_weights(patch: pytest.MonkeyPatch) -> None:
    weigh(patch, lambda *_: 1.0)


def weights_one_grain_late(patch: pytest.MonkeyPatch) -> None:
    weigh(patch, lambda policy, at: policy._survival(at) / policy._survival(at + policy._grain))


def memoryless_weights(patch: pytest.MonkeyPatch) -> None:
    """As if every place were cut with the same chance, 1 / mean."""
    weigh(patch, lambda policy, _: 1 / (1 - policy._grain / policy.mean_horizon))


def squared_weights(patch: pytest.MonkeyPatch) -> None:
    right = Survival.__call__
    patch.setattr(Survival, "__call__", lambda self, steps: right(self, steps) ** 2)


MUTANTS: dict[str, Change] = {
    "cuts without weights": no_weights,
    "weights of the next place": weights_one_grain_late,
    "weights of a geometric law": memoryless_weights,
    "squared weights": squared_weights,
}


@pytest.mark.covering
@pytest.mark.parametrize("change", list(MUTANTS.values()), ids=list(MUTANTS))
@pytest.mark.parametrize("grain", [1, 2])
def test_mutant_is_biased(change: Change, grain: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, data, policy = (
        named("tensor-state").net(),
        PolicyData.draw(4, 2, 0),
        tt.Randomized(3, grain=grain),
    )
    assert apart(expectation(net, data, policy), exact(net, data)) < EXACT
    law = policy._survival
    chances = [(lengths, chance) for lengths, chance in patterns(4, grain, law)]
    change(monkeypatch)
    monkeypatch.setattr("test_randomized.patterns", lambda *_: iter(chances))
    assert apart(expectation(net, data, policy), exact(net, data)) > 1e-3


@pytest.mark.parametrize(
    "masked", [False, True], ids=["a stretch's mean loss", "a stretch's mean loss times its length"]
)
def test_other_weights_of_an_update_are_biased(masked: bool) -> None:
    """Every mutant is biased up to any factor, for short data and for few valid steps."""
    net, data, policy = (
        named("tensor-state").net(),
        PolicyData.draw(4, 1, 5, masked=0.3),
        tt.Randomized(2, grain=1),
    )
    data = (
        data
        if masked
        else PolicyData(data.x, data.targets, data.resets, torch.ones_like(data.mask))
    )
    assert data.mask.all() != masked
    right, mean = (
        {name: torch.zeros_like(w) for name, w in weights(net).items()} for _ in range(2)
    )
    for lengths, chance in patterns(4, 1, policy._survival):
        with pytest.MonkeyPatch.context() as patch:
            cut_at(patch, lengths)
            results = policy_gradients(net, [data.chunk], policy)
        stops = itertools.pairwise([0, *itertools.accumulate(lengths)])
        counted = [b - a for a, b in stops if data.mask[a:b].any()]
        for (valid, _, g), length in zip(results, counted, strict=True):
            for name, gradient in g.items():
                right[name] += chance * gradient
                mean[name] += chance * gradient * ((length if masked else 1) / valid)
    assert apart(multiple(right, exact(net, data)), exact(net, data)) < EXACT
    assert apart(multiple(mean, exact(net, data)), exact(net, data)) > 1e-3


def multiple(results: Weights, truth: Weights) -> Weights:
    """The multiple of a gradient that comes nearest to another one."""
    factor = sum((results[name] * g).sum().item() for name, g in truth.items()) / sum(
        g.square().sum().item() for g in results.values()
    )
    return {name: g * factor for name, g in results.items()}


def weighted_oracle(
    net: Carried, data: PolicyData, lengths: Sequence[int], policy: tt.Randomized
) -> UpdateGrads:
    """Step by step: hooks on the states scale the gradient wherever a cut may fall."""
    survival, grain, state = policy._survival, policy._grain, start(net, data.x)
    results: UpdateGrads = []
    for begin, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        outputs: list[Tensor] = []
        for step in range(begin, end):
            at = step - begin
            if at and at % grain == 0:
                factor = survival(at - grain) / survival(at)
                for leaf in tt.state.tensors(state):
                    if leaf.requires_grad:
                        leaf.register_hook(lambda a, factor=factor: a * factor)
            y, state = net(data.x[step : step + 1], state, data.resets[step : step + 1])
            state = tt.state.map_leaves(
                lambda leaf: leaf.clone(), state
            )  # a hook of its own, also where a leaf is passed on
            outputs.append(y)
        valid = data.mask[begin:end]
        if valid.any():
            net.zero_grad()
            loss = nn.functional.mse_loss(torch.cat(outputs)[valid], data.targets[begin:end][valid])
            (loss * (int(valid.sum()) / (policy.mean_horizon * valid.shape[1]))).backward()
            results.append((int(valid.sum()), loss.item(), gradients(net)))
        state = tt.state.detach(state)
    net.zero_grad()
    return results


@examples(12)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    grain=st.sampled_from([1, 2, 5]),
    lanes=st.sampled_from([1, 3]),
    seed=st.integers(0, 999),
    resets=st.sampled_from([0.0, 0.2]),
    masked=st.sampled_from([0.0, 0.5]),
)
@some_nets("tensor-state", "gru", "hides-cell", "namedtuple-state", "learnt-start")
def test_every_update_equals_plain_autograd_with_weighted_states(
    row: Row,
    lengths: list[int],
    grain: int,
    lanes: int,
    seed: int,
    resets: float,
    masked: float,
) -> None:
    net, policy = row.net(), tt.Randomized(6, grain=grain)
    data = data_for(net, sum(lengths), lanes, seed, resets, masked)
    with pytest.MonkeyPatch.context() as patch:
        cut_at(patch, lengths)
        results = policy_gradients(net, [data.chunk], policy)
    assert deviation(results, weighted_oracle(net, data, lengths, policy)) < 1e-10


def z_scores(samples: Sequence[Weights], truth: Weights) -> Tensor:
    """How many standard errors the mean of each entry is from the truth.

    Entries without variance are left out.
    """
    rows = torch.stack([torch.cat([g.flatten() for g in sample.values()]) for sample in samples])
    expected = torch.cat([g.flatten() for g in truth.values()])
    varies = rows.std(0) > 1e-9
    assert varies.sum() > 10
    return ((rows.mean(0) - expected) / (rows.std(0) / len(samples) ** 0.5))[varies]


def estimates(
    net: Carried, data: PolicyData, policy: Policy, count: int, factor: float | None
) -> list[Weights]:
    """The gradient of the mean loss that an epoch of each seed says.

    By `factor`, or weighted by valid steps.
    """
    samples: list[Weights] = []
    for seed in range(count):
        torch.manual_seed(seed)
        results = policy_gradients(net, [data.chunk], policy)
        total = sum(steps for steps, *_ in results)
        samples.append(
            {
                n: (
                    torch.stack(
                        [
                            g[n] * (steps / total if factor is None else factor)
                            for steps, _, g in results
                        ]
                    ).sum(0)
                )
                for n in results[0][2]
            }
        )
    return samples


def test_mean_over_many_seeds_is_the_exact_gradient_and_that_of_a_truncation_is_not() -> None:
    net, data = named("tensor-state").net(), PolicyData.draw(9, 2, 0)
    truth = exact(net, data)
    assert (
        z_scores(estimates(net, data, tt.Randomized(3, grain=1), 250, 3 / 9), truth).abs().max()
        < 4.5
    )
    assert (
        z_scores(estimates(net, data, tt.Truncated(3, jitter=True), 60, None), truth).abs().max()
        > 20
    )


laws = {
    "mean": st.integers(1, 20_000),
    "alpha": st.floats(1.05, 30) | st.sampled_from([1.5, 2.0, 6.0]),
    "share": st.floats(0, 0.99),
}


@examples(25)
@given(**laws)
def test_survival_has_the_mean_asked_for(mean: int, alpha: float, share: float) -> None:
    """Hurwitz's zeta: the sum of (1 + k/q)^-alpha over k = 0, 1, ... is q^alpha zeta(alpha, q)."""
    grain = max(1, int(share * mean))
    assume(grain < mean)
    law = Survival.with_mean(mean, alpha, grain)
    assert law.mean() == pytest.approx(mean, rel=1e-9)
    q = torch.tensor(law.scale / grain, dtype=torch.float64)
    zeta = torch.special.zeta(torch.tensor(alpha, dtype=torch.float64), q)
    assert grain * (alpha * q.log() + zeta.log()).exp().item() == pytest.approx(mean, rel=1e-7)


@examples(15)
@given(**laws)
def test_survival_falls_from_one_to_nothing(mean: int, alpha: float, share: float) -> None:
    grain = max(1, int(share * mean))
    policy = tt.Randomized(mean, alpha, grain)
    lags = [0, 1, mean, 2 * mean, 17 * mean, 1000 * mean]
    chances = [policy._survival(lag) for lag in lags]
    assert chances[0] == 1
    assert chances == sorted(chances, reverse=True)
    assert [policy.inflation(lag) for lag in lags] == sorted(policy.inflation(lag) for lag in lags)
    assert policy.inflation(0) == 1


@pytest.mark.parametrize(
    ("mean", "alpha", "grain"), [(10, 6.0, 1), (10, 3.0, 4), (50, 6.0, 3), (7, 6.0, 7)]
)
def test_drawn_lengths_follow_the_law(mean: int, alpha: float, grain: int) -> None:
    law, count = Survival.with_mean(mean, alpha, grain), 4000
    drawn = torch.tensor([law.draw() for _ in range(count)], dtype=torch.float64)
    assert (drawn % grain == 0).all()
    assert drawn.min() >= grain
    assert abs(drawn.mean() - mean) <= 4.5 * drawn.std() / count**0.5 + 1e-9
    for k in range(1, 6):
        chance = law(k * grain)
        assert (
            abs((drawn > k * grain).double().mean() - chance)
            <= 4.5 * (chance * (1 - chance) / count) ** 0.5 + 1e-9
        )


def test_grain_of_the_mean_horizon_cuts_everywhere_alike() -> None:
    """The shortest law: one grain per stride, no credit to reweight, the bias of a truncation."""
    assert {Survival.with_mean(7, 6.0, 7).draw() for _ in range(50)} == {7}


def stream(chunk: int = 8) -> tt.Stream:
    return tt.Stream(recordings([31, 17, 20]), lanes=2, chunk=chunk, warm_up=1)


def test_chunk_length_of_the_stream_changes_no_gradient() -> None:
    results: list[UpdateGrads] = []
    for source in (stream(3), stream(500), list(stream(5))):
        torch.manual_seed(3)
        results.append(policy_gradients(named("hides-layer").net(), source, tt.Randomized(6)))
    assert deviation(results[0], results[1]) == 0
    assert deviation(results[0], results[2]) == 0


@pytest.mark.parametrize("done", [1, 3, 6])
def test_resume_in_the_middle_of_an_epoch_gives_the_same_bits(done: int) -> None:
    """From `updates.state_dict()`, weights, optimizer and torch's generator."""
    net, policy = named("hides-layer").net(), tt.Randomized(4, grain=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    run = tt.updates(net, stream(), nn.MSELoss(), gradient=policy)
    train(optimizer, run, done)
    saved = copy.deepcopy(
        (net.state_dict(), optimizer.state_dict(), run.state_dict(), torch.get_rng_state())
    )
    losses = train(optimizer, run)
    assert losses

    other = named("hides-layer").net()
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.05)
    resumed = tt.updates(other, stream(), nn.MSELoss(), gradient=tt.Randomized(4, grain=2))
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    torch.set_rng_state(saved[3])
    assert train(other_optimizer, resumed) == losses
    assert apart(weights(other), weights(net)) == 0
    assert states_apart(resumed.state, run.state) == 0


def test_stretch_without_valid_step_yields_nothing_but_carries_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(24, 2, 0)
    mask = torch.zeros(24, 2, dtype=torch.bool)
    mask[9, 1] = mask[22] = True
    cut_at(monkeypatch, (8, 5, 7, 4))
    run = tt.updates(
        net,
        [Chunk.from_tensors(data.x, data.targets, resets=data.resets, mask=mask)],
        nn.MSELoss(),
        gradient=tt.Randomized(5, grain=1),
    )
    assert [update.steps for update in run] == [1, 2]
    _, end = net(data.x, start(net, data.x), data.resets)
    assert states_apart(run.state, end) < EXACT


def test_gradient_that_is_not_finite_is_refused_and_nothing_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, data = named("tensor-state").net(), PolicyData.draw(20, 1, 0)
    data.targets[13] = torch.nan
    cut_at(monkeypatch, (5, 5, 10))
    run = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Randomized(5, grain=5))
    before, results = weights(net), [gradients(net) for _ in itertools.islice(run, 2)]
    with pytest.raises(
        RunError, match=r"is not finite .* steps 10 to 14 of the epoch \(recording 0\)"
    ):
        next(run)
    assert apart(gradients(net), results[-1]) == 0
    assert apart(weights(net), before) == 0


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "alpha one": (
        {"alpha": 1.0},
        "alpha=1.0: expected a number above 1; with 1 or less the mean stretch has no end",
    ),
    "alpha below one": ({"alpha": -2.0}, "alpha=-2.0: expected a number above 1"),
    "alpha no number": ({"alpha": float("nan")}, "alpha=nan: expected a number above 1"),
    "alpha infinite": ({"alpha": float("inf")}, "alpha=inf: expected a number above 1"),
    "grain above the mean": (
        {"grain": 101},
        "grain=101 is above mean_horizon=100: a stretch has at least one grain",
    ),
    "grain zero": ({"grain": 0}, "grain=0: expected a whole number of at least 1"),
    "mean a float": (
        {"mean_horizon": 1e3},
        r"mean_horizon=1000.0: expected a whole number of at least 1",
    ),
    "mean zero": ({"mean_horizon": 0}, "mean_horizon=0: expected a whole number of at least 1"),
}


@pytest.mark.parametrize(("setting", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_setting_out_of_range_is_refused(setting: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tt.Randomized(**{"mean_horizon": 100, **setting})


def test_iterator_of_chunks_is_as_good_as_a_list() -> None:
    """Nothing is read again: a stretch is taken whole."""
    results: list[UpdateGrads] = []
    for source in (list(stream()), iter(list(stream()))):
        torch.manual_seed(1)
        # an iterator
        results.append(policy_gradients(named("tensor-state").net(), source, tt.Randomized(6)))  # pyright: ignore[reportArgumentType]
    assert deviation(results[0], results[1]) == 0


def test_description_says_the_mean_and_the_variance() -> None:
    said = tt.Randomized(32).describe()
    assert said.startswith(
        "an update every 32 steps on average (every 2 steps a cut may fall), credit unbiased"
    )
    assert f"{tt.Randomized(32).inflation(512):.3g} times" in said


def test_loss_weights_and_mask_are_those_of_the_objective() -> None:
    """The loss reported is the mean over the stretch's valid steps, as for every policy."""
    net, data = named("tensor-state").net(), PolicyData.draw(12, 2, 0, masked=0.4)
    y, _ = net(data.x, start(net, data.x), data.resets)
    with pytest.MonkeyPatch.context() as patch:
        cut_at(patch, (5, 7))
        losses = [
            u.loss.item()
            for u in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Randomized(6, grain=1))
        ]
    for (a, b), loss in zip(((0, 5), (5, 12)), losses, strict=True):
        assert loss == pytest.approx(
            Objective(nn.MSELoss())(y[a:b], data.chunk[a:b])[0].item(), rel=1e-12
        )


def test_chunks_without_targets_are_refused() -> None:
    with pytest.raises(DataError, match="have no targets"):
        policy_gradients(named("lstm").net(), [Chunk.from_tensors(inputs(9, 1))], tt.Randomized(3))


def test_calls_of_the_net_have_few_lengths() -> None:
    """oneDNN keeps kernels for each: stretches of all lengths took 5 to 15 MB in 2,000 updates."""
    net, lengths = tt.carry(nn.LSTM(3, 4).double()), set[int]()
    net.module.register_forward_hook(lambda _, args, __: lengths.add(len(args[0])))
    stream = tt.Stream(recordings([2000], outputs=4, features=3), lanes=1, chunk=100)
    for _ in tt.updates(net, stream, nn.MSELoss(), gradient=tt.Randomized(20, grain=1)):
        pass
    assert lengths == {1}  # from one possible cut to the next
