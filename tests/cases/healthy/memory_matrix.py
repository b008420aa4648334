"""A controller with an external memory that it erases and writes out of place; controller and
memory start anew with each copy task.
"""

import torch
from torch import nn


class NTM(nn.Module):
    def __init__(self, width=4, rows=6, n=12):
        super().__init__()
        self.controller = nn.LSTMCell(width + 1 + width, n)
        self.keys = nn.Linear(n, 2 * (width + 1))
        self.erase, self.add = nn.Linear(n, width), nn.Linear(n, width)
        self.out = nn.Linear(n + width, width)
        self.width, self.rows, self.n = width, rows, n
        self.register_buffer("bias", torch.randn(1, rows, width) * 0.1)

    def address(self, memory, key, strength):
        match = nn.functional.cosine_similarity(memory, key.unsqueeze(1), dim=-1)
        return (match * nn.functional.softplus(strength)).softmax(-1).unsqueeze(-1)

    def forward(self, inputs):
        lanes = inputs.size(1)
        memory = self.bias.expand(lanes, -1, -1)
        state = (torch.zeros(lanes, self.n), torch.zeros(lanes, self.n))
        read, outputs = torch.zeros(lanes, self.width), []
        for x in inputs:
            state = self.controller(torch.cat([x, read], -1), state)
            rk, rs, wk, ws = self.keys(state[0]).split([self.width, 1, self.width, 1], -1)
            w = self.address(memory, wk, ws)
            erase = torch.sigmoid(self.erase(state[0])).unsqueeze(1)
            memory = memory * (1 - w * erase) + w * self.add(state[0]).unsqueeze(1)
            read = (self.address(memory, rk, rs) * memory).sum(1)
            outputs.append(self.out(torch.cat([state[0], read], -1)))
        return torch.stack(outputs)


def main():
    torch.manual_seed(2125)
    ntm = NTM()
    optimizer = torch.optim.RMSprop(ntm.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(5):
        length = int(torch.randint(2, 6, ()))
        bits = torch.randint(2, (length, 3, 4)).float()
        inputs = torch.zeros(2 * length, 3, 5)
        inputs[:length, :, :4] = bits
        inputs[length, :, 4] = 1.0
        logits = ntm(inputs)[length:]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, bits)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(ntm.parameters(), 10.0)
        optimizer.step()


if __name__ == "__main__":
    main()
