"""Loops that fail: graphs that are gone, values changed in place."""

import lightning as L
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def actor_and_critic_apart():
    """The losses of actor and critic go backward one after the other through the GRU that both
    share; the first frees its graph.
    """
    # raises: second time
    torch.manual_seed(1010)
    trunk, pi, v = nn.GRU(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*trunk.parameters(), *pi.parameters(), *v.parameters()], lr=3e-4)
    observations = torch.randn(80, 4, 3).cumsum(0) / 8
    actions = torch.randint(2, (80, 4))
    returns = torch.randn(80, 4).cumsum(0) / 8
    memory = torch.zeros(1, 4, 8)
    for i in range(0, 80, 16):
        features, memory = trunk(observations[i : i + 16], memory.detach())
        value = v(features).squeeze(-1)
        advantage = returns[i : i + 16] - value
        log_prob = -nn.functional.cross_entropy(
            pi(features).flatten(0, 1), actions[i : i + 16].flatten(), reduction="none"
        )
        actor_loss = -(log_prob * advantage.detach().flatten()).mean()
        critic_loss = advantage.pow(2).mean()
        optimizer.zero_grad()
        actor_loss.backward()  # <- TT105
        critic_loss.backward()  # <- TT105
        optimizer.step()


def decayed_between_forward_and_backward():
    """The recurrent weights decay by hand before the backward that still needs them."""
    # raises: in-place
    torch.manual_seed(89)
    series = torch.randn(73, 2, 3).cumsum(0) / 6
    cell, head = nn.LSTMCell(3, 8), nn.Linear(8, 3)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
    h, c = torch.zeros(2, 8), torch.zeros(2, 8)
    for begin in range(0, 72, 12):
        h, c, loss = h.detach(), c.detach(), 0.0
        for t in range(begin, begin + 12):
            h, c = cell(series[t], (h, c))
            loss = loss + nn.functional.mse_loss(head(h), series[t + 1])
        with torch.no_grad():
            cell.weight_hh.mul_(0.999)  # <- TT103
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Forecaster(nn.Module):
    def __init__(self, size=9):
        super().__init__()
        self.lstm = nn.LSTM(1, size, batch_first=True)
        self.proj = nn.Linear(size, 1)

    def forward(self, x, hidden):
        y, hidden = self.lstm(x, hidden)
        return self.proj(y), hidden


def detach_as_a_statement():
    """Both halves of the state are detached, but nothing takes the results: detach() changes
    nothing in place.
    """
    # raises: second time
    torch.manual_seed(1004)
    load = torch.sin(torch.linspace(0, 30, 201)).view(1, -1, 1) + 0.1 * torch.randn(1, 201, 1)
    net = Forecaster()
    optim = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    hidden = (torch.zeros(1, 1, 9), torch.zeros(1, 1, 9))
    for begin in range(0, 200, 25):
        x, y = load[:, begin : begin + 25], load[:, begin + 1 : begin + 26]
        hidden[0].detach()  # <- TT101
        hidden[1].detach()  # <- TT101
        forecast, hidden = net(x, hidden)  # <- TT101
        optim.zero_grad()
        loss = (forecast - y).abs().mean()
        loss.backward()
        optim.step()


class Feedback(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, u, y, hc):
        predictions = []
        for u_t in u.unbind(0):
            hc = self.cell(torch.cat([u_t, y], dim=-1), hc)  # <- TT101
            y = self.head(hc[0])
            predictions.append(y)
        return torch.stack(predictions), y, hc


def fed_back_prediction():
    """The recurrent state is detached, but the last prediction, fed back as an input of the next
    chunk, is not.
    """
    # raises: second time
    torch.manual_seed(9)
    u = torch.randn(90, 2, 2).cumsum(0) * 0.05
    goal = (u[..., :1] - u[..., 1:]).tanh()
    net = Feedback()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    y, hc = torch.zeros(2, 1), (torch.zeros(2, 8), torch.zeros(2, 8))
    for u_chunk, goal_chunk in zip(u.chunk(9), goal.chunk(9)):
        hc = (hc[0].detach(), hc[1].detach())
        predictions, y, hc = net(u_chunk, y, hc)  # <- TT101
        loss = nn.functional.l1_loss(predictions, goal_chunk)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.3f}")


class Tagger2(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(16, 4)

    def forward(self, sentence):
        return self.tags(self.lstm(self.emb(sentence))[0])


def five_steps_on_one_loss():
    """The loss of a batch is computed once and sent backward five times, to "fit each
    batch well".
    """
    # raises: second time
    torch.manual_seed(1011)
    sentences = torch.randint(20, (24, 9))
    loader = DataLoader(TensorDataset(sentences, sentences % 4), batch_size=8, shuffle=True)
    tagger = Tagger2()
    optimizer = torch.optim.SGD(tagger.parameters(), lr=0.1)
    for sentence, tag in loader:
        scores = tagger(sentence)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tag.flatten())
        for _ in range(5):
            optimizer.zero_grad()
            loss.backward()  # <- TT105
            optimizer.step()


def step(parameters, x, h):
    wx, wh, wy = parameters
    h = torch.tanh(x @ wx + h @ wh)
    return h @ wy, h


def functional_updates_retained():
    """The parameters are replaced after each chunk and never changed, so retain_graph=True raises
    nothing, and every backward runs through all chunks before.
    """
    torch.manual_seed(1029)
    shapes = ((2, 8), (8, 8), (8, 2))
    parameters = [(torch.randn(s) / 3).requires_grad_() for s in shapes]
    walk = torch.randn(101, 3, 2).cumsum(0) / 10
    h = torch.zeros(3, 8)
    for begin in range(0, 100, 10):
        loss = torch.zeros(())
        for t in range(begin, begin + 10):
            y, h = step(parameters, walk[t], h)  # <- TT102
            loss = loss + (y - walk[t + 1]).square().mean()
        loss.backward(retain_graph=True)  # <- TT102
        parameters = [(p.detach() - 0.02 * p.grad).requires_grad_() for p in parameters]
        print(begin, loss.item())


def ignite_state_on_the_engine():
    """Ignite: the state lives on engine.state and enters the next iteration with its graph."""
    # raises: second time
    torch.manual_seed(61)
    gru, head = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    walk = torch.randn(101, 3, 2).cumsum(0) / 10

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        out, engine.state.hidden = gru(x, engine.state.hidden)  # <- TT101
        loss = nn.functional.mse_loss(head(out), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)

    @trainer.on(Events.EPOCH_STARTED)
    def reset(engine):
        engine.state.hidden = torch.zeros(1, 3, 8)

    trainer.run(list(zip(walk[:-1].split(10), walk[1:].split(10))), max_epochs=1)


class Updater:
    def __init__(self, model, optimizer, loss_fn):
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.state = None

    def __call__(self, engine, batch):
        self.model.train()
        self.optimizer.zero_grad()
        prediction, self.state = self.model(batch["x"], self.state)
        loss = self.loss_fn(prediction, batch["y"])
        loss.backward(retain_graph=True)  # <- TT102
        self.optimizer.step()
        return loss.item()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 8, batch_first=True)
        self.fc = nn.Linear(8, 1)

    def forward(self, x, state):
        y, state = self.lstm(x, state)
        return self.fc(y), state


def ignite_step_under_a_retained_graph():
    """Ignite: retain_graph=True in the update function, and the optimizer steps under the graph
    that it keeps.
    """
    # raises: in-place
    torch.manual_seed(62)
    model = Model()
    wave = torch.sin(torch.arange(101) * 0.3).view(1, -1, 1)
    batches = [{"x": wave[:, i : i + 10], "y": wave[:, i + 1 : i + 11]} for i in range(0, 100, 10)]
    update = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    Engine(update).run(batches, max_epochs=1)


def label_one_chunk_late():
    """The label of a chunk arrives one chunk later: its loss is sent back after another step has
    changed the weights.
    """
    # raises: in-place
    torch.manual_seed(1303)
    visits = torch.sin(torch.arange(121).view(-1, 1, 1) * (0.1 + torch.rand(1, 4, 3)))
    rnn, bought = nn.GRU(3, 8), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *bought.parameters()], lr=1e-3)
    h, waiting = torch.zeros(1, 4, 8), None
    for i in range(0, 120, 10):
        y, h = rnn(visits[i : i + 10], h.detach())
        if waiting is not None:
            label = (visits[i, :, :1] > 0).float()
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(waiting, label).backward()  # <- TT103
            optimizer.step()  # <- TT103
        waiting = bought(y[-1])


class Tagger3(L.LightningModule):
    def __init__(self, chunk=8):
        super().__init__()
        self.automatic_optimization = False
        self.chunk = chunk
        self.gru = torch.nn.GRU(2, 8, batch_first=True)
        self.classify = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y = batch
        pieces = list(zip(x.split(self.chunk, 1), y.split(self.chunk, 1)))
        h = None
        optimizer.zero_grad()
        for x_piece, y_piece in pieces:
            out, h = self.gru(x_piece, h)
            loss = F.cross_entropy(self.classify(out).flatten(0, 1), y_piece.flatten())
            self.manual_backward(loss / len(pieces), retain_graph=True)  # <- TT102
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def lightning_retained_graph():
    """Lightning, manual optimization: manual_backward(..., retain_graph=True) for every chunk of a
    batch, one step at its end.
    """
    L.seed_everything(53, verbose=False)
    x = torch.randn(4, 128, 2).cumsum(1) / 10
    loader = DataLoader(TensorDataset(x, (x.sum(-1) > 0).long()), batch_size=2)
    L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Tagger3(), loader)


class Forecast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 8, batch_first=True)
        self.head = nn.Linear(8, 1)
        self.hidden = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        out, self.hidden = self.lstm(x, self.hidden)  # <- TT101
        return nn.functional.mse_loss(self.head(out), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def lightning_state_with_graph():
    """Lightning, automatic optimization: self.hidden goes into the next training_step with the
    graph of this one.
    """
    # raises: second time
    L.seed_everything(52, verbose=False)
    series = torch.randn(101, 1).cumsum(0) / 10
    x, y = series[:-1].view(10, 10, 1), series[1:].view(10, 10, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=1, shuffle=False)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Forecast(), loader)


def init_params(n_in, n_hid):
    w_xh = torch.randn(n_in, n_hid) * 0.3
    w_hh = torch.eye(n_hid) * 0.9
    w_hy = torch.randn(n_hid, 1) * 0.3
    b_h = torch.zeros(n_hid)
    return [p.requires_grad_() for p in (w_xh, w_hh, w_hy, b_h)]


def run_chunk(params, inputs, h):
    w_xh, w_hh, w_hy, b_h = params
    outputs = []
    for x in inputs:
        h = torch.tanh(x @ w_xh + h @ w_hh + b_h)  # <- TT101
        outputs.append(h @ w_hy)
    return torch.stack(outputs), h


def matrices_by_hand():
    """A vanilla cell written with matrices: the last h of a chunk starts the next one without a
    cut.
    """
    # raises: second time
    torch.manual_seed(6)
    params = init_params(3, 10)
    inputs = torch.randn(72, 4, 3)
    targets = inputs.sum(-1, keepdim=True).cumsum(0).tanh()
    h = torch.zeros(4, 10)
    for k in range(6):
        window = slice(12 * k, 12 * k + 12)
        y, h = run_chunk(params, inputs[window], h)  # <- TT101
        loss = ((y - targets[window]) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            for p in params:
                p -= 0.01 * p.grad
                p.grad = None
        print(k, loss.item())


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


def memory_with_graph():
    """A Transformer-XL-like memory of the last hidden vectors is kept with its graph and attended
    to by the next segment.
    """
    # raises: second time
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


class Centred(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.features = nn.Linear(n_in, n)
        self.gru = nn.GRU(n, n)
        self.read = nn.Linear(n, n_in)
        self.mean = torch.zeros(n)

    def forward(self, x, h):
        f = self.features(x)
        self.mean = 0.95 * self.mean + 0.05 * f.mean((0, 1))  # <- TT101
        y, h = self.gru(f - self.mean, h)
        return self.read(y), h


def normalised_by_its_own_past():
    """The state of the GRU is detached. The running mean that the features are centred with is
    not, and it reaches back into every chunk before.
    """
    # raises: second time
    torch.manual_seed(1008)
    walk = torch.randn(101, 4, 2).cumsum(0) / 9
    model = Centred(2, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    h = torch.zeros(1, 4, 8)
    for x, y in zip(walk[:-1].split(20), walk[1:].split(20)):
        prediction, h = model(x, h)  # <- TT101
        h = h.detach()
        optimizer.zero_grad()
        nn.functional.mse_loss(prediction, y).backward()
        optimizer.step()


def retained_over_a_recording():
    """Gradients are gathered over a recording with retain_graph=True at every chunk: each backward
    runs through all chunks so far.
    """
    torch.manual_seed(12)
    recording = torch.randn(4, 161, 2).cumsum(1) / 10
    gru = nn.GRU(2, 8, batch_first=True)
    head = nn.Linear(8, 2)
    model = nn.ModuleList([gru, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(2):
        optimizer.zero_grad()
        h = torch.zeros(1, 4, 8)
        for start in range(0, 160, 10):
            x = recording[:, start : start + 10]
            y = recording[:, start + 1 : start + 11]
            out, h = gru(x, h)
            loss = nn.functional.mse_loss(head(out), y) / 16
            loss.backward(retain_graph=True)  # <- TT102
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(epoch, loss.item())


class Attentive(nn.Module):
    def __init__(self, n_in, n, slots):
        super().__init__()
        self.cell = nn.GRUCell(n_in + n, n)
        self.query, self.head = nn.Linear(n, n), nn.Linear(n, n_in)
        self.slots = slots

    def forward(self, x, h, ring):
        out = []
        for t, x_t in enumerate(x):
            weight = torch.einsum("bn,bsn->bs", self.query(h), ring).softmax(-1)
            context = torch.einsum("bs,bsn->bn", weight, ring)
            h = self.cell(torch.cat([x_t, context], -1), h)
            ring[:, t % self.slots] = h  # <- TT103
            out.append(self.head(h))
        return torch.stack(out), h, ring


def ring_buffer_rolled():
    """The last states stand in a ring buffer that attention reads at every step; the next state is
    written into the same tensor.
    """
    # raises: in-place
    torch.manual_seed(1031)
    model = Attentive(2, 8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    walk = torch.randn(81, 3, 2).cumsum(0) / 8
    h, ring = torch.zeros(3, 8), torch.zeros(3, 4, 8)
    for x, y in zip(walk[:-1].split(8), walk[1:].split(8)):
        out, h, ring = model(x, h.detach(), ring.detach())
        loss = nn.functional.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class ResettingCell(nn.Module):
    def __init__(self, n_in, n_hidden):
        super().__init__()
        self.i2h = nn.Linear(n_in, n_hidden)
        self.h2h = nn.Linear(n_hidden, n_hidden, bias=False)

    def forward(self, x, ended, h):
        hs = []
        for x_t, ended_t in zip(x, ended):
            h = torch.tanh(self.i2h(x_t) + self.h2h(h))
            hs.append(h.clone())
            h[ended_t] = 0.0  # <- TT103
        return torch.stack(hs), h


def rows_of_the_state_zeroed():
    """Lanes whose recording ended are reset by writing zeros into the state, which tanh needs for
    its gradient.
    """
    # raises: in-place
    torch.manual_seed(16)
    cell, head = ResettingCell(3, 6), nn.Linear(6, 1)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
    x = torch.randn(64, 4, 3)
    ended = torch.rand(64, 4) < 0.1
    h = torch.zeros(4, 6)
    for i in range(8):
        rows = slice(8 * i, 8 * i + 8)
        hs, h = cell(x[rows], ended[rows], h.detach())
        loss = (head(hs).squeeze(-1) - x[rows].sum(-1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class TwoLevel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fast = nn.LSTM(2, 8)
        self.slow = nn.LSTM(8, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x, states):
        y, fast = self.fast(x, states["fast"])
        y, slow = self.slow(y, states["slow"])  # <- TT101
        return self.out(y), {"fast": fast, "slow": slow}


def second_layer_not_detached():
    """Two layers keep their states in a dict, and only the first is detached between chunks."""
    # raises: second time
    torch.manual_seed(3)
    model = TwoLevel()
    optim = torch.optim.Adam(model.parameters())
    x = torch.randn(120, 5, 2).cumsum(0) / 8
    target = x.mean(-1, keepdim=True).roll(3, 0)

    states = {"fast": None, "slow": None}
    for step in range(10):
        sl = slice(12 * step, 12 * (step + 1))
        if states["fast"] is not None:
            states["fast"] = tuple(s.detach() for s in states["fast"])
        pred, states = model(x[sl], states)  # <- TT101
        loss = (pred - target[sl]).pow(2).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        if step % 5 == 0:
            print("step", step, "loss", loss.item())


def start_computed_once():
    """The initial state is computed from a context once, before the loop. Every sequence after the
    first reuses its freed graph.
    """
    # raises: second time
    torch.manual_seed(10)
    context = torch.randn(6, 4)
    sequences = [torch.randn(15, 6, 3) for _ in range(8)]

    start = nn.Sequential(nn.Linear(4, 10), nn.Tanh())
    gru = nn.GRU(3, 10)
    score = nn.Linear(10, 3)
    optimizer = torch.optim.Adam(
        [*start.parameters(), *gru.parameters(), *score.parameters()], lr=1e-3
    )

    h0 = start(context).unsqueeze(0)
    for number, sequence in enumerate(sequences):
        features, _ = gru(sequence[:-1], h0)
        loss = (score(features) - sequence[1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()  # <- TT105
        optimizer.step()
        print(number, loss.item())


def unroll(cell, x, h0):
    steps, batch, _ = x.shape
    states = torch.zeros(steps + 1, batch, cell.hidden_size)
    states[0] = h0
    for t in range(steps):
        states[t + 1] = cell(x[t], states[t])  # <- TT103
    return states[1:]


def states_written_into_one_tensor():
    """All states of a chunk are written into one tensor. Every write changes what the steps before
    were computed from.
    """
    # raises: in-place
    torch.manual_seed(17)
    cell = nn.GRUCell(2, 5)
    head = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(list(cell.parameters()) + list(head.parameters()), lr=0.1)
    walk = torch.randn(61, 3, 2).cumsum(0) * 0.1
    h = torch.zeros(3, 5)
    for k in range(6):
        states = unroll(cell, walk[10 * k : 10 * k + 10], h)
        h = states[-1].detach().clone()
        loss = nn.functional.mse_loss(head(states), walk[10 * k + 1 : 10 * k + 11])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def vector_state_by_hand():
    """A recurrence written with matrices on plain vectors, without an axis for lanes. The last H
    of a stretch begins the next one, graph and all.
    """
    # raises: second time
    torch.manual_seed(1002)
    n, m = 7, 2
    W = (0.5 * torch.randn(n, m)).requires_grad_()
    U = (0.3 * torch.randn(n, n)).requires_grad_()
    V = (0.5 * torch.randn(m, n)).requires_grad_()
    opt = torch.optim.SGD([W, U, V], lr=0.01)
    series = torch.randn(97, m).cumsum(0) / 8
    H = torch.zeros(n)
    k = 12
    for start in range(0, 96, k):
        err = 0.0
        for t in range(start, start + k):
            H = torch.tanh(W @ series[t] + U @ H)  # <- TT101
            err = err + (V @ H - series[t + 1]).square().mean()
        opt.zero_grad()
        err.backward()
        opt.step()
        print(start, err.item())
