"""throughtime's own loop: stream, carried state, horizon of two strides."""

import torch

import throughtime as tt


def main():
    torch.manual_seed(113)
    recordings = [
        {"inputs": torch.randn(n, 3), "targets": torch.randint(2, (n,))} for n in (90, 60, 75)
    ]
    stream = tt.Stream(recordings, lanes=2, chunk=15)
    net = tt.carry(torch.nn.Sequential(torch.nn.LSTM(3, 8), torch.nn.Linear(8, 2)))
    optimizer = torch.optim.Adam(net.parameters())
    for update in tt.updates(
        net, stream, torch.nn.CrossEntropyLoss(), gradient=tt.Truncated(stride=15, horizon=30)
    ):
        optimizer.step()
        optimizer.zero_grad()
        print(update.loss, update.steps)


if __name__ == "__main__":
    main()
