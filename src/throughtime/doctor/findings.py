"""The findings of the doctor: the codes, one finding, and the list of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from throughtime.doctor._frames import SourceLine
from throughtime.errors import ConfigError, DiagnosisError

PAGES_URL = "https://github.com/throughtime/throughtime/blob/main/docs/doctor"

CODES: dict[str, tuple[str, str]] = {
    "TT101": (
        "the state of an earlier chunk enters this one with its graph, which a backward has freed",
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
            "a new tensor: h = torch.where(reset, initial, h) instead of h[reset] = 0; or"
            " optimizer.step() only after the last backward through an older graph"
        ),
    ),
    "TT104": (
        "losses or outputs of several chunks are kept together with their graphs",
        "keep the value only: total += loss.item(), or outputs.append(y.detach())",
    ),
    "TT201": (
        "every chunk starts from a zero state although it continues the previous chunk",
        "pass the state on: y, state = net(x, state), then state = tt.state.detach(state)",
    ),
    "TT202": (
        "the state is carried with its graph and nothing frees it: the graph grows with the stream",
        (
            "with torch.no_grad(): around an evaluation; in training one backward per chunk, then"
            " state = tt.state.detach(state)"
        ),
    ),
    "TT203": (
        "the state is detached at every step, so gradients flow back a single step",
        "move the detach out of the loop over time, to the boundary between chunks",
    ),
    "TT204": (
        "the state of one recording enters the next",
        (
            "start each recording from a new state: state = None (or net.initial_state(lanes)); for"
            " single lanes tt.state.reset(state, initial, where)"
        ),
    ),
    "TT205": (
        "the state goes from training into validation, or back",
        "keep two: validate with a separate state, and restore the training state afterwards",
    ),
    "TT206": (
        "the rows of the state are not in the order of the rows of the inputs",
        "order the state like the inputs: state = tt.state.select(state, lanes)",
    ),
    "TT207": (
        "a state is carried between batches that are not consecutive in time",
        (
            "read in order: shuffle=False with lanes side by side, or tt.Stream(recordings,"
            " lanes=..., chunk=...)"
        ),
    ),
    "TT301": (
        "means over chunks of unequal length are summed into one step without weights",
        "(loss * steps / total_steps).backward()",
    ),
    "TT302": (
        "gradients are cleared in the wrong place, or never",
        "for each chunk: optimizer.zero_grad(); loss.backward(); optimizer.step()",
    ),
    "TT303": (
        "the gradient is exactly zero before some step of the chunk: earlier steps get no credit",
        "remove what masks, saturates or detaches the state at that step",
    ),
}


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
        chunks = (
            f" (created in chunk {self.created_in}, used in chunk {self.used_in})"
            if self.created_in and self.used_in
            else ""
        )
        return (
            f"{self.code} {SourceLine(self.file, self.line)}{name} {self.message}{chunks}\n"
            f"      write: {self.fix}\n      see:   {self.page}"
        )


@dataclass
class FindingList:
    """The findings so far, each code once per line."""

    ignore: frozenset[str]
    strict: bool
    items: list[Finding] = field(default_factory=list)

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
    ) -> Finding | None:
        """Add a finding and return it, unless its code is ignored or the line already has it.

        Args:
            code: a key of `CODES`.
            line: the user's line; without one nothing is added.
            detail: a sentence with the evidence, after the message of the code.
            tensor: the path of the tensor.
            chunks: the chunks that created and used it, counted from 0.
            fix: what to write in this case, instead of the fix of the code.

        Raises:
            DiagnosisError: under `strict`.
        """
        if line is None or code in self.ignore:
            return None
        if any((f.code, f.file, f.line) == (code, line.file, line.line) for f in self.items):
            return None
        message, usual_fix = CODES[code]
        created, used = (chunks[0] + 1, chunks[1] + 1) if chunks else (None, None)
        text = f"{message}. {detail}" if detail else message
        page = f"{PAGES_URL}/{code}.md"
        fix = fix or usual_fix
        finding = Finding(code, line.file, line.line, tensor, created, used, text, fix, page)
        self.items.append(finding)
        if self.strict:
            raise DiagnosisError(str(finding))
        return finding
