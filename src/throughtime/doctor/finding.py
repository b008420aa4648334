"""What the doctor says: the codes, a finding, and the list that findings go to."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from throughtime.doctor.frames import Place
from throughtime.errors import ConfigError, DiagnosisError

PAGES = "https://github.com/throughtime/throughtime/blob/main/docs/doctor"

CODES: dict[str, tuple[str, str]] = {
    "TT101": (
        (
            "a state of an earlier chunk enters this one with its graph, which an earlier backward"
            " has freed"
        ),
        (
            "between chunks: state = tt.state.detach(state), with its result assigned; for one"
            " tensor h = h.detach()"
        ),
    ),
    "TT102": (
        (
            "retain_graph=True hides that every backward goes through all chunks before: graph,"
            " memory and time grow"
        ),
        "loss.backward() without retain_graph, and state = tt.state.detach(state) between chunks",
    ),
    "TT103": (
        "a tensor that a later backward needs is changed in place",
        (
            "make a new tensor: h = torch.where(reset, initial, h) in place of h[reset] = 0, or"
            " step only once no older graph is used again"
        ),
    ),
    "TT104": (
        "losses or outputs are kept across chunks together with their graphs",
        "keep the value only: total += loss.item(), or outputs.append(y.detach())",
    ),
    "TT201": (
        "every chunk starts from a zero state although it continues the chunk before",
        "pass the state on: y, state = net(x, state), then state = tt.state.detach(state)",
    ),
    "TT202": (
        "the state is carried with its graph and nothing frees it: the graph grows with the stream",
        (
            "with torch.no_grad(): around an evaluation; in training backward per chunk and state ="
            " tt.state.detach(state)"
        ),
    ),
    "TT203": (
        "the state is detached at every step, so that credit flows back a single step",
        "move the detach out of the loop over time, to the edge between chunks",
    ),
    "TT204": (
        "the state of one recording enters the next",
        (
            "start each recording anew: state = None (or net.initial_state(lanes)), or"
            " tt.state.reset(state, initial, where) for single lanes"
        ),
    ),
    "TT205": (
        "the state goes from training into validation, or back",
        "keep two: validate with a state of its own and put the training state back afterwards",
    ),
    "TT206": (
        "the rows of the state are not in the order of the rows of the inputs",
        "order the state as the inputs: state = tt.state.select(state, lanes)",
    ),
    "TT207": (
        "a state is carried between batches that do not follow one another in time",
        (
            "read in order: shuffle=False with lanes side by side, or tt.Stream(recordings,"
            " lanes=..., chunk=...)"
        ),
    ),
    "TT301": (
        "means over chunks of unequal length are added up into one step without weights",
        "(loss * steps / total_steps).backward()",
    ),
    "TT302": (
        "gradients are not cleared where they should be",
        "for each chunk: optimizer.zero_grad(); loss.backward(); optimizer.step()",
    ),
    "TT303": (
        "the gradient is exactly zero before some step of the chunk, so that no credit reaches it",
        "look at the line between these steps that masks, saturates or detaches the state",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One fault of a training loop.

    Attributes:
        code: `TT101` and so on; each has a page.
        file: the user's file.
        line: the line in it.
        tensor: variable or attribute path of the tensor, `""` where none is known.
        made: the chunk in which the tensor was made, counted from 1; `None` where that says
            nothing.
        used: the chunk in which it was used.
        message: what is wrong, with what was seen.
        fix: the line to write.
        page: where it is explained, with a before and an after.
    """

    code: str
    file: str
    line: int
    tensor: str
    made: int | None
    used: int | None
    message: str
    fix: str
    page: str

    def __str__(self) -> str:
        of = f" [{self.tensor}]" if self.tensor else ""
        chunks = (
            f" (made in chunk {self.made}, used in chunk {self.used})"
            if self.made and self.used
            else ""
        )
        return (
            f"{self.code} {self.file}:{self.line}{of} {self.message}{chunks}\n      write:"
            f" {self.fix}\n      see:   {self.page}"
        )


@dataclass
class Findings:
    """The list, each fault once per line."""

    ignore: frozenset[str]
    strict: bool
    found: list[Finding] = field(default_factory=list)

    @classmethod
    def checked(cls, ignore: Iterable[str], strict: bool) -> "Findings":
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
        place: Place | None,
        detail: str = "",
        tensor: str = "",
        chunks: tuple[int, int] | None = None,
    ) -> Finding | None:
        """A finding that is new, unless its code is ignored; a second line of the same fault is the
        same fault.

        Raises:
            DiagnosisError: under `strict`.
        """
        if (
            place is None
            or code in self.ignore
            or any(
                f.code == code and (f.file, f.line) == (place.file, place.line) for f in self.found
            )
        ):
            return None
        message, fix = CODES[code]
        made, used = (chunks[0] + 1, chunks[1] + 1) if chunks else (None, None)
        text = f"{message}. {detail}" if detail else message
        finding = Finding(
            code, place.file, place.line, tensor, made, used, text, fix, f"{PAGES}/{code}.md"
        )
        self.found.append(finding)
        if self.strict:
            raise DiagnosisError(str(finding))
        return finding
