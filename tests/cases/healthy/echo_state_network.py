"""A reservoir with fixed random weights and plain matrices runs through the series; its readout is
solved in closed form, on states that no graph holds.
"""

import torch


def reservoir(u, inner, outer, x):
    states = torch.empty(len(u), len(x))
    for t, value in enumerate(u):
        x = 0.7 * x + 0.3 * torch.tanh(inner @ x + outer * value)
        states[t] = x
    return states, x


def main():
    torch.manual_seed(2124)
    n = 30
    W, U = torch.randn(n, n), torch.rand(n) - 0.5
    W *= 0.9 / torch.linalg.eigvals(W).abs().max()
    time = torch.arange(400) / 8
    series = torch.sin(time) + torch.sin(1.7 * time) / 2
    x, blocks = torch.zeros(n), []
    for chunk in series[:300].split(50):
        states, x = reservoir(chunk, W, U, x)
        blocks.append(states)
    S = torch.cat(blocks)[30:]
    target = series[31:301]
    readout = torch.linalg.solve(S.t() @ S + 1e-4 * torch.eye(n), S.t() @ target)
    ahead, _ = reservoir(series[300:399], W, U, x)
    print((ahead @ readout - series[301:]).square().mean().item())


if __name__ == "__main__":
    main()
