"""The findings of the doctor: the codes, one finding, and the list of them."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from throughtime.doctor._frames import INDICES, SourceLine
from throughtime.errors import ConfigError, DiagnosisError

PAGES_URL = "https://github.com/throughtime/throughtime/blob/main/docs/reference/doctor"

CODES: dict[str, tuple[str, str]] = {
    "TT101": (
        "the state of an earlier chunk enters this one with its graph",
        (
            "between chunks: state = tt.state.detach(state), with its result assigned; for one"
            " tensor h = h.detach()"
        ),
    ),
    "TT102": (
        (
            "retain_graph=True hides that every backward runs through all earlier chunks: graph,"
            " memory and time grow"
        ),
        "loss.backward() without retain_graph, and state = tt.state.detach(state) between chunks",
    ),
    "TT103": (
        "a tensor that a later backward needs is changed in place",
        (
            "a new tensor: v = v + x instead of v += x, h = torch.where(reset, initial, h) instead"
            " of h[reset] = 0, a list and torch.stack(outputs) instead of outputs[t] = y"
        ),
    ),
    "TT104": (
        "losses or outputs of several chunks are kept together with their graphs",
        "keep values without their graph: total += loss.detach(), or outputs.append(y.detach())",
    ),
    "TT105": (
        "one graph is sent back twice",
        (
            "one backward for each forward pass: (loss1 + loss2).backward(), or the loss computed"
            " anew before each backward; the same graph twice on purpose needs retain_graph=True"
        ),
    ),
    "TT201": (
        (
            "every chunk starts from a zero state, or from one that stays the same, although it"
            " continues the previous chunk"
        ),
        (
            "return the state with the outputs and pass it to the next chunk: y, state = net(x,"
            " state), then state = tt.state.detach(state); where a trainer cuts its batches into"
            " chunks, a whole recording as one batch"
        ),
    ),
    "TT202": (
        "the state is carried with its graph and nothing frees it: the graph grows with the stream",
        (
            "with torch.no_grad(): around an evaluation or the sampling of a text; in training a"
            " backward for each chunk, then state = tt.state.detach(state); where one loss at the"
            " end of a long stream is all there is, tt.Exact"
        ),
    ),
    "TT203": (
        "the state is detached at every step, so gradients flow back a single step",
        (
            "pass the state itself from step to step, and detach it (or copy it by .data or NumPy)"
            " only between chunks, outside the loop over time"
        ),
    ),
    "TT204": (
        "the state of one recording enters the next",
        (
            "before each recording, set the state to what it was before the first one, such as"
            " zeros; where single lanes begin, h = torch.where(begins[:, None], 0, h), with a bool"
            " for each lane in begins"
        ),
    ),
    "TT205": (
        "the state goes from training into validation, or back",
        (
            "start validation from a state of its own, such as zeros, and go on afterwards with"
            " the one at which training stopped"
        ),
    ),
    "TT206": (
        "the rows of the state are not in the order of the rows of the inputs",
        (
            "keep h in one order of all lanes; for the rows of a chunk, a tensor of indices,"
            " y, new = net(x, h[rows]), then h = h.index_copy(0, rows, new.detach()); of a layer,"
            " h[:, rows] and h.index_copy(1, rows, new.detach())"
        ),
    ),
    "TT207": (
        "a state is carried between batches that are not consecutive in time",
        (
            "where batches are pieces of one recording, read them in order and without overlap:"
            " shuffle=False, or tt.Stream(recordings, lanes=..., chunk=...); where they are"
            " unrelated, such as reviews, videos or shuffled windows, start every batch from a new"
            " zero state, made in the loop"
        ),
    ),
    "TT208": (
        "the state at the end of the data enters their beginning in the next pass",
        (
            "a fresh state at the start of each pass: make it inside the loop over epochs, before"
            " the loop over chunks, or where the position goes back to the beginning"
        ),
    ),
    "TT209": (
        "batch and time are exchanged: the layer takes lanes for steps and steps for lanes",
        "batch_first=True in the layer for inputs (batch, time, features), otherwise without it",
    ),
    "TT210": (
        "the state is carried, but every call reads the same inputs again",
        (
            "pass one step at a time, x[t : t + 1] instead of x, or all steps in one call; start"
            " several updates on one chunk from the state before it: y, new = net(x, h), and"
            " h = tt.state.detach(new) after the last of them"
        ),
    ),
    "TT211": (
        "the state has other lanes than the chunk",
        (
            "where the state is made, as many lanes as the chunk has: x.size(0), or x.size(1) with"
            " time first; for rows of a state that is carried, y, new = net(x, h[:, rows]), then"
            " h = h.index_copy(1, rows, new.detach())"
        ),
    ),
    "TT212": (
        (
            "the state of a bidirectional layer is carried: its backward direction ends at the"
            " first step of a chunk, and the next chunk lies behind it"
        ),
        (
            "one direction, bidirectional=False, for a stream; or carry the forward direction"
            " alone: keep = torch.tensor([1.0, 0.0]).repeat(layers).view(-1, 1, 1), then h = keep *"
            " h.detach(); or whole recordings, without a carried state"
        ),
    ),
    "TT213": (
        "a view mixes the rows of the inputs: the sizes are exchanged, the elements stay in place",
        "x.transpose(0, 1) or x.permute(...) in place of view or reshape, which move no element",
    ),
    "TT301": (
        "means over chunks of unequal length are summed into one step without weights",
        (
            "weight each mean by its steps, and do not divide by the number of chunks:"
            " (loss * steps / total_steps).backward(), or sum(loss * steps) / total_steps"
        ),
    ),
    "TT302": (
        "gradients are cleared in the wrong place, or never",
        (
            "in this order, with each optimizer: optimizer.zero_grad(); loss.backward();"
            " optimizer.step()"
        ),
    ),
    "TT304": (
        "optimizer.step() without a backward before it: nothing is trained",
        "loss.backward() before optimizer.step()",
    ),
    "TT305": (
        "parameters get gradients, but no optimizer has them: they are not trained",
        (
            "make the optimizer after the model, of all that is trained; layers of a list in"
            " nn.ModuleList([...]), parameters in nn.ParameterList([...])"
        ),
    ),
    "TT306": (
        (
            "gradients are clipped where there is nothing to clip: after the step, or before the"
            " backward pass"
        ),
        "in this order: loss.backward(); nn.utils.clip_grad_norm_(...); optimizer.step()",
    ),
    "TT307": (
        "training goes on in the mode of the validation before it: dropout and batch norm are off",
        "model.train() after the validation, before the next training step",
    ),
}

IMPORT = " (import throughtime as tt)"
# Fixes of special cases.
LOST_DETACH = "A detach returns a new tensor, and the result of this call is not kept."
BACKWARD_FIRST = (
    "loss.backward() before optimizer.step() or any other change of the parameters; where the loss"
    " comes only after a step, keep the inputs and the state, and compute the forward pass anew"
)
OWN_LOSS = (
    "loss.backward() for the loss of this chunk alone; of the sum keep only the value:"
    " total += loss.detach()"
)
NO_GRAD = "with torch.no_grad(): around the evaluation, or total += loss.detach()"
CLEAR_AFTER_STEP = (
    "clear once for each step: optimizer.zero_grad() right after optimizer.step(), not at every"
    " backward"
)


def in_chinese() -> bool:
    """Whether the environment asks for Chinese; LC_ALL counts more than LC_MESSAGES and LANG."""
    languages = (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return next(filter(None, languages), "").startswith("zh")


@cache
def catalogue() -> dict[str, str]:
    """The Chinese texts by the English ones, both with `{}` for what differs."""
    return json.loads(Path(__file__).with_name("zh.json").read_text(encoding="utf-8"))


def translated(text: str) -> str:
    """A text of one or several sentences of the catalogue in the user's language."""
    result, rest = list[str](), text
    while rest and in_chinese():
        for english, chinese in catalogue().items():
            pattern = re.escape(english).replace(r"\{\}", "(.*?)")
            if match := re.match(pattern + r"(?: (?=[A-Z])|$)", rest):
                values = (catalogue().get(value, value) for value in match.groups())
                result.append(chinese.format(*values))
                rest = rest[match.end() :]
                break
        else:
            return text
    return "".join(result) or text


def detached(path: str) -> str:
    """The statement that detaches a variable, or the whole of which the path is a part."""
    whole = re.sub(INDICES, "", path)
    return f"{path} = {path}.detach()" if whole == path else f"{whole} = tt.state.detach({whole})"


def detach_fix(paths: Iterable[str], *, losses: int = 0) -> str:
    """The fix for states that are carried with their graph; empty if no path is known.

    `losses` are those of one forward pass that are sent back with retained graphs.
    """
    statements = "; ".join(dict.fromkeys(map(detached, filter(None, paths))))
    if not statements:
        return ""
    fix = f"between chunks: {statements}"
    if losses > 1:
        return f"{fix}; and one backward without retain_graph=True for the sum of the losses"
    return f"{fix}; and loss.backward() without retain_graph=True" if losses else fix


@dataclass(frozen=True)
class Finding:
    """One fault of a training loop.

    Attributes:
        code: `TT101` and so on; each has a page.
        file: the user's file.
        line: the line in it.
        tensor: variable or attribute path of the tensor, `""` if unknown.
        created_in: the chunk in which the tensor was created, counted from 1; `None` if that does
            not apply.
        used_in: the chunk in which it was used.
        message: what is wrong, with the evidence.
        fix: the line to write.
        page: the address of the page that explains it, with a before and an after.
    """

    code: str
    file: str
    line: int
    tensor: str
    created_in: int | None
    used_in: int | None
    message: str
    fix: str
    page: str

    def __str__(self) -> str:
        name = f" [{self.tensor}]" if self.tensor else ""
        chunks = f" (created in chunk {self.created_in}, used in chunk {self.used_in})"
        usual = CODES[self.code][0]
        detail = self.message.removeprefix(usual).removeprefix(". ")
        parts = [translated(usual), translated(detail)]
        message = "。" if in_chinese() else ". "
        message = message.join(filter(None, parts))
        message += translated(chunks) if self.created_in and self.used_in else ""
        fix = translated(self.fix.removesuffix(IMPORT)) + IMPORT * self.fix.endswith(IMPORT)
        return (
            f"{self.code} {SourceLine(self.file, self.line)}{name} {message}\n"
            f"      {translated('write:')} {fix}\n      {translated('see:  ')} {self.page}"
        )


@dataclass
class FindingList:
    """The findings so far, each code once per line."""

    ignore: frozenset[str]
    strict: bool
    items: list[Finding] = field(default_factory=list)
    evidence: Counter[tuple[str, SourceLine]] = field(default_factory=Counter)

    @classmethod
    def from_options(cls, ignore: Iterable[str], strict: bool) -> "FindingList":
        """An empty list, with the codes checked."""
        if not hasattr(ignore, "__iter__"):
            raise ConfigError(
                f"ignore={ignore!r}: expected codes such as 'TT207'. Write"
                " tt.doctor(ignore={'TT207'})"
            )
        codes = frozenset([ignore] if isinstance(ignore, str) else ignore)
        unknown = sorted(map(str, codes - CODES.keys()))
        if unknown:
            raise ConfigError(
                f"ignore={sorted(map(str, codes))!r}: unknown {unknown}, the codes are"
                f" {', '.join(CODES)}. Write tt.doctor(ignore={{'TT207'}})"
            )
        return cls(codes, strict)

    def add(
        self,
        code: str,
        line: SourceLine | None,
        detail: str = "",
        tensor: str = "",
        chunks: tuple[int, int] | None = None,
        fix: str = "",
        after: int = 1,
    ) -> Finding | None:
        """Add a finding and return it, unless its code is ignored or the line already has it.

        Args:
            code: a key of `CODES`.
            line: the user's line; without one nothing is added.
            detail: a sentence with the evidence, after the message of the code.
            tensor: the path of the tensor.
            chunks: the chunks that created and used it, counted from 0.
            fix: what to write in this case, instead of the fix of the code.
            after: add it at the call of this number for the code and line: one may be chance.

        Raises:
            DiagnosisError: under `strict`.
        """
        if not line or code in self.ignore:
            return None
        self.evidence[code, line] += 1
        known = ((f.code, f.file, f.line) for f in self.items)
        if self.evidence[code, line] < after or (code, line.file, line.line) in known:
            return None
        message, usual_fix = CODES[code]
        created, used = (chunks[0] + 1, chunks[1] + 1) if chunks else (None, None)
        text = f"{message}. {detail}" if detail else message
        page = f"{PAGES_URL}/{code}.md"
        fix = fix or usual_fix
        if "tt." in fix:
            fix += IMPORT
        finding = Finding(code, line.file, line.line, tensor, created, used, text, fix, page)
        self.items.append(finding)
        if self.strict:
            raise DiagnosisError(str(finding))
        return finding
