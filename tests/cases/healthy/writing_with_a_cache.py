"""A small transformer learns on random excerpts. Text is written under no_grad with a cache of keys
and values that grows with each letter.
"""

import torch
import torch.nn.functional as F
from torch import nn

TEXT = "peter piper picked a peck of pickled peppers " * 5
CHARS = sorted(set(TEXT))


class Model(nn.Module):
    def __init__(self, n=16, context=40):
        super().__init__()
        self.token, self.place = nn.Embedding(len(CHARS), n), nn.Embedding(context, n)
        self.qkv, self.mlp, self.out = (
            nn.Linear(n, 3 * n),
            nn.Linear(n, n),
            nn.Linear(n, len(CHARS)),
        )

    def forward(self, ids, cache=None):
        past = 0 if cache is None else cache[0].size(1)
        where = torch.arange(past, past + ids.size(1))
        x = self.token(ids) + self.place(where)
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.out(x + torch.relu(self.mlp(x))), (k, v)


@torch.no_grad()
def write(model, first, length):
    ids, cache, text = torch.tensor([[CHARS.index(first)]]), None, first
    for _ in range(length):
        logits, cache = model(ids, cache)
        ids = torch.multinomial(logits[:, -1].softmax(-1), 1)
        text += CHARS[ids.item()]
    return text


def main():
    torch.manual_seed(2126)
    ids = torch.tensor([CHARS.index(c) for c in TEXT])
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(12):
        at = torch.randint(len(ids) - 25, (4,))
        x = torch.stack([ids[i : i + 24] for i in at])
        y = torch.stack([ids[i + 1 : i + 25] for i in at])
        logits, _ = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 5:
            print(write(model, "p", 30))


if __name__ == "__main__":
    main()
