"""Loops whose memory grows, or whose states and gradients are not what they seem."""

import lightning as L
import torch
from ignite.engine import Engine, EventEnum, Events
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, head):
        self.model, self.head = model, head
        self.optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-3)
        self.hidden = None

    def step(self, x, y):
        self.optimizer.zero_grad()
        out, hidden = self.model(x, self.hidden)
        self.hidden = hidden.detach()
        loss = nn.functional.l1_loss(self.head(out), y)
        self.optimizer.step()  # <- TT304
        return loss.item()


def backward_forgotten():
    """A training step with everything except loss.backward()."""
    torch.manual_seed(1026)
    trainer = Trainer(nn.GRU(2, 8), nn.Linear(8, 2))
    path = torch.randn(121, 2, 2).cumsum(0) / 9
    for i in range(0, 120, 15):
        print(i, trainer.step(path[i : i + 15], path[i + 1 : i + 16]))  # <- TT304


def cleared_at_every_part():
    """The gradients of four chunks shall make one step, but they are cleared before each of the
    four: only the last one counts.
    """
    torch.manual_seed(1023)
    lstm, head = nn.LSTM(3, 8), nn.Linear(8, 1)
    params = list(lstm.parameters()) + list(head.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    accumulate = 4
    x = torch.randn(160, 2, 3).cumsum(0) / 10
    y = x.pow(2).sum(-1, keepdim=True).sqrt()
    state = None
    for i, (xb, yb) in enumerate(zip(x.split(10), y.split(10))):
        optimizer.zero_grad()  # <- TT302
        out, state = lstm(xb, state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.mse_loss(head(out), yb) / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()  # <- TT302
            print(i, loss.item() * accumulate)


class Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(2, 8)
        self.fc = nn.Linear(8, 2)

    def forward(self, x, hc):
        ys = []
        for t in range(len(x)):
            hc = self.cell(x[t], hc)
            ys.append(self.fc(hc[0]))
        return torch.stack(ys), tuple(s.detach() for s in hc)


def gradients_never_cleared():
    """Nobody ever calls zero_grad: every step uses the sum of all gradients so far."""
    torch.manual_seed(46)
    model = Seq()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    walk = torch.randn(97, 2, 2).cumsum(0) / 10
    hc = (torch.zeros(2, 8), torch.zeros(2, 8))
    for lo in range(0, 96, 8):
        y, hc = model(walk[lo : lo + 8], hc)
        loss = (y - walk[lo + 1 : lo + 9]).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()  # <- TT302


class Gradient(EventEnum):
    READY = "gradient_ready"


def ignite_cleared_by_the_wrong_event():
    """Ignite: zero_grad hangs on an event that fires between backward and step, so nothing is ever
    learnt.
    """
    torch.manual_seed(67)
    model = nn.ModuleDict({"gru": nn.GRU(2, 8), "fc": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def update(engine, batch):
        x, y = batch
        out, h = model["gru"](x, engine.state.h)
        engine.state.h = h.detach()
        loss = nn.functional.mse_loss(model["fc"](out), y)
        loss.backward()
        engine.fire_event(Gradient.READY)
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    trainer.register_events(*Gradient)

    @trainer.on(Events.STARTED)
    def begin(engine):
        engine.state.h = torch.zeros(1, 2, 8)

    @trainer.on(Gradient.READY)
    def clear(engine):
        optimizer.zero_grad()  # <- TT302

    x = torch.randn(100, 2, 2).cumsum(0) / 10
    trainer.run(list(zip(x.split(10), x.mean(-1, keepdim=True).split(10))), max_epochs=1)


def build(model, optimizer):
    history, carried = [], {"h": torch.zeros(1, 2, 8)}

    def update(engine, batch):
        x, y = batch
        out, h = model.rnn(model.embed(x), carried["h"])
        carried["h"] = h.detach()
        loss = nn.functional.cross_entropy(model.fc(out).flatten(0, 1), y.flatten())  # <- TT104
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss)
        return loss.item()

    trainer = Engine(update)

    @trainer.on(Events.COMPLETED)
    def report(engine):
        print("average", sum(history).item() / len(history))

    return trainer


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.fc = nn.Embedding(7, 6), nn.RNN(6, 8), nn.Linear(8, 7)


def ignite_losses_kept():
    """Ignite: the update function keeps every chunk's loss tensor, graph and all, for an average
    at the end.
    """
    torch.manual_seed(68)
    ids = torch.randint(2, (131, 2)).cumsum(0) % 7
    model = CharModel()
    trainer = build(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.run(list(zip(ids[:-1].split(10), ids[1:].split(10))), max_epochs=1)


class LitRNN(L.LightningModule):
    def __init__(self, rnn, readout):
        super().__init__()
        self.rnn, self.readout = rnn, readout
        self.h = None
        self.losses = []

    def on_train_epoch_start(self):
        self.h = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat, h = self.rnn(x, self.h)
        self.h = h.detach()
        loss = (self.readout(y_hat) - y).pow(2).mean()  # <- TT104
        self.losses.append(loss)
        return loss

    def on_train_epoch_end(self):
        print("mean", torch.stack(self.losses).mean().item())
        self.losses.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def lightning_losses_in_a_list():
    """Lightning: training_step keeps every loss with its graph for a mean at the end
    of the epoch.
    """
    L.seed_everything(54, verbose=False)
    lanes = torch.randn(2, 121, 1).cumsum(1) / 10
    pairs = [(lanes[:, i : i + 10], lanes[:, i + 1 : i + 11]) for i in range(0, 120, 10)]
    x, y = torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitRNN(nn.RNN(1, 8, batch_first=True), nn.Linear(8, 1)), loader)


def one_of_two_cleared_twice():
    """Encoder and decoder have an optimizer each; the encoder's gradients are cleared twice, the
    decoder's never.
    """
    torch.manual_seed(1302)
    encoder, decoder = nn.GRU(2, 8), nn.GRU(2, 8)
    head = nn.Linear(8, 2)
    of_encoder = torch.optim.SGD(encoder.parameters(), lr=0.05)
    of_decoder = torch.optim.SGD([*decoder.parameters(), *head.parameters()], lr=0.05)
    for _ in range(12):
        curve = torch.sin(torch.arange(24).view(-1, 1, 1) * (0.3 + torch.rand(1, 5, 2)))
        _, context = encoder(curve[:16])
        out, _ = decoder(curve[15:-1], context)
        loss = nn.functional.mse_loss(head(out), curve[16:])
        of_encoder.zero_grad()
        of_encoder.zero_grad()
        loss.backward()
        of_encoder.step()
        of_decoder.step()  # <- TT302


def train(core, head, tokens, chunk):
    core_optimizer = torch.optim.SGD(core.parameters(), lr=0.01)
    head_optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
    h = torch.zeros(1, tokens.shape[1], 12)
    for k in range((len(tokens) - 1) // chunk):
        x, y = tokens[k * chunk : (k + 1) * chunk], tokens[k * chunk + 1 : (k + 1) * chunk + 1]
        out, h = core(nn.functional.one_hot(x, 6).float(), h)
        h = h.detach()
        loss = nn.functional.cross_entropy(head(out).flatten(0, 1), y.flatten())
        head_optimizer.zero_grad()
        loss.backward()
        core_optimizer.step()  # <- TT302
        head_optimizer.step()
        print(k, loss.item())


def only_the_head_is_cleared():
    """Two optimizers step at every chunk, but only the head's gradients are cleared. Those of the
    core pile up.
    """
    torch.manual_seed(47)
    tokens = torch.randint(2, (121, 4)).cumsum(0) % 6
    train(nn.GRU(6, 12), nn.Linear(12, 6), tokens, chunk=10)


class Labeller(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTMCell(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, frames, state):
        logits = []
        for frame in frames.unbind(1):
            state = self.lstm(frame, state)
            logits.append(self.head(state[0]))
        return torch.stack(logits, dim=1), state  # <- TT104


def outputs_kept_for_the_accuracy():
    """The outputs of all chunks are kept with their graphs, to compute an accuracy at the end of
    the epoch.
    """
    torch.manual_seed(20)
    frames = torch.randn(5, 100, 2).cumsum(1) / 4
    labels = (frames[..., 0] > 0).long() + (frames[..., 1] > 0).long()
    model = Labeller()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    outputs = []
    state = (torch.zeros(5, 8), torch.zeros(5, 8))
    for x, y in zip(frames.split(10, dim=1), labels.split(10, dim=1)):
        state = tuple(s.detach() for s in state)
        logits, state = model(x, state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs.append(logits)
    accuracy = (torch.cat(outputs, dim=1).argmax(-1) == labels).float().mean()
    print(f"accuracy {accuracy:.3f}")


def rows_of_results():
    """One dict a chunk is appended to a report, with the loss and its graph."""
    torch.manual_seed(0)
    gru, head = nn.GRU(4, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*gru.parameters(), *head.parameters()], lr=0.01)
    stream = torch.randn(161, 2, 4).cumsum(0) / 10
    rows, h = [], None
    for i in range(0, 160, 16):
        y, h = gru(stream[i : i + 16], h)
        h = h.detach()
        loss = (head(y)[..., 0] - stream[i + 1 : i + 17, :, 0]).square().mean()  # <- TT104
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append({"chunk": i, "loss": loss})
    print(sum(row["loss"] for row in rows).item())


class Model(nn.Module):
    def __init__(self, vocab=13):
        super().__init__()
        self.emb = nn.Embedding(vocab, 6)
        self.rnn = nn.GRU(6, 12, batch_first=True)
        self.fc = nn.Linear(12, vocab)

    def forward(self, x, h=None):
        y, h = self.rnn(self.emb(x), h)
        return self.fc(y), h


def train_2(model, tokens, optimizer, criterion, seq_len=9):
    model.train()
    running_loss, h, batches = 0.0, None, 0
    for i in range(0, tokens.size(1) - 1, seq_len):
        x, y = tokens[:, i : i + seq_len], tokens[:, i + 1 : i + 1 + seq_len]
        if h is not None:
            h = h.detach()
        logits, h = model(x, h)
        loss = criterion(logits.transpose(1, 2), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running_loss += loss  # <- TT104
        batches += 1
    return running_loss / batches


def running_loss_with_graph():
    """The running loss for the log is summed as tensors, so that every chunk's graph stays
    reachable from it.
    """
    torch.manual_seed(19)
    model = Model()
    tokens = torch.randint(13, (4, 14 * 9 + 1))
    average = train_2(model, tokens, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss())
    print("train loss", average.item())


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.action = nn.GRUCell(4, 8), nn.Linear(8, 3)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, observation, h):
        h = self.rnn(observation, h)
        return Categorical(logits=self.action(h)), h


def run_episode(policy):
    h = torch.zeros(1, 8)
    for observation in torch.randn(12, 1, 4):
        choice, h = policy(observation, h)
        action = choice.sample()
        policy.saved_log_probs.append(choice.log_prob(action))  # <- TT104
        policy.rewards.append(float(action == observation[0, :3].argmax()))


def finish_episode(policy, optimizer):
    returns = torch.tensor(policy.rewards)
    returns = returns - returns.mean()
    loss = -(torch.cat(policy.saved_log_probs) * returns).sum()  # <- TT104
    optimizer.zero_grad()
    loss.backward()  # <- TT104
    optimizer.step()


def saved_log_probs_never_emptied():
    """REINFORCE with a recurrent policy: the list of log-probabilities is not emptied after an
    episode, so the next loss contains the last one again.
    """
    # raises: second time
    torch.manual_seed(1009)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(6):
        run_episode(policy)
        finish_episode(policy, optimizer)


def total_loss_backward_at_every_chunk():
    """The loss is summed over the chunks and the sum so far is sent backward at every chunk."""
    # raises: second time
    torch.manual_seed(18)
    net = nn.ModuleDict({"rnn": nn.GRU(1, 8), "out": nn.Linear(8, 1)})
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    time = torch.linspace(0, 12, 121)
    signal = torch.stack([torch.sin(time), torch.cos(time)], dim=1).unsqueeze(-1)
    h, total_loss = None, 0
    for i in range(12):
        x, y = signal[10 * i : 10 * i + 10], signal[10 * i + 1 : 10 * i + 11]
        out, h = net["rnn"](x, h)
        h = h.detach()
        total_loss = total_loss + nn.functional.mse_loss(net["out"](out), y)  # <- TT104
        optimizer.zero_grad()
        total_loss.backward()  # <- TT104
        optimizer.step()
    print("mean loss", total_loss.item() / 12)


def zero_grad_before_step():
    """zero_grad stands between backward and step: the optimizer never sees a gradient."""
    torch.manual_seed(45)
    gru, head = nn.GRU(2, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*gru.parameters(), *head.parameters()], lr=0.1)
    x = torch.randn(100, 3, 2).cumsum(0) / 10
    y = x.sum(-1, keepdim=True).tanh()
    h = torch.zeros(1, 3, 8)
    for i in range(10):
        out, h = gru(x[10 * i : 10 * i + 10], h.detach())
        loss = nn.functional.mse_loss(head(out), y[10 * i : 10 * i + 10])
        loss.backward()
        optimizer.zero_grad()  # <- TT302
        optimizer.step()
        print(i, loss.item())
