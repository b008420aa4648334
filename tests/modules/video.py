"""Video: convolutional cells in loops, frames folded into the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Case, chunked, floats, swap

FRAME = (2, 5, 3)


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


CASES = [
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
