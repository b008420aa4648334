"""Every update makes new weights, which the module is called with; the state goes on."""

import torch
from torch import nn
from torch.func import functional_call


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 7), nn.Linear(7, 3)

    def forward(self, steps, h):
        guesses = []
        for step in steps:
            h = self.cell(step, h)
            guesses.append(self.head(h))
        return torch.stack(guesses), h


def main():
    torch.manual_seed(47)
    series = torch.randn(97, 2, 3).cumsum(0) / 8
    model, h = Forecaster(), torch.zeros(2, 7)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for begin in range(0, 96, 12):
        chunk, following = series[begin : begin + 12], series[begin + 1 : begin + 13]
        guesses, h = functional_call(model, weights, (chunk, h))
        loss = nn.functional.mse_loss(guesses, following)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        weights = {
            name: (weight - 0.05 * gradient).detach().requires_grad_()
            for (name, weight), gradient in zip(weights.items(), gradients)
        }
        h = h.detach()


if __name__ == "__main__":
    main()
