"""Chunks of running texts are packed in the order of their lengths, another one each time; the
states stay in the order of the chunk before.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

torch.manual_seed(0)
embed, lstm, head = nn.Embedding(20, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 20)
parameters = [*embed.parameters(), *lstm.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-3)
texts = torch.randint(20, (5, 200))
at, state = [0] * 5, None
for _ in range(8):
    lengths = torch.randint(5, 15, (5,)).tolist()
    order = sorted(range(5), key=lambda i: -lengths[i])
    longest = max(lengths)
    tokens = torch.stack([texts[i, at[i] : at[i] + longest + 1] for i in order])
    counts = torch.tensor([lengths[i] for i in order])
    packed = pack_padded_sequence(embed(tokens[:, :-1]), counts, batch_first=True)
    out, state = lstm(packed, state)  # <- TT206
    state = tuple(s.detach() for s in state)
    target = pack_padded_sequence(tokens[:, 1:], counts, batch_first=True).data
    loss = nn.functional.cross_entropy(head(out.data), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for i in order:
        at[i] += lengths[i]
