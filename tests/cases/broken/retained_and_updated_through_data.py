"""retain_graph=True silences the error, and updating through `.data` silences the next one: the
graph grows with every chunk.
"""

import torch
import torch.nn.functional as F


class Elman:
    def __init__(self, n_in, n_hidden, n_out):
        scale = n_hidden**-0.5
        self.wx = torch.empty(n_in, n_hidden).uniform_(-scale, scale).requires_grad_()
        self.wh = torch.empty(n_hidden, n_hidden).uniform_(-scale, scale).requires_grad_()
        self.wo = torch.empty(n_hidden, n_out).uniform_(-scale, scale).requires_grad_()

    def __call__(self, xs, h):
        ys = []
        for x in xs:
            h = (x @ self.wx + h @ self.wh).tanh()
            ys.append(h @ self.wo)
        return torch.stack(ys), h

    def sgd(self, lr):
        for p in (self.wx, self.wh, self.wo):
            p.data = p.data - lr * p.grad
            p.grad = None


def main():
    torch.manual_seed(13)
    ids = torch.randint(5, (97,)).cumsum(0) % 7
    onehot = F.one_hot(ids, 7).float().unsqueeze(1)
    net = Elman(7, 12, 7)
    h = torch.zeros(1, 12)
    for i in range(12):
        y, h = net(onehot[8 * i : 8 * i + 8], h)
        loss = F.cross_entropy(y.squeeze(1), ids[8 * i + 1 : 8 * i + 9])
        loss.backward(retain_graph=True)  # <- TT102
        net.sgd(0.1)
        print(i, f"{loss.item():.3f}")


if __name__ == "__main__":
    main()
