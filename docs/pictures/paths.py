"""Which step the gradient of which loss reaches, measured with the policies of the library."""

import torch
from docs.pictures.frame import MARGIN, WIDTH, label, picture
from docs.pictures.svg import colour, short

import throughtime as tt
from throughtime.gradient import Policy

STEPS, CELL, TOP = 12, 13, 98
POLICIES: tuple[tuple[str, Policy], ...] = (
    ("k1 = k2 = 4", tt.Truncated(stride=4)),
    ("k1 = 4, k2 = 8", tt.Truncated(stride=4, horizon=8)),
    ("exact", tt.Exact()),
)


class OnePerStep(torch.nn.Module):
    """A net whose every step has a weight of its own, whose gradient says that it was reached."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.each = torch.nn.Linear(steps, 4, bias=False)
        self.recurrent, self.readout = torch.nn.GRU(4, 4), torch.nn.Linear(4, 1)

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, state = self.recurrent(self.each(x), state)
        return self.readout(y), state


def reached(policy: Policy, steps: int = STEPS) -> list[list[bool]]:
    """For the loss of each step, whether its gradient reaches each step."""
    torch.manual_seed(0)
    net = tt.carry(OnePerStep(steps).double())
    rows: list[list[bool]] = []
    for step in range(steps):
        targets = torch.full((steps, 1), torch.nan, dtype=torch.float64)
        targets[step] = 1.0
        recording = {"inputs": torch.eye(steps, dtype=torch.float64), "targets": targets}
        stream = tt.Stream(recording, lanes=1, chunk=steps, dtype=torch.float64)
        net.zero_grad()
        for _ in tt.updates(net, stream, torch.nn.MSELoss(), gradient=policy):
            pass
        grad = next(p.grad for name, p in net.named_parameters() if "each" in name)
        rows.append([] if grad is None else (grad != 0).any(0).tolist())
    return rows


def draw() -> dict[str, str]:
    """A matrix for each policy."""
    pitch = (WIDTH - 2 * MARGIN - STEPS * CELL) / (len(POLICIES) - 1)
    soft, bottom = 'class="soft"', TOP + STEPS * CELL
    body = [label(MARGIN, 62, "A row is a loss, a column a step that its gradient reaches.", soft)]
    for i, (name, policy) in enumerate(POLICIES):
        left = MARGIN + i * pitch
        body.append(label(left, 90, name, 'class="bold"') + _matrix(left, reached(policy)))
    body += [
        label(MARGIN, bottom + 24, "Pale: cut. With k1 = k2, the first loss after each cut", soft),
        label(MARGIN, bottom + 48, "reaches one step. Time goes right and down.", soft),
    ]
    description = (
        "With k1 = k2 the first loss after every cut reaches its own step alone. With k2 > k1 every"
        " loss reaches at least k2 - k1 + 1 steps. The exact gradient reaches all earlier steps."
    )
    svg = picture(bottom + 66, "Which paths truncation cuts", description, body)
    return {"paths.svg": svg}


def _matrix(left: float, rows: list[list[bool]]) -> str:
    """The cells of the losses and of the steps before them."""
    paths = {True: "", False: ""}
    for loss, cells in enumerate(rows):
        for step in range(loss + 1):
            x, y = short(left + step * CELL), short(TOP + loss * CELL)
            paths[cells[step]] += f"M{x} {y}h11v11h-11z"
    return "".join(
        f'<path d="{path}" style="fill:{colour(0) if hit else "var(--line)"}"/>'
        for hit, path in paths.items()
    )
