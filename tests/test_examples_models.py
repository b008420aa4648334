"""The worked models learn with their state carried.

What transformers' models carry; trials that do not see each other.
"""

import copy
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
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
