"""A Transformer-XL memory: hidden vectors of the segments before, kept without a graph and carried
from segment to segment.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.kv, self.proj = (
            nn.Linear(dim, dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(dim, dim),
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, mem):
        context = torch.cat([mem, x], dim=1)
        k, v = self.kv(context).chunk(2, -1)
        visible = torch.ones(x.size(1), context.size(1), dtype=torch.bool).tril(mem.size(1))
        return self.norm(
            x + self.proj(F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=visible))
        )


class TransformerXL(nn.Module):
    def __init__(self, vocab, dim=16, layers=2, mem_len=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)
        self.dim, self.mem_len = dim, mem_len

    def init_mems(self, batch):
        return [torch.zeros(batch, 0, self.dim) for _ in self.layers]

    def forward(self, tokens, mems):
        x, new_mems = self.embed(tokens), []
        for layer, mem in zip(self.layers, mems):
            with torch.no_grad():
                new_mems.append(torch.cat([mem, x], dim=1)[:, -self.mem_len :])
            x = layer(x, mem)
        return self.head(x), new_mems


def main():
    torch.manual_seed(102)
    tokens = torch.randint(3, (2, 81)).cumsum(1) % 9
    model = TransformerXL(9)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    mems = model.init_mems(2)
    for i in range(0, 80, 8):
        logits, mems = model(tokens[:, i : i + 8], mems)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, i + 1 : i + 9].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


if __name__ == "__main__":
    main()
