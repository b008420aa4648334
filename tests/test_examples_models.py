"""The worked models learn with their state carried.

What transformers' models carry; trials that do not see each other.
"""

import copy
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import snntorch as snn
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaRecurrentBlock,
)

import throughtime as tt
from strategies import HidesLayer, recordings, weights
from throughtime.carry import Carried

FOLDER = Path(__file__).parent.parent / "examples" / "models"
transformers.logging.set_verbosity_error()  # that the fast kernels are for GPUs


@dataclass(frozen=True)
class Example:
    """A file of examples/models: module, inputs, tolerance in float64 and the loss to reach."""

    name: str
    module: str
    inputs: Callable[[int], Tensor]
    bound: float
    tolerance: float = 1e-12

    def names(self) -> dict[str, Any]:
        return runpy.run_path(str(FOLDER / f"{self.name}.py"))

    def net(self) -> Carried:
        torch.manual_seed(5)
        made = self.names()[self.module]
        return tt.carry(made(2, 4) if self.name == "min_gru" else made()).double()


def symbols(steps: int) -> Tensor:
    return torch.randint(4, (steps, 2))


EXAMPLES = (
    Example("transformer_xl", "TransformerXL", symbols, 0.1),
    Example("min_gru", "MinGRU", lambda steps: torch.randn(steps, 2, 2, dtype=torch.float64), 0.06),
    Example(
        "spiking",
        "Spiking",
        lambda steps: (torch.rand(steps, 2, 2, dtype=torch.float64) < 0.4).double(),
        0.3,
    ),
    Example(
        "conv_lstm",
        "ConvLSTM",
        lambda steps: torch.rand(steps, 2, 1, 6, 6, dtype=torch.float64),
        0.9,
    ),
    Example(
        "state_space", "Mamba", symbols, 0.1, tolerance=2e-6
    ),  # it scans in float32 whatever the model
)
every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


@pytest.mark.slow
@every_example
def test_an_example_run_as_a_script_learns(example: Example) -> None:
    """Alone in a process, as the reader runs it; far below what guessing costs."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{example.name}.py")],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "guessing" in done.stdout


@every_example
def test_an_example_learns(example: Example) -> None:
    assert example.names()["main"]() < example.bound


def test_without_the_carried_state_it_would_not_learn() -> None:
    """Without its memory of the steps before the chunk, the Transformer-XL can only guess."""
    names = EXAMPLES[0].names()
    torch.manual_seed(0)
    net = tt.carry(names["TransformerXL"]())
    stream = tt.Stream(names["recordings"](16, 5 * 160), lanes=16, chunk=5)
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=1e-2), list[float]()
    for chunk in stream:
        y, _ = net(chunk.inputs, net.initial_state(16))
        loss = (
            nn.functional.cross_entropy(y.flatten(0, 1), chunk.targets.flatten())
            if chunk.targets is not None
            else y.sum()
        )
        if chunk.valid_steps:
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert min(losses[-20:]) > 1.2


@every_example
def test_chunks_of_an_example_are_the_whole(example: Example) -> None:
    torch.manual_seed(1)
    laws = tt.testing.check_carry(example.net(), example.inputs(28), tolerance=example.tolerance)
    assert {"whole", "reset", "lanes", "value", "credit"} < {law.name for law in laws}


@every_example
def test_the_gradient_in_chunks_is_that_of_the_whole(example: Example) -> None:
    """Through the state, chunk by chunk, single steps among them."""
    net, x = example.net(), example.inputs(23)
    weigh = torch.randn(23, 2, *net(x, net.initial_state(2))[0].shape[2:], dtype=torch.float64)

    def gradient(*lengths: int) -> Tensor:
        outputs, state = list[Tensor](), net.initial_state(2)
        for piece in x.split(lengths):
            y, state = net(piece, state)
            outputs.append(y)
        found = torch.autograd.grad(
            (torch.cat(outputs) * weigh).sum(),
            list(net.parameters()),
            allow_unused=True,
            materialize_grads=True,
        )
        return torch.cat([g.flatten() for g in found])

    whole = gradient(23)
    assert (gradient(6, 1, 7, 1, 1, 7) - whole).abs().max() < max(
        1e-10, 100 * example.tolerance
    ) * whole.abs().max().clamp(min=1.0)


@every_example
def test_credit_flows_into_every_part_of_the_carried_state(example: Example) -> None:
    """So that a horizon beyond the stride buys something."""
    net, x = example.net(), example.inputs(16)
    _, state = net(x[:11], net.initial_state(2))
    entering = [leaf for leaf in tt.state.tensors(state) if leaf.is_floating_point()]
    y, _ = net(x[11:], state)
    blamed = torch.autograd.grad((y * torch.randn_like(y)).sum(), entering)
    assert all(credit.abs().max() > 1e-6 for credit in blamed)


def test_slots_from_before_the_start_are_seen_by_no_one() -> None:
    net, x = EXAMPLES[0].net(), symbols(5)
    start = net.initial_state(2)
    dirty = {"memory": torch.randn_like(start["memory"]), "filled": torch.tensor([0, 3])}
    clean = {"memory": dirty["memory"].clone(), "filled": dirty["filled"]}
    clean["memory"][0] = 0
    clean["memory"][1, :, :-3] = 0
    torch.testing.assert_close(net(x, dirty)[0], net(x, clean)[0], rtol=0, atol=0)
    full = {**dirty, "filled": torch.tensor([12, 12])}  # the mutant: slots that are not masked
    assert (net(x, full)[0] - net(x, clean)[0]).abs().amax(dim=(0, 2)).min() > 1e-3


def test_a_spiking_layer_keeps_nothing_of_a_call() -> None:
    """No graph that would be held, no potential that would be seen."""
    net, x = EXAMPLES[2].net(), EXAMPLES[2].inputs(6)
    y, _ = net(x, net.initial_state(2))
    assert all(not buffer.requires_grad for buffer in net.buffers())
    copy.deepcopy(net)  # torch copies no tensor with a graph
    for module in net.modules():
        if isinstance(module, snn.Leaky):
            module.mem = torch.full_like(module.mem, 7.0)
    torch.testing.assert_close(net(x, net.initial_state(2))[0], y, rtol=0, atol=0)


def test_the_single_step_of_mamba_needs_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    example = EXAMPLES[4]
    names = example.names()
    net = tt.carry(names["Mamba"]())
    monkeypatch.setitem(names["Mamba"].forward.__globals__, "_saving_copies", nullcontext)
    _, state = net(symbols(1), net.initial_state(2))
    y, _ = net(symbols(1), state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# What the models of transformers carry from one forward call to the next.


def _linear(kind: str, **setting: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(
        vocab_size=16, hidden_size=setting.pop("hidden_size", 8), num_hidden_layers=2, **setting
    )


def _model(kind: str, **setting: Any) -> nn.Module:
    return getattr(transformers, f"{kind}Model")(_linear(kind, **setting))


SSM = {"state_size": 4, "expand": 2}
JAMBA = {"mamba_d_state": 4, "mamba_dt_rank": 2, "attn_layer_period": 8, "attn_layer_offset": 7}
DELTA = {
    f"linear_{name}": size
    for name, size in (
        ("num_value_heads", 2),
        ("num_key_heads", 2),
        ("key_head_dim", 4),
        ("value_head_dim", 4),
    )
}
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "Mamba": lambda: _model("Mamba", **SSM, time_step_rank=2),
    "FalconMamba": lambda: _model("FalconMamba", **SSM, time_step_rank=2),
    "JambaMambaMixer": lambda: JambaMambaMixer(_linear("Jamba", **JAMBA), 0),
    "Mamba2": lambda: _model("Mamba2", **SSM, num_heads=4, head_dim=4, n_groups=1, chunk_size=4),
    "Rwkv": lambda: _model("Rwkv", context_length=64),
    "xLSTM": lambda: _model(
        "xLSTM", hidden_size=128, num_blocks=2, num_heads=2, chunk_size=4, mode="inference"
    ),
    "RecurrentGemmaRecurrentBlock": lambda: RecurrentGemmaRecurrentBlock(
        _linear("RecurrentGemma", lru_width=8, num_attention_heads=2), 0
    ),
    "Qwen3NextGatedDeltaNet": lambda: Qwen3NextGatedDeltaNet(
        _linear("Qwen3Next", **DELTA, layer_types=["linear_attention"] * 2), 0
    ),
    "Lfm2ShortConv": lambda: Lfm2ShortConv(_linear("Lfm2", layer_types=["conv"] * 2), 0),
    "MiniMax": lambda: _model(
        "MiniMax",
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_local_experts=1,
        num_experts_per_tok=1,
        layer_types=["linear_attention"] * 2,
        block_size=4,
    ),
}
CACHES: dict[str, Callable[[], Any]] = {
    "JambaMambaMixer": lambda: DynamicCache(config=_linear("Jamba", **JAMBA)),
    "Qwen3NextGatedDeltaNet": lambda: DynamicCache(
        config=_linear("Qwen3Next", layer_types=["linear_attention"] * 2)
    ),
    "Lfm2ShortConv": lambda: DynamicCache(config=_linear("Lfm2", layer_types=["conv"] * 2)),
}


def _call(name: str, module: Any, x: Tensor, cache: Any, at: int) -> tuple[Tensor, Any]:
    """One forward call from the cache of the last, batch first."""
    if name == "RecurrentGemmaRecurrentBlock":  # its state is in attributes
        return (
            module(x, torch.arange(at, at + x.shape[1]).expand(len(x), -1), None, use_cache=True)[
                0
            ],
            None,
        )
    word = {"Rwkv": "state", "MiniMax": "past_key_values", "Lfm2ShortConv": "past_key_values"}.get(
        name, "cache_params"
    )
    if name in CACHES:
        return module(x, **{word: cache}), cache
    given = {} if cache is None else {word: cache}
    found = module(inputs_embeds=x, use_cache=True, **given)
    return found.last_hidden_state, getattr(found, word)


def _play(name: str, module: Any, x: Tensor, lengths: Sequence[int], *, copies: bool) -> Tensor:
    if name == "RecurrentGemmaRecurrentBlock":
        module.conv1d_state, module.rg_lru.recurrent_states = None, None
    cache, outputs, at = CACHES[name]() if name in CACHES else None, list[Tensor](), 0
    with (
        torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)
        if copies
        else nullcontext()
    ):
        for piece in x.split(list(lengths), dim=1):
            y, cache = _call(name, module, piece, cache, at)
            outputs.append(y)
            at += piece.shape[1]
    return torch.cat(outputs, dim=1)


def carried(name: str, lengths: Sequence[int], *, copies: bool) -> str:
    """Result of splitting a module: "wrong", "forward" (right outputs only) or "gradient"."""
    torch.manual_seed(0)
    module = MAKERS[name]()
    for weight_name, weight in module.named_parameters():
        if (
            weight.dim() > 1 and "A_log" not in weight_name
        ) or weight.isnan().any():  # strong, so that much is carried; some come unset
            nn.init.normal_(weight, std=0.6)
    first, steps = lengths[0], sum(lengths)
    x = torch.randn(2, steps, 128 if name == "xLSTM" else 8)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    whole, pieces = (
        _play(name, module, inputs[0], [steps], copies=True),
        _play(name, module, inputs[1], lengths, copies=copies),
    )
    if pieces.shape != whole.shape or (pieces - whole).abs().max() > 1e-3 * whole.abs().max():
        return "wrong"
    weigh = torch.randn(2, steps - first, whole.shape[2])
    right = torch.autograd.grad((whole[:, first:] * weigh).sum(), inputs[0])[0][:, :first]
    try:
        found = torch.autograd.grad((pieces[:, first:] * weigh).sum(), inputs[1])[0][:, :first]
    except RuntimeError as error:
        return "forward" if "modified by an inplace operation" in str(error) else f"fails: {error}"
    return "gradient" if (found - right).abs().max() < 1e-3 * right.abs().max() else "wrong"


# Trials of a sweep in one process.


@dataclass(frozen=True)
class Trial:
    """A net, its stream and its optimizer, and what it does until it is done."""

    seed: int
    gradient: Any
    rate: float

    def steps(self) -> Any:
        """The weights, after the last update; before it, `None` after each."""
        made = torch.Generator().manual_seed(self.seed)
        net = tt.carry(nn.Sequential(HidesLayer(outputs=3), nn.GRU(3, 4), nn.Linear(4, 2)).double())
        with torch.no_grad():
            for weight in net.parameters():
                weight.copy_(torch.randn(weight.shape, generator=made, dtype=weight.dtype) * 0.4)
        stream = tt.Stream(
            recordings((45, 31, 20), seed=self.seed), lanes=2, chunk=7 + self.seed, seed=self.seed
        )
        optimizer = torch.optim.Adam(net.parameters(), lr=self.rate)
        for _ in range(2):
            for _ in tt.updates(net, stream, nn.MSELoss(), gradient=self.gradient):
                optimizer.step()
                optimizer.zero_grad()
                yield None
        yield weights(net)

    def alone(self) -> dict[str, Tensor]:
        return next(found for found in self.steps() if found is not None)


PAIRS = {
    "truncated": (
        Trial(1, tt.Truncated(stride=10), 1e-2),
        Trial(2, tt.Truncated(stride=5, horizon=20), 3e-2),
    ),
    "exact": (Trial(1, tt.Exact(chunk=9), 1e-2), Trial(2, tt.Exact(), 3e-2)),
    "adaptive": (
        Trial(1, tt.Adaptive(tolerance=0.1, min=5, max=20), 1e-2),
        Trial(2, tt.Truncated(stride=10), 3e-2),
    ),
}
every_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@every_pair
def test_trials_after_each_other_or_in_turns_give_the_bits_of_each_alone(
    pair: tuple[Trial, Trial],
) -> None:
    expected = [trial.alone() for trial in reversed(pair)][::-1]
    assert not same(*expected)
    assert all(same(trial.alone(), bits) for trial, bits in zip(pair, expected, strict=True))
    runs, found = [trial.steps() for trial in pair], list[Any]([None, None])
    while any(bits is None for bits in found):
        for i, run in enumerate(runs):
            found[i] = next(run) if found[i] is None else found[i]
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


@every_pair
def test_trials_in_threads_give_the_bits_of_each_alone(pair: tuple[Trial, Trial]) -> None:
    expected, together = [trial.alone() for trial in pair], Barrier(4)

    def run(trial: Trial) -> dict[str, Tensor]:
        together.wait(timeout=60)
        return trial.alone()

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(run, pair * 2))
    assert all(same(a, b) for a, b in zip(found, expected * 2, strict=True))
