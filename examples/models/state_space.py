"""A Mamba-2 of the transformers library with its cache as the state, trained on an unbroken stream.

    python examples/models/state_space.py

The cache of transformers is made for generation: it is written in place. For every chunk a new one
is filled with the state, so that the state stays a value, and copying into the cache keeps its
graph: the gradient flows through it into the chunk before, as far as the horizon allows. Chunks of
a single step take another path in the library, which overwrites what its own gradient needs; there
a copy is saved. Other models of the library, and what they carry: docs/how-to/models.md. The scan
is in float32 whatever the model.

The task: name the symbol of six steps ago, with an update every five steps.

Shapes: `T` steps, `B` lanes.

References: T. Dao and A. Gu, Transformers are SSMs: generalized models and efficient algorithms
through structured state space duality, ICML (2024).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Mamba2Config, Mamba2ForCausalLM

import throughtime as tt

SYMBOLS, LAG = 4, 6
STRIDE, HORIZON = 5, 10
CONFIG = Mamba2Config(
    vocab_size=SYMBOLS,
    hidden_size=16,
    num_hidden_layers=2,
    expand=2,
    num_heads=4,
    head_dim=8,
    state_size=8,
    n_groups=1,
    chunk_size=8,
)


class Mamba(nn.Module):
    """Symbols `(T, B)` to scores `(T, B, SYMBOLS)`.

    The state is, for each layer, the window of its convolution and its memory.
    """

    def __init__(self, config: Mamba2Config = CONFIG) -> None:
        super().__init__()
        self.model = Mamba2ForCausalLM(config)

    def initial_state(self, lanes: int) -> list[dict[str, Any]]:
        """Zeros for every layer."""
        config, weight = self.model.config, self.model.lm_head.weight
        channels = config.expand * config.hidden_size + 2 * config.n_groups * config.state_size
        return [
            {
                "window": weight.new_zeros(lanes, channels, config.conv_kernel),
                "memory": weight.new_zeros(
                    lanes, config.num_heads, config.head_dim, config.state_size
                ),
            }
            for _ in range(config.num_hidden_layers)
        ]

    def forward(
        self, symbols: Tensor, state: list[dict[str, Any]]
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        """Scores for every step, and the state after the last."""
        cache = DynamicCache(config=self.model.config)
        for layer, held in enumerate(state):
            cache.update_conv_state(held["window"], layer)
            cache.update_recurrent_state(held["memory"], layer)
        with _saving_copies() if len(symbols) == 1 else nullcontext():
            scores = self.model(
                input_ids=symbols.transpose(0, 1), cache_params=cache, use_cache=True
            ).logits
        after = [
            {"window": cache.get_conv_state(i), "memory": cache.get_recurrent_state(i)}
            for i in range(len(state))
        ]
        return scores.transpose(0, 1), after


def _saving_copies() -> AbstractContextManager[None]:
    """What a gradient needs is saved as a copy, before the library writes over it."""
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)


def recordings(count: int, steps: int) -> list[dict[str, Any]]:
    """Random symbols; the target is the symbol `LAG` steps ago, -100 in the first `LAG` steps."""
    symbols = torch.randint(SYMBOLS, (count, steps))
    targets = symbols.roll(LAG, dims=1)
    targets[:, :LAG] = -100
    return [{"inputs": s, "targets": t} for s, t in zip(symbols, targets, strict=True)]


def main(updates: int = 120) -> float:
    """Trains, and returns the mean loss of the last twenty updates."""
    torch.manual_seed(0)
    net = tt.carry(Mamba())
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
    print(f"Mamba-2: {found:.3f} nats after {len(losses)} updates; guessing costs 1.386")
    return found


if __name__ == "__main__":
    main()
