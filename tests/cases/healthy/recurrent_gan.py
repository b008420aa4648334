"""A GAN over short sequences: two optimizers, fresh noise for every batch, no state carried."""

import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, noise):
        return self.out(self.rnn(noise)[0])


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def main():
    torch.manual_seed(101)
    G, D = Generator(), Critic()
    g_opt = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    for i in range(10):
        phase = 6.28 * torch.rand(8, 1)
        real = torch.sin(torch.arange(12) * 0.5 + phase).unsqueeze(-1)
        fake = G(torch.randn(8, 12, 3))
        d_opt.zero_grad()
        d_loss = bce(D(real), torch.ones(8, 1)) + bce(D(fake.detach()), torch.zeros(8, 1))
        d_loss.backward()
        d_opt.step()
        g_opt.zero_grad()
        g_loss = bce(D(fake), torch.ones(8, 1))
        g_loss.backward()
        g_opt.step()
        print(i, d_loss.item(), g_loss.item())


if __name__ == "__main__":
    main()
