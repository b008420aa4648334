"""The live page of the documentation loads nothing and runs the files that tt.export writes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from docs.live import machine, page, train

import throughtime as tt


def test_a_live_page_loads_nothing_and_computes_what_its_nets_compute(tmp_path: Path) -> None:
    recordings = [machine(1_000, seed) for seed in range(16)]
    nets = {"a </script>": train([*tt.windows(recordings, 100)], 1), "b": train(recordings, 1)}
    x = recordings[0]["inputs"]
    text = page("<b>", nets, x, recordings[0]["targets"].tolist())
    assert text.count("</script>") == 1
    assert "<title>&lt;b&gt;</title>" in text
    assert not re.search(r"""(src|href)=|https?://|\bimport """, text)
    if shutil.which("node") is None:
        pytest.skip("needs Node.js")
    modules = text[text.index("const sources = [") : text.index("const titles = ")]
    script = "for (const s of sources) { const net = s.create(); if (!net.check()) throw 1;"
    script += f" console.log(...[{x[0].item()}, {x[1].item()}].map((v) => net.step([v])[1])); }}"
    (tmp_path / "run.mjs").write_text(modules + script, encoding="utf-8")
    done = subprocess.run(["node", "run.mjs"], cwd=tmp_path, check=True, capture_output=True)
    got = torch.tensor([[*map(float, line.split())] for line in done.stdout.splitlines()])
    expected = torch.stack([tt.predict(net, x[:2])[0][:, 1] for net in nets.values()])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
