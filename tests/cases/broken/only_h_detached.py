"""Of the LSTM's pair (h, c) only h is detached; the cell state still hangs on the chunk before."""

# raises: second time

import torch


def main():
    torch.manual_seed(4)
    B, T, K = 3, 60, 10
    lstm = torch.nn.LSTM(input_size=2, hidden_size=9, num_layers=2, batch_first=True)
    head = torch.nn.Linear(9, 2)
    params = list(lstm.parameters()) + list(head.parameters())
    opt = torch.optim.AdamW(params, lr=2e-3)

    data = torch.stack([torch.sin(torch.linspace(0, 20 + b, T + 1)) for b in range(B)])
    data = torch.stack([data, data.roll(4, 1)], dim=-1)

    h = torch.zeros(2, B, 9)
    c = torch.zeros(2, B, 9)
    for t0 in range(0, T, K):
        h = h.detach()
        out, (h, c) = lstm(data[:, t0 : t0 + K], (h, c))  # <- TT101
        loss = torch.nn.functional.smooth_l1_loss(head(out), data[:, t0 + 1 : t0 + K + 1])
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        print(t0, round(loss.item(), 4))


if __name__ == "__main__":
    main()
