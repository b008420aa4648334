"""The doctor's advice, followed literally: the loop runs, and the fault is gone."""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import throughtime as tt
from cases.check import Case, cases
from throughtime.doctor import Doctor

AFTER_BACKWARD = "between chunks: "
WITH_IMPORT = " (import throughtime as tt)"


def diagnosed(case: Case) -> tuple[Doctor, str]:
    """The doctor after a run of a case, and the error of the run."""
    error, doctor, run = "", tt.doctor(), case.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with doctor:
                run()
        except RuntimeError as raised:
            error = str(raised)
    return doctor, error


def follow(case: Case, line: int, fix: str) -> str:
    """The text of a case's file with the advice of a finding put in, word by word."""
    lines = case.path.read_text(encoding="utf-8").splitlines()
    statement = fix.removesuffix(WITH_IMPORT)
    if statement.startswith(AFTER_BACKWARD):
        statement = statement.removeprefix(AFTER_BACKWARD)
        own = range(case.start - 1, case.start - 1 + len(case.source.splitlines()))
        at = next(i for i in own if ".backward(" in lines[i])
        indent = lines[at][: -len(lines[at].lstrip())]
        lines.insert(at + 1, indent + statement)
    else:
        text = lines[line - 1]
        lines[line - 1] = text[: -len(text.lstrip())] + statement
    if fix != statement and fix.endswith(WITH_IMPORT):
        at = lines.index("import torch")
        lines.insert(at, "import throughtime as tt")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "name",
    [
        "detach_as_a_statement",
        "matrices_by_hand",
        "fed_back_prediction",
        "memory_with_graph",
        "second_layer_not_detached",
    ],
)
def test_a_script_that_follows_the_advice_runs_without_a_finding(name: str, tmp_path: Path) -> None:
    case, repaired = cases("broken")[name], tmp_path / "repaired.py"
    doctor, _ = diagnosed(case)
    finding = doctor.findings[0]
    repaired.write_text(follow(case, finding.line, finding.fix), encoding="utf-8")
    again, error = diagnosed(replace(case, path=repaired))
    assert not error
    assert not again.findings


@pytest.mark.parametrize("assigned", [True, False])
@pytest.mark.parametrize("layer", [True, False])
def test_rows_that_are_selected_and_put_back_are_in_order(layer: bool, assigned: bool) -> None:
    torch.manual_seed(0)
    stream, dim = torch.randn(101, 5, 2).cumsum(0), int(layer)
    unit = nn.GRU(2, 8) if layer else nn.GRUCell(2, 8)
    head = nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*unit.parameters(), *head.parameters()], lr=0.1)
    h = torch.zeros(1, 5, 8) if layer else torch.zeros(5, 8)
    with tt.doctor() as doctor:
        for start in range(0, 100, 10):
            rows = torch.randperm(5)[: 5 if start % 20 else 4]
            new, outputs = h.index_select(dim, rows), list[torch.Tensor]()
            x, y = stream[start : start + 10, rows], stream[start + 1 : start + 11, rows]
            if layer:
                out, new = unit(x, new)
            else:
                for x_t in x:
                    new = unit(x_t, new)
                    outputs.append(new)
                out = torch.stack(outputs)
            if not assigned:
                h = h.index_copy(dim, rows, new.detach())
            elif layer:
                h[:, rows] = new.detach()
            else:
                h[rows] = new.detach()
            optimizer.zero_grad()
            nn.functional.mse_loss(head(out), y).backward()
            optimizer.step()
    assert not doctor.findings


# Each case with the advice of its finding put in by hand: texts, and what replaces them.
REPAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    "functional_updates_retained": (
        ("loss.backward(retain_graph=True)  # <- TT102", "loss.backward()\n        h = h.detach()"),
    ),
    "rows_of_results": (('"loss": loss}', '"loss": loss.detach()}'),),
    "saved_log_probs_never_emptied": (
        (
            "    optimizer.step()\n",
            (
                "    optimizer.step()\n"
                "    policy.saved_log_probs.clear()\n"
                "    policy.rewards.clear()\n"
            ),
        ),
    ),
    "five_steps_on_one_loss": (
        (
            (
                "        scores = tagger(sentence)\n"
                "        loss = nn.functional.cross_entropy(scores.flatten(0, 1), "
                "tag.flatten())\n"
                "        for _ in range(5):\n"
            ),
            (
                "        for _ in range(5):\n"
                "            scores = tagger(sentence)\n"
                "            loss = nn.functional.cross_entropy(scores.flatten(0, "
                "1), tag.flatten())\n"
            ),
        ),
    ),
    "ring_buffer_rolled": (
        ("            ring[:, t", "            ring = ring.clone()\n            ring[:, t"),
    ),
    "label_one_chunk_late": (
        (
            "        y, h = rnn(visits[i : i + 10], h.detach())\n        if waiting is not None:\n",
            (
                "        if waiting is not None:\n"
                "            y, _ = rnn(*waiting)\n"
                "            waiting = bought(y[-1])\n"
            ),
        ),
        (
            "        waiting = bought(y[-1])\n\n",
            (
                "        waiting = visits[i : i + 10], h\n"
                "        with torch.no_grad():\n"
                "            _, h = rnn(visits[i : i + 10], h)\n"
                "\n"
            ),
        ),
    ),
    "one_of_two_cleared_twice": (
        (
            "        of_encoder.zero_grad()\n        of_encoder.zero_grad()\n",
            "        of_encoder.zero_grad()\n        of_decoder.zero_grad()\n",
        ),
    ),
    "leaky_sum_of_states": (
        (
            "    for recording in recordings:\n",
            "    for recording in recordings:\n        h = torch.zeros(3, 8)\n",
        ),
    ),
    "lanes_in_a_new_order_each_chunk": (
        (
            "        y, h = net(data[i : i + 15, order], h.detach())  # <- TT206",
            (
                "        y, new = net(data[i : i + 15, order], h[order])\n"
                "        h = h.index_copy(0, order, new.detach())"
            ),
        ),
    ),
    "passes_of_converted_counts": (
        ("    for _ in range(2):\n", "    for _ in range(2):\n        state = None\n"),
    ),
}


def check_repaired(name: str, changes: Iterable[tuple[str, str]], folder: Path) -> None:
    """The case has no finding once the lines are changed as advised."""
    case, repaired = cases("broken")[name], folder / "repaired.py"
    text = case.path.read_text(encoding="utf-8") + "\n\n"
    own = source = case.source + "\n\n"
    for before, after in changes:
        if before in source:
            source = source.replace(before, after)
        else:  # of all cases in the file: an import
            assert before in text
            text = text.replace(before, after, 1)
    repaired.write_text(text.replace(own, source), encoding="utf-8")
    doctor, error = diagnosed(replace(case, path=repaired))
    assert not error
    assert not doctor.findings


@pytest.mark.parametrize("name", REPAIRS)
def test_a_case_that_is_repaired_as_advised_has_no_finding(name: str, tmp_path: Path) -> None:
    check_repaired(name, REPAIRS[name], tmp_path)


IMPORT = ("import torch\n", "import throughtime as tt\nimport torch\n")
OWN_STATE = (
    "start validation from a state of its own, such as zeros, and go on afterwards with the one"
)
NEW_STATE = "start every batch from a new zero state, made in the loop"
IN_ORDER = "read them in order and without overlap: shuffle=False"
ORDER_OF_CALLS = "optimizer.zero_grad(); loss.backward(); optimizer.step()"
STEP_TO_STEP = "pass the state itself from step to step"

# Each case with a part of its advice, word by word, and the same put in by hand.
ADVICE: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "detached_at_every_step": (
        STEP_TO_STEP,
        (
            ("            h = h.detach()  # <- TT203\n", ""),
            ("        ys = []\n", "        h, ys = h.detach(), []\n"),
        ),
    ),
    "state_through_numpy": (
        "(or copy it by .data or NumPy) only between chunks, outside the loop over time",
        (
            (
                "        for t in range(begin, begin + 15):\n",
                (
                    "        h = torch.from_numpy(states[begin])\n"
                    "        for t in range(begin, begin + 15):\n"
                ),
            ),
            ("cell(x[t], torch.from_numpy(states[t]))", "cell(x[t], h)"),
            ("            states[t + 1] = h.detach().numpy()  # <- TT203\n", ""),
            (
                "        optimizer.zero_grad()\n",
                "        states[begin + 15] = h.detach().numpy()\n        optimizer.zero_grad()\n",
            ),
        ),
    ),
    "validation_goes_on_from_training": (
        OWN_STATE,
        (("run(net, valid, h)", "run(net, valid, torch.zeros(1, 2, 8))"),),
    ),
    "validation_inside_the_stream": (
        OWN_STATE,
        (
            ("    model.eval()\n", "    model.eval()\n    kept, model.state = model.state, None\n"),
            ("    model.train()\n", "    model.train()\n    model.state = kept\n"),
        ),
    ),
    "lightning_shared_by_validation": (
        OWN_STATE,
        (
            (
                "    def step(self, batch):\n",
                (
                    "    def on_validation_epoch_start(self):\n"
                    "        self.kept, self.hidden = self.hidden, None\n\n"
                    "    def on_validation_epoch_end(self):\n"
                    "        self.hidden = self.kept\n\n"
                    "    def step(self, batch):\n"
                ),
            ),
        ),
    ),
    "first_frame_every_time": (
        "pass one step at a time, x[t : t + 1] instead of x",
        (("model(x, hidden)", "model(x[t : t + 1], hidden)"), ("prediction[t]", "prediction[0]")),
    ),
    "three_updates_per_batch": (
        "y, new = net(x, h), and h = tt.state.detach(new) after the last of them",
        (
            IMPORT,
            ("logits, hidden = net(", "logits, new = net("),
            ("            hidden = tuple(h.detach() for h in hidden)\n", ""),
            (
                "            optimizer.step()\n",
                "            optimizer.step()\n        hidden = tt.state.detach(new)\n",
            ),
        ),
    ),
    "lanes_fewer_than_states": (
        "y, new = net(x, h[:, rows]), then h = h.index_copy(1, rows, new.detach())",
        (
            (
                "        live = [r for r in recordings if len(r) > start + 20]\n",
                (
                    "        live = [r for r in recordings if len(r) > start + 20]\n"
                    "        lengths = enumerate(map(len, recordings))\n"
                    "        rows = torch.tensor([k for k, n in lengths if n > start + 20])\n"
                ),
            ),
            (
                'out, h = model["gru"](chunk[:-1], h)',
                'out, new = model["gru"](chunk[:-1], h[:, rows])',
            ),
            ("        h = h.detach()\n", "        h = h.index_copy(1, rows, new.detach())\n"),
        ),
    ),
    "zeros_for_eight_lanes": (
        "where the state is made, as many lanes as the chunk has: x.size(0)",
        (
            ("def init_hidden(self)", "def init_hidden(self, x)"),
            (
                "torch.zeros(1, self.batch_size, 6), torch.zeros(1, self.batch_size, 6)",
                "torch.zeros(1, x.size(0), 6), torch.zeros(1, x.size(0), 6)",
            ),
            ("self.init_hidden()", "self.init_hidden(x)"),
        ),
    ),
    "chunks_in_random_order": (
        IN_ORDER,
        (("torch.randperm(len(chunks)).tolist()", "range(len(chunks))"),),
    ),
    "windows_moved_by_one": (
        IN_ORDER,
        (("range(60)", "range(0, 60, width)"),),
    ),
    "every_second_window": (IN_ORDER, (("sampler=sampler", "shuffle=False"),)),
    "shuffled_windows": (IN_ORDER, (("shuffle=True", "shuffle=False"),)),
    "replay_with_the_last_state": (
        NEW_STATE,
        (("        picked = ", "        hidden = torch.zeros(1, 4, 8)\n        picked = "),),
    ),
    "neighbours_side_by_side": (
        NEW_STATE,
        (
            (
                "        output, hidden",
                "        hidden = torch.zeros(1, 4, 8)\n        output, hidden",
            ),
        ),
    ),
    "ignite_cleared_by_the_wrong_event": (
        ORDER_OF_CALLS,
        (
            (
                "        loss.backward()\n",
                "        optimizer.zero_grad()\n        loss.backward()\n",
            ),
            ("        optimizer.zero_grad()  # <- TT302\n", "        pass\n"),
        ),
    ),
    "ignite_evaluator_with_gradients": (
        "with torch.no_grad(): around an evaluation",
        (
            (
                '        prediction, states["h"] = ',
                '        with torch.no_grad():\n            prediction, states["h"] = ',
            ),
        ),
    ),
    "ignite_losses_kept": (
        "keep values without their graph",
        (("history.append(loss)", "history.append(loss.detach())"),),
    ),
    "ignite_state_on_the_engine": (
        AFTER_BACKWARD + "engine.state.hidden = engine.state.hidden.detach()",
        (
            (
                "        loss.backward()\n",
                (
                    "        loss.backward()\n"
                    "        engine.state.hidden = engine.state.hidden.detach()\n"
                ),
            ),
        ),
    ),
    "ignite_step_under_a_retained_graph": (
        "self.state = tt.state.detach(self.state); and one backward without retain_graph=True",
        (
            IMPORT,
            (
                "        loss.backward(retain_graph=True)  # <- TT102\n",
                "        loss.backward()\n        self.state = tt.state.detach(self.state)\n",
            ),
        ),
    ),
    "ignite_trainer_fed_with_chunks": (
        "where a trainer cuts its batches into chunks, a whole recording as one batch",
        (("trainer.run(chunks,", "trainer.run([(stream[:-1], stream[1:])],"),),
    ),
    "lightning_losses_in_a_list": (
        "keep values without their graph",
        (("self.losses.append(loss)", "self.losses.append(loss.detach())"),),
    ),
    "lightning_recording_to_recording": (
        "before each recording, set the state to what it was before the first one",
        (
            (
                "        optimizer = self.optimizers()\n",
                (
                    "        optimizer = self.optimizers()\n"
                    "        self.hidden = torch.zeros(1, 1, 8)\n"
                ),
            ),
        ),
    ),
    "lightning_retained_graph": (
        AFTER_BACKWARD + "h = h.detach(); and one backward without retain_graph=True",
        (
            (
                "len(pieces), retain_graph=True)  # <- TT102\n",
                "len(pieces))\n            h = h.detach()\n",
            ),
        ),
    ),
    "lightning_state_with_graph": (
        "between chunks: self.hidden = tt.state.detach(self.hidden)",
        (
            IMPORT,
            (
                "        x, y = batch\n",
                "        self.hidden = tt.state.detach(self.hidden)\n        x, y = batch\n",
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_a_case_has_the_advice_that_repairs_it(name: str, tmp_path: Path) -> None:
    advice, changes = ADVICE[name]
    doctor, _ = diagnosed(cases("broken")[name])
    assert any(advice in finding.fix for finding in doctor.findings), str(doctor)
    check_repaired(name, changes, tmp_path)
