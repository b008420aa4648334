"""Video: convolutional cells in loops, frames folded into the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Case, chunked, floats, prefixes, stepped, swap

FRAME = (2, 5, 3)


class ConvLSTMCell(nn.Module):
    """The usual convolutional LSTM cell with init_hidden(batch, image size)."""

    def __init__(self, channels: int, maps: int) -> None:
        super().__init__()
        self.maps = maps
        self.gates = nn.Conv2d(channels + maps, 4 * maps, 3, padding=1)

    def forward(self, image: Tensor, state: tuple[Tensor, Tensor]):
        h, c = state
        enter, keep, leave, new = self.gates(torch.cat([image, h], dim=1)).chunk(4, dim=1)
        c = keep.sigmoid() * c + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * c.tanh(), c

    def init_hidden(self, batch_size: int, image_size: tuple[int, int]):
        like = self.gates.weight
        zeros = like.new_zeros(batch_size, self.maps, *image_size)
        return zeros, zeros.clone()


class ConvLSTM(nn.Module):
    """ConvLSTM-library style: (B, T, C, H, W), layers in a loop, last states in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([ConvLSTMCell(2, 3), ConvLSTMCell(3, 2)])

    def forward(self, clip: Tensor, hidden_state=None):
        if hidden_state is None:
            size = tuple(clip.shape[-2:])
            hidden_state = [cell.init_hidden(len(clip), size) for cell in self.cells]
        last = []
        for cell, state in zip(self.cells, hidden_state, strict=True):
            images = []
            for image in clip.unbind(1):
                state = cell(image, state)
                images.append(state[0])
            clip = torch.stack(images, dim=1)
            last.append(state)
        return clip, last


class ConvLSTMOutputs(nn.Module):
    """Precipitation-nowcasting style: states made in forward, only the frames come back."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = ConvLSTMCell(2, 3)
        self.head = nn.Conv2d(3, 1, 1)

    def forward(self, frames: Tensor) -> Tensor:
        batch, steps, _, height, width = frames.shape
        h, c = self.cell.init_hidden(batch, (height, width))
        outputs = []
        for t in range(steps):
            h, c = self.cell(frames[:, t], (h, c))
            outputs.append(self.head(h))
        return torch.stack(outputs, dim=1)


def _outputs_step(m: ConvLSTMOutputs, x: Tensor, state):
    if state is None:
        state = m.cell.init_hidden(len(x), tuple(x.shape[-2:]))
    state = m.cell(x, state)
    return m.head(state[0]), state


class ConvGRUFrame(nn.Module):
    """Video-restoration style: one frame and the last hidden map per call."""

    def __init__(self, channels: int = 2, hidden: int = 3) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(channels + hidden, 2 * hidden, 3, padding=1)
        self.candidate = nn.Conv2d(channels + hidden, hidden, 3, padding=1)
        self.out = nn.Conv2d(hidden, 1, 3, padding=1)

    def forward(self, frame: Tensor, h: Tensor | None = None):
        if h is None:
            b, _, height, width = frame.shape
            h = frame.new_zeros(b, self.hidden, height, width)
        z, r = torch.sigmoid(self.gates(torch.cat([frame, h], 1))).chunk(2, 1)
        new = torch.tanh(self.candidate(torch.cat([frame, r * h], 1)))
        h = (1 - z) * h + z * new
        return self.out(h), h


class FramesLSTM(nn.Module):
    """Action-recognition style: a CNN on frames folded into the batch, LSTM, last step."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten()
        )
        self.lstm = nn.LSTM(6, 7, batch_first=True)
        self.fc = nn.Linear(7, 4)

    def forward(self, clip: Tensor) -> Tensor:
        lanes, steps, *image = clip.shape
        seen = self.cnn(clip.view(lanes * steps, *image)).view(lanes, steps, -1)
        seen, _ = self.lstm(seen)
        return self.fc(seen[:, -1, :])


def _frames_step(m: FramesLSTM, x: Tensor, state):
    out, state = m.lstm(m.cnn(x)[:, None], state)
    return m.fc(out[:, 0]), state


class FramesConv3d(nn.Module):
    """Video style: a 3-d convolution over time and space before the LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 3, padding=1)
        self.lstm = nn.LSTM(30, 6, batch_first=True)
        self.fc = nn.Linear(6, 4)

    def forward(self, clip: Tensor) -> Tensor:
        x = torch.relu(self.conv(clip.transpose(1, 2))).transpose(1, 2)
        out, _ = self.lstm(x.flatten(2))
        return self.fc(out)


class FlowMemory(nn.Module):
    """Video style: the last frame is kept beside the hidden map, their difference is read."""

    def __init__(self, hidden: int = 3) -> None:
        super().__init__()
        self.hidden = hidden
        self.conv = nn.Conv2d(4 + hidden, hidden, 3, padding=1)
        self.out = nn.Conv2d(hidden, 2, 1)

    def init_state(self, x: Tensor):
        b, c, height, width = x.shape
        return x.new_zeros(b, c, height, width), x.new_zeros(b, self.hidden, height, width)

    def forward(self, x: Tensor, state=None):
        last, h = self.init_state(x) if state is None else state
        h = torch.tanh(self.conv(torch.cat([x, x - last, h], dim=1)))
        return self.out(h), (x, h)


CASES = [
    Case(
        "conv_lstm_list",
        ConvLSTM,
        floats(*FRAME),
        "carry",
        oracle=chunked(lambda m, x, s: (lambda y, s: (swap(y), s))(*m(swap(x), s))),
    ),
    Case(
        "conv_lstm_outputs",
        ConvLSTMOutputs,
        floats(*FRAME),
        "carry",
        oracle=stepped(_outputs_step),
        plain=lambda m, x: swap(m(swap(x))),
        note="own cell, state in forward's locals: by data flow through the cell only",
    ),
    Case(
        "conv_gru_frame",
        ConvGRUFrame,
        floats(*FRAME),
        "carry",
        oracle=stepped(lambda m, x, h: m(x, h)),
    ),
    Case(
        "clip_cnn_lstm_last",
        FramesLSTM,
        floats(*FRAME),
        "carry",
        oracle=stepped(_frames_step),
        plain=prefixes(lambda m, x: m(swap(x))),
    ),
    Case(
        "frame_difference",
        FlowMemory,
        floats(*FRAME),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s)),
        note="init_state takes a tensor, not a number",
    ),
    Case(
        "clip_conv3d",
        FramesConv3d,
        floats(*FRAME),
        "refuse",
        reason="convolution",
        also=("lookahead",),
        oracle=chunked(lambda m, x, _: (swap(m(swap(x))), None)),
        shows=("lookahead",),
    ),
]
