"""The state at the start of each chunk, on windows and on the stream."""

import torch
from docs.pictures.frame import ARROW_HEAD, MARGIN, WIDTH, arrow, beats, label, picture
from docs.pictures.svg import colour, rect, short

import throughtime as tt
from throughtime.stream import Stream

CHUNK, LENGTHS = 4, (16, 8)
GAP, HEIGHT = 22, 70


def resets(stream: Stream) -> list[bool]:
    """Whether each chunk of a lane starts from the initial state."""
    return [bool(chunk.resets[0, 0]) for chunk in stream]


def draw() -> dict[str, str]:
    """The chunks of two recordings, as windows and as a stream."""
    recordings = [{"inputs": torch.zeros(n, 1), "targets": torch.zeros(n)} for n in LENGTHS]
    layouts = (
        ("Windows: every one starts from zero", tt.windows(recordings, CHUNK), 1),
        ("Stream: the state is carried", recordings, 0),
    )
    body = [f"<defs>{ARROW_HEAD}</defs>"]
    for i, (text, data, series) in enumerate(layouts):
        stream = tt.Stream(data, lanes=1, chunk=CHUNK, seed=None)
        body.append(_layout(70 + 158 * i, text, resets(stream), series))
    body.append(
        label(
            MARGIN,
            382,
            "0: initial state. Arrow: the state of the chunk before.",
            'class="soft"',
        )
    )
    return {
        "resets.svg": picture(
            400,
            "What a network starts from",
            "Two recordings of four and two chunks. Cut into windows, every chunk starts from the"
            " initial state. As a stream, only the first chunk of each recording does; the others"
            " start from the state at the end of the chunk before.",
            body,
        )
    }


def _layout(top: float, text: str, starts: list[bool], series: int) -> str:
    """A row of chunks, each with a zero or an arrow before it."""
    width = (WIDTH - 2 * MARGIN - GAP * len(starts)) / len(starts)
    lefts = [MARGIN + GAP + i * (width + GAP) for i in range(len(starts))]
    base = top + 32
    parts = [label(MARGIN, top + 10, text, 'class="bold"')]
    for left, is_reset in zip(lefts, starts, strict=True):
        style = f'style="fill:{colour(series)}" fill-opacity=".14" rx="5"'
        parts.append(rect(left, base, width, HEIGHT, style))
        curve = beats(left, left + width, base + HEIGHT * 0.72, HEIGHT * 0.5, 1)
        line = f'fill="none" style="stroke:{colour(series)}" stroke-width="2"'
        parts.append(f'<path d="{curve}" {line} stroke-linejoin="round"/>')
        middle = base + HEIGHT / 2
        if is_reset:
            parts.append(
                label(
                    left - GAP / 2,
                    middle + 6,
                    "0",
                    'text-anchor="middle" class="bold" font-size="18"',
                )
            )
        else:
            parts.append(
                arrow(f"M{short(left - GAP + 2)} {short(middle)}h{GAP - 5}", "currentColor")
            )
    for number, length in enumerate(LENGTHS):
        first = sum(LENGTHS[:number]) // CHUNK
        last = first + length // CHUNK - 1
        middle = (lefts[first] + lefts[last] + width) / 2
        name = f"recording {number + 1}"
        parts.append(label(middle, base + HEIGHT + 22, name, 'text-anchor="middle" class="soft"'))
    return "".join(parts)
