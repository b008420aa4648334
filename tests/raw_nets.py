"""Nets trained on sensors in raw units, and files of them with a planted error."""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.deploy.chain import Chain, Dense, Rescale
from throughtime.nn.affine import Affine

SENSORS = {  # mean and deviation of each column
    "weather": ([20.0, 55.0, 5.0], [8.0, 20.0, 3.0]),  # °C, %, m/s
    "converter": ([2_048.0, 2_048.0, 2_048.0], [600.0, 300.0, 100.0]),
    "acceleration": ([0.0, 0.0, 9_810.0], [1_500.0, 1_500.0, 900.0]),  # mm/s²
}
LAYERS: dict[str, Callable[[int, int, int], nn.RNNBase]] = {"gru": tt.nn.GRU, "lstm": tt.nn.LSTM}
NETS = [*itertools.product(SENSORS, LAYERS, (1, 2), (0, 1, 2))]
STEPS, LANES, CHUNK, EPOCHS = 1_000, 8, 50, 40


def signal(sensor: str, lanes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs `(T, B, 3)` in raw units, and the class `(T, B)`: the sign of the last pulse."""
    random = np.random.default_rng(seed)
    mean, deviation = (np.array(numbers) for numbers in SENSORS[sensor])
    x = 0.5 * random.standard_normal((STEPS, lanes, 3))
    pulses = np.where(random.random((STEPS, lanes)) < 0.03, random.choice((-1.0, 1.0)), 0.0)
    pulses *= random.choice((-1.0, 1.0), size=pulses.shape)
    x[..., 0] += 3 * pulses
    last = np.maximum.accumulate(np.where(pulses != 0, np.arange(STEPS)[:, None], 0), axis=0)
    classes = np.take_along_axis(pulses, last, axis=0) > 0
    inputs = torch.from_numpy(mean + deviation * x).float()
    return inputs, torch.from_numpy(classes).long()


def trained(sensor: str, layer: str, layers: int, seed: int, *, scaled: bool = False) -> Carried:
    """A net of 32 units after some epochs, with its inputs as they are, or with standardisation."""
    torch.manual_seed(seed)
    x, targets = signal(sensor, LANES, seed)
    front: list[nn.Module] = []
    if scaled:
        front = [Affine(3, inverse=False)]
        front[0].get_buffer("shift").copy_(x.mean((0, 1)))
        front[0].get_buffer("scale").copy_(x.std((0, 1)))
    net = tt.carry(nn.Sequential(*front, LAYERS[layer](3, 32, layers), nn.Linear(32, 2)))
    recordings = [{"inputs": x[:, k], "targets": targets[:, k]} for k in range(LANES)]
    stream = tt.Stream(recordings, LANES, CHUNK, seed=seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(EPOCHS):
        for _ in tt.updates(net, stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(CHUNK)):
            optimizer.step()
            optimizer.zero_grad()
    return net.eval()


def _swapped(chain: Chain) -> None:
    """The first two gates of the recurrent weights change places."""
    layer, size = chain.layers[0], chain.layers[0].hidden
    layer.hh[: 2 * size] = np.roll(layer.hh[: 2 * size], size, axis=0)


def _transposed(chain: Chain) -> None:
    """The recurrent matrix of the last gate is transposed."""
    layer, size = chain.layers[-1], chain.layers[-1].hidden
    layer.hh[-size:] = layer.hh[-size:].T.copy()


def _without_bias(chain: Chain) -> None:
    """The biases of the layer on the inputs' side are lost."""
    chain.layers[0].b_ih[:] = 0


def _without_readout_bias(chain: Chain) -> None:
    next(op for op in chain.operations if isinstance(op, Dense)).bias[:] = 0


def _raw(chain: Chain) -> None:
    """Standardisation is lost."""
    first = chain.operations[0]
    assert isinstance(first, Rescale)
    first.shift[:], first.scale[:] = 0, 1


ERRORS: dict[str, Callable[[Chain], None]] = {
    "swapped gate": _swapped,
    "transposed matrix": _transposed,
    "lost bias": _without_bias,
    "lost readout bias": _without_readout_bias,
    "missing standardisation": _raw,
}
