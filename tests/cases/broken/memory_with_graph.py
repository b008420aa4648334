"""A Transformer-XL-like memory of the last hidden vectors is kept with its graph and attended to by
the next segment.
"""

# raises: second time

import torch
import torch.nn.functional as F
from torch import nn


class MemoryBlock(nn.Module):
    def __init__(self, dim, mem_len):
        super().__init__()
        self.q, self.kv, self.proj = (
            nn.Linear(dim, dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(dim, dim),
        )
        self.norm = nn.LayerNorm(dim)
        self.mem_len = mem_len

    def forward(self, x, mem=None):
        context = x if mem is None else torch.cat([mem, x], dim=1)  # <- TT101
        k, v = self.kv(context).chunk(2, dim=-1)
        offset = context.shape[1] - x.shape[1]
        mask = torch.ones(x.shape[1], context.shape[1], dtype=torch.bool).tril(offset)
        y = F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=mask)
        y = self.norm(x + self.proj(y))
        return y, torch.cat([context, y], dim=1)[:, -self.mem_len :]


def main():
    torch.manual_seed(7)
    vocab, dim, segment = 11, 16, 8
    tokens = torch.randint(vocab, (2, 8 * segment + 1))
    embed, block, head = (
        nn.Embedding(vocab, dim),
        MemoryBlock(dim, mem_len=12),
        nn.Linear(dim, vocab),
    )
    model = nn.ModuleList([embed, block, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    mem = None
    for s in range(8):
        src = tokens[:, s * segment : (s + 1) * segment]
        tgt = tokens[:, s * segment + 1 : (s + 1) * segment + 1]
        y, mem = block(embed(src), mem)  # <- TT101
        loss = F.cross_entropy(head(y).flatten(0, 1), tgt.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
