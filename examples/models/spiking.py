"""Spiking neurons of snntorch, trained through a surrogate gradient.

The state is their membrane potentials.

    python examples/models/spiking.py

`snn.Leaky` is called with its potential and returns it, so nothing is hidden; `init_hidden=True`,
snntorch's other way, keeps the potential in the layer, where no one can reset one lane of it. What
a layer keeps of its last call all the same is let go of after each chunk: it would hold the graph.
The gradient is that of a smooth function in the place of the spike's step.

The task: two channels of random spikes; say at every step which of them fired more recently. The
potential must remember.

Shapes: `T` steps, `B` lanes, `H` neurons.

References: J. K. Eshraghian et al., Training spiking neural networks using lessons from deep
learning, Proc. IEEE 111 (2023). E. O. Neftci, H. Mostafa and F. Zenke, Surrogate gradient learning
in spiking neural networks, IEEE Signal Process. Mag. 36 (2019).
"""

from typing import Any

import snntorch as snn
import torch
from snntorch import surrogate
from torch import Tensor, nn

import throughtime as tt

NEURONS, LEAK = 24, 0.9
STRIDE, HORIZON = 10, 20


class Spiking(nn.Module):
    """A layer that spikes, and two neurons that do not and whose potentials are the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.read = nn.Linear(2, NEURONS), nn.Linear(NEURONS, 2)
        self.hidden = snn.Leaky(
            beta=torch.full((NEURONS,), 0.8),
            learn_beta=True,
            spike_grad=surrogate.fast_sigmoid(slope=5),
        )
        self.output = snn.Leaky(beta=torch.full((2,), 0.8), learn_beta=True, reset_mechanism="none")

    def initial_state(self, lanes: int) -> dict[str, Tensor]:
        """All potentials are zero."""
        weight = self.into.weight
        return {"hidden": weight.new_zeros(lanes, NEURONS), "output": weight.new_zeros(lanes, 2)}

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Potentials of the outputs (T, B, 2), and all potentials after the last step."""
        hidden, output, outputs = state["hidden"], state["output"], list[Tensor]()
        for current in self.into(x).unbind(0):
            spikes, hidden = self.hidden(current, hidden)
            _, output = self.output(
                self.read(spikes.to(x.dtype)), output
            )  # snntorch's spikes are float32 always
            outputs.append(output)
        self.hidden.reset_mem()
        self.output.reset_mem()
        return torch.stack(outputs), {"hidden": hidden, "output": output}


def recordings(count: int, steps: int) -> list[dict[str, Any]]:
    """Spikes of two channels whose rates wander.

    The target is the channel with the larger leaky count.
    """
    rates = 0.4 * torch.rand(count, steps // 50 + 1, 2).repeat_interleave(50, dim=1)[:, :steps]
    spikes = (torch.rand(count, steps, 2) < rates).float()
    counts, level = [], torch.zeros(count, 2)
    for step in spikes.unbind(1):
        level = LEAK * level + step
        counts.append(level)
    targets = torch.stack(counts, dim=1).argmax(dim=2)
    return [{"inputs": x, "targets": t} for x, t in zip(spikes, targets, strict=True)]


def main(updates: int = 150) -> float:
    """Trains, and returns the mean loss of the last twenty updates."""
    torch.manual_seed(0)
    net = tt.carry(Spiking())
    stream = tt.Stream(recordings(16, updates * STRIDE), lanes=16, chunk=STRIDE)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses: list[float] = []
    for update in tt.updates(
        net, stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(STRIDE, HORIZON)
    ):
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(update.loss))
    found = sum(losses[-20:]) / 20
    print(f"spiking neurons: {found:.3f} nats after {len(losses)} updates; guessing costs 0.693")
    return found


if __name__ == "__main__":
    main()
