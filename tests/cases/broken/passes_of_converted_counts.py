"""The text is turned into one-hot vectors inside the model, and the state is made before the loop
over epochs: the end of the text enters its beginning, long after the first chunks.
"""

import torch
from torch import nn


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.guess = nn.RNN(9, 12), nn.Linear(12, 9)

    def forward(self, ids, state):
        y, state = self.rnn(nn.functional.one_hot(ids.T, 9).float(), state)  # <- TT208
        return self.guess(y), state


def main():
    torch.manual_seed(1301)
    text = torch.tensor([(i * i + i // 7) % 9 for i in range(601)])
    x, y = text[:-1].view(3, -1), text[1:].view(3, -1)
    model = Letters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = None
    for _ in range(2):
        for i in range(0, 200, 20):
            if state is not None:
                state.detach_()
            guess, state = model(x[:, i : i + 20], state)  # <- TT208
            loss = nn.functional.cross_entropy(guess.flatten(0, 1), y[:, i : i + 20].T.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
