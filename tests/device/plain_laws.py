"""Laws that hold on every device: training and inference equal those of plain PyTorch on the CPU.

Each law is a function of where it runs, which returns numbers; `deviation_of` compares those of a
device with those of the CPU without compiled kernels. So `cpu` tests the compiled kernels. Data and
weights are drawn on the CPU. Products are computed in full precision meanwhile (no TF32).

Shapes: `T` steps, `B` lanes.
"""

import io
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from throughtime import optim
from throughtime._device import (
    seed_generators,
)
from throughtime.carry.carried import Carried, carry
from throughtime.diagnose import audit, reach, settling_time, trace
from throughtime.evaluation import evaluate
from throughtime.gradient import Adaptive, Exact, Policy, Randomized, Truncated, rollout
from throughtime.kernels import linear_scan
from throughtime.metrics import Regression
from throughtime.nn import GRU, LSTM
from throughtime.predict import Predictor, predict
from throughtime.stream import Stream
from throughtime.testing import check_carry, check_no_leak
from throughtime.updates import updates

Numbers: TypeAlias = Iterable[Tensor | float]
FEATURES, HIDDEN, STEPS, LANES, CHUNK, SEED = 3, 8, (70, 33, 48, 25), 2, 10, 0
CPU = torch.device("cpu")


class Setting(NamedTuple):
    """Where a law runs."""

    device: torch.device
    dtype: torch.dtype

    def recordings(self) -> list[dict[str, Tensor]]:
        """Recordings on the CPU, of different lengths: there are resets within chunks."""
        draw = torch.Generator().manual_seed(SEED)
        inputs = [torch.randn(steps, FEATURES, device="cpu", generator=draw) for steps in STEPS]
        # a target is a sum over the last steps; every fifth one is missing
        targets = [x.cumsum(0)[:, :2].sin() for x in inputs]
        for target in targets:
            target[::5] = torch.nan
        return [
            {"inputs": x.to(self.dtype), "targets": y.to(self.dtype)}
            for x, y in zip(inputs, targets, strict=True)
        ]

    def stream(self, **options: Any) -> Stream:
        return Stream(self.recordings(), LANES, CHUNK, seed=SEED, dtype=self.dtype, **options)

    def net(self, make: Callable[[], nn.Module]) -> Carried:
        torch.default_generator.manual_seed(SEED)
        with CPU:
            module = make()
        return carry(module).to(self.device, self.dtype)


class _GatedScan(nn.Module):
    """A linear recurrence, computed in parallel over time."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(FEATURES, HIDDEN), nn.Linear(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[1], HIDDEN) if h is None else h
        hidden = linear_scan(self.gate(x).sigmoid(), self.value(x), h)
        return self.head(hidden), hidden[-1]


def _layers(layer: Callable[..., nn.Module], *between: nn.Module, **options: Any) -> nn.Sequential:
    return nn.Sequential(layer(FEATURES, HIDDEN, **options), *between, nn.Linear(HIDDEN, 2))


NETS: dict[str, Callable[[], nn.Module]] = {
    "nn.LSTM": lambda: _layers(nn.LSTM),
    "nn.GRU": lambda: _layers(nn.GRU, num_layers=2),
    "tt.nn.LSTM": lambda: _layers(LSTM, num_layers=2),
    "tt.nn.GRU": lambda: _layers(GRU),
    "loop over a cell": lambda: nn.Sequential(nn.GRUCell(FEATURES, HIDDEN), nn.Linear(HIDDEN, 2)),
    "linear scan": _GatedScan,
}
POLICIES: dict[str, Policy] = {
    "Truncated": Truncated(CHUNK),
    "Truncated, horizon": Truncated(CHUNK, 3 * CHUNK),
    "Truncated, jitter": Truncated(CHUNK, 2 * CHUNK, jitter=True, burn_in=5),
    "Exact": Exact(chunk=7),
    "Exact, cut": Exact(cut_every=25),
    "Adaptive": Adaptive(0.1, CHUNK, 4 * CHUNK, every=2),
    "Randomized": Randomized(2 * CHUNK, grain=5),
}


def _train(
    setting: Setting,
    make: Callable[[], nn.Module],
    policy: Policy,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: float,
) -> Iterator[Tensor | float]:
    """Losses and gradients of two epochs, then the weights."""
    net, stream = setting.net(make), setting.stream()
    stepper = optimizer(net.parameters(), lr=0.05, **options)
    for _ in range(2):
        yield from _steps(net, updates(net, stream, nn.MSELoss(), gradient=policy), stepper)
    yield from (weight.detach() for weight in net.parameters())


def _steps(net: Carried, run: Iterable[Any], stepper: torch.optim.Optimizer) -> Iterator[Tensor]:
    for update in run:
        yield update.loss.detach().clone()
        yield from (weight.grad.clone() for weight in net.parameters() if weight.grad is not None)
        stepper.step()
        stepper.zero_grad()


def _resume(setting: Setting) -> Iterator[Tensor]:
    """Saved on the device, resumed on the CPU, and back."""
    policy, saved = Truncated(CHUNK, 2 * CHUNK), io.BytesIO()
    for place in (setting.device, CPU, setting.device):
        net = setting.net(NETS["nn.LSTM"]).to(place)
        adam = torch.optim.Adam(net.parameters())
        run = updates(net, setting.stream(), nn.MSELoss(), gradient=policy)
        if saved.tell():
            saved.seek(0)
            states = torch.load(saved, map_location=place)
            for part, values in zip((net, adam, run), states, strict=True):
                part.load_state_dict(values)
        yield from _steps(net, islice(run, 3), adam)
        saved = io.BytesIO()
        torch.save([part.state_dict() for part in (net, adam, run)], saved)


def _dropout(setting: Setting) -> Numbers:
    """A second forward pass draws what the first one drew, or `Exact` raises."""
    net = setting.net(lambda: _layers(nn.LSTM, nn.Dropout(0.3), num_layers=2, dropout=0.3))
    policy = Exact(chunk=7)
    return [float(len([*updates(net, setting.stream(), nn.MSELoss(), gradient=policy)]))]


def _rollout(setting: Setting) -> Numbers:
    net = setting.net(NETS["tt.nn.LSTM"])
    x = setting.recordings()[0]["inputs"].unsqueeze(1).to(setting.device).requires_grad_()
    resets = torch.zeros(x.shape[:2], dtype=torch.bool, device=setting.device)
    resets[31] = True
    y, _ = rollout(net, x, resets=resets, chunk=9)
    y.square().mean().backward()
    return [y.detach(), *(leaf.grad for leaf in (x, *net.parameters()) if leaf.grad is not None)]


def _evaluate(setting: Setting) -> Numbers:
    result = evaluate(
        setting.net(NETS["nn.GRU"]), setting.stream(), nn.MSELoss(), metrics=Regression()
    )
    return [result.loss, float(result.steps), *result.metrics.values()]


def _predict(setting: Setting) -> Numbers:
    net, recording = setting.net(NETS["nn.LSTM"]), setting.recordings()[0]
    whole, _ = predict(net, recording["inputs"], chunk=16)
    predictor = Predictor(net)
    steps = [predictor.step(x.unsqueeze(0).to(setting.device)) for x in recording["inputs"]]
    net.to(CPU)  # and the state follows
    return [whole, torch.cat(steps), predictor(recording["inputs"][:9].unsqueeze(1))]


def _audit(setting: Setting) -> Numbers:
    result = audit(setting.net(NETS["nn.LSTM"]), setting.stream(), nn.MSELoss(), [10, 30], steps=60)
    return [result.loss, result.norm, *(row.bias for row in result.rows)]


def _reach(setting: Setting) -> Numbers:
    net = setting.net(NETS["nn.LSTM"])
    result = reach(net, setting.stream(), nn.MSELoss(), max_lag=20, anchors=8)
    return [result.loss, *result.norms]


def _settling(setting: Setting) -> Numbers:
    net = setting.net(NETS["nn.GRU"])
    return [*settling_time(net, setting.stream(), starts=8, span=15).remembrance.values()]


def _trace(setting: Setting) -> Numbers:
    net = setting.net(NETS["nn.LSTM"])
    with trace(net) as record:
        for _ in islice(updates(net, setting.stream(), nn.MSELoss(), gradient=Truncated(20)), 2):
            pass
    return [record[name].detach() for name in record.names]


def _laws_of_carrying(setting: Setting) -> Numbers:
    """The laws raise where they are broken."""
    for make in NETS.values():
        check_carry(setting.net(make), next(iter(setting.stream())).inputs)
    check_no_leak(setting.stream(), setting.net(NETS["nn.LSTM"]))
    return []


LAWS: dict[str, Callable[[Setting], Numbers]] = {
    **{
        f"tt.{name}": partial(_train, make=NETS["tt.nn.LSTM"], policy=policy)
        for name, policy in POLICIES.items()
    },
    **{
        f"{name}, {policy}": partial(_train, make=make, policy=POLICIES[policy])
        for name, make in NETS.items()
        for policy in ("Truncated, horizon", "Exact")
    },
    **{
        f"tt.optim.{kind.__name__}": partial(
            _train,
            make=NETS["nn.LSTM"],
            policy=POLICIES["Truncated"],
            optimizer=kind,
            weight_decay=0.1,
            max_norm=0.5,
        )
        for kind in (optim.SGD, optim.Adam, optim.AdamW)
    },
    "resume": _resume,
    "dropout is drawn again": _dropout,
    "tt.rollout": _rollout,
    "tt.evaluate": _evaluate,
    "tt.predict": _predict,
    "tt.audit": _audit,
    "tt.reach": _reach,
    "tt.settling_time": _settling,
    "tt.trace": _trace,
    "laws of carrying": _laws_of_carrying,
}


def deviation_of(name: str, setting: Setting) -> float:
    """The largest deviation of the numbers of a law, relative to the largest one of each result."""
    expected = numbers_of(name, setting._replace(device=CPU), plain=True)
    return _deviation(numbers_of(name, setting), expected)


class _PlainTorch(TorchFunctionMode):
    """Changes nothing; layers are torch's own while it is active."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        return func(*args, **(kwargs or {}))


def numbers_of(name: str, setting: Setting, *, plain: bool = False) -> list[Tensor]:
    seed_generators(SEED, setting.device)
    with _full_precision(), _PlainTorch() if plain else nullcontext():
        values = [*LAWS[name](setting)]
    return [torch.as_tensor(value, device="cpu").detach().to(torch.float64) for value in values]


@contextmanager
def _full_precision() -> Generator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _deviation(got: list[Tensor], expected: list[Tensor]) -> float:
    if [value.shape for value in got] != [value.shape for value in expected]:
        return float("inf")
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        kept = b.isfinite()
        if kept.any():
            error, size = (a - b)[kept].abs().max(), b[kept].abs().max()
            worst = max(worst, (error / size.clamp(min=1e-3)).item())
    return worst
