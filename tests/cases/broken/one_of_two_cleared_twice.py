"""Encoder and decoder have an optimizer each; the encoder's gradients are cleared twice, the
decoder's never.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(1302)
    encoder, decoder = nn.GRU(2, 8), nn.GRU(2, 8)
    head = nn.Linear(8, 2)
    of_encoder = torch.optim.SGD(encoder.parameters(), lr=0.05)
    of_decoder = torch.optim.SGD([*decoder.parameters(), *head.parameters()], lr=0.05)
    for _ in range(12):
        curve = torch.sin(torch.arange(24).view(-1, 1, 1) * (0.3 + torch.rand(1, 5, 2)))
        _, context = encoder(curve[:16])
        out, _ = decoder(curve[15:-1], context)
        loss = nn.functional.mse_loss(head(out), curve[16:])
        of_encoder.zero_grad()
        of_encoder.zero_grad()
        loss.backward()
        of_encoder.step()
        of_decoder.step()  # <- TT302


if __name__ == "__main__":
    main()
