"""The search of the site: a question, as people type it, leads to the page that answers it.

The pages are indexed by Sphinx and ranked by the scripts of the site, in Node.js.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
SHOWN = 2  # the first results are read
CONF = """
extensions = ["myst_parser", "sphinx.ext.autodoc", "_site", "_translation"]
myst_enable_extensions, myst_heading_anchors = ["dollarmath"], 4
exclude_patterns = ["locale"]
language, locale_dirs, gettext_compact = {language!r}, ["locale"], False
html_search_scorer = {ranking!r}
"""
SEARCH = """
const fs = require("fs"), vm = require("vm");
const [site, questions] = process.argv.slice(1);
const read = (name) => fs.readFileSync(`${site}/${name}`, "utf8");
const browser = "var window = globalThis, document = {}, localStorage = { setItem() {} };" +
  "var _ready = () => {}, SPHINX_HIGHLIGHT_ENABLED = false, _ = (text) => text;";
const context = vm.createContext({ asked: JSON.parse(questions) });
const names = ["_static/searchtools.js", "_static/language_data.js"];
vm.runInContext([browser, ...names.map(read), read("searchindex.js")].join("\\n;\\n"), context);
const ranked = "asked.map((question) => " +
  "Search._performSearch(...Search._parseQuery(question)).reverse().map((result) => result[0]))";
console.log(JSON.stringify(vm.runInContext(ranked, context)));
"""

# As people ask in forums.
QUESTIONS = {
    "Trying to backward through the graph a second time": "errors/backward-twice",
    "modified by an inplace operation hidden state": "errors/inplace-operation",
    "memory increases every iteration": "errors/memory-grows",
    "LSTM hidden state last batch size": "errors/last-batch",
    "truncated BPTT pytorch k1 k2": "errors/k1-k2",
    "carry hidden state between batches shuffle": "reference/doctor/TT207",
    "LSTM learns on windows but fails on long sequences": "explanation/windows",
    "truncated_bptt_steps": "how-to/migrating/lightning-1.9",
    "export LSTM with hidden state to ONNX": "how-to/deploy",
    "nan loss LSTM long sequence": "errors/nan-loss",
    "should I reset hidden state between epochs": "reference/doctor/TT208",
    "how long should the sequence be for truncated BPTT": "explanation/truncation",
    "variable length sequences padding tbptt": "how-to/data",
    "LSTM training too slow on CPU": "how-to/layers",
    "hidden state during validation": "reference/doctor/TT205",
    "multiple gpus stateful rnn": "how-to/distributed",
    "class imbalance rare events LSTM loss": "how-to/loop",
    "how to check vanishing gradient": "how-to/trace",
    "expected hidden size batch_first": "reference/doctor/TT211",
    "learning rate scheduler": "how-to/loop",
    "early stopping": "reference/command-line",
    "save and load a model": "how-to/loop",
    "multiple targets": "how-to/data",
    "mixed precision": "how-to/layers",
    "multivariate time series forecasting": "how-to/recipes/forecasting",
    "normalize inputs": "how-to/data",
    "missing values in the data": "how-to/data",
    "anomaly detection": "how-to/recipes/nab",
    "bidirectional LSTM": "how-to/your-module",
    "num_workers dataloader": "reference/streams",
    "run on a microcontroller": "how-to/deploy",
    "apple silicon mps": "how-to/gpu",
    "custom loss function": "how-to/losses",
    "predict several steps ahead": "how-to/recipes/forecasting",
    "custom RNN cell": "how-to/extending",
    "gradient checkpointing": "how-to/gradients",
    "repackage_hidden": "reference/glossary",
    "reinforcement learning PPO LSTM": "how-to/agents",
    "pytorch lightning tbptt": "how-to/lightning",
    "difference between k1 and k2": "errors/k1-k2",
    "batch size vs lanes": "reference/glossary",
    "language model perplexity": "reference/glossary",
}
CHINESE = {
    "截断反向传播": "errors/k1-k2",
    "detach 和 detach_ 有什么区别": "errors/detach",
    "retain_graph 显存": "errors/retain-graph",
    "内存泄漏": "errors/memory-grows",
    "最后一个 batch 隐藏状态": "errors/last-batch",
    "为什么窗口训练会失败": "explanation/windows",
    "梯度消失": "explanation/truncation",
    "LSTM 训练 loss 变成 nan 怎么办": "errors/nan-loss",
    "每个 epoch 要不要重置隐藏状态": "how-to/loop",
    "截断长度 k1 k2 怎么选": "explanation/truncation",
    "LSTM 在 CPU 上训练太慢": "how-to/index",
    "多卡训练 RNN": "how-to/distributed",
    "验证集上隐藏状态怎么处理": "how-to/loop",
    "LSTM 导出 onnx": "how-to/deploy",
    "实时预测 怎么保存隐藏状态": "tutorial/heartbeats",
    "样本不平衡 LSTM 损失函数": "how-to/loop",
    "显存不足 长序列": "errors/memory-grows",
    "早停": "reference/command-line",
    "如何保存模型": "how-to/loop",
    "困惑度": "reference/glossary",
    "叶子张量": "reference/glossary",
    "Lightning 怎么用截断反向传播": "how-to/lightning",
    "混合精度": "how-to/layers",
    "多个目标": "how-to/data",
    "时间序列预测": "how-to/recipes/forecasting",
    "异常检测": "how-to/recipes/nab",
    "数据归一化": "how-to/data",
    "缺失值": "how-to/data",
    "自定义损失函数": "how-to/losses",
    "学习率调度": "how-to/loop",
    "过拟合": "reference/command-line",
    "GPU 训练": "how-to/gpu",
    "嵌入式部署 C 语言": "how-to/deploy",
    "隐藏状态是什么": "reference/glossary",
    "双向 LSTM": "how-to/your-module",
    "语言模型": "how-to/your-module",
    "心电图": "how-to/recipes/ecg",
    "梯度检查点": "how-to/gradients",
    "keras stateful 迁移": "how-to/migrating/keras",
    "自定义循环单元": "how-to/extending",
    "两个损失 一起反向传播": "errors/two-losses",
    "隐藏状态什么时候清零": "how-to/loop",
    "显存一直增长": "errors/memory-grows",
    "要不要 detach 隐藏状态": "errors/detach",
}


@pytest.mark.skipif(shutil.which("node") is None, reason="the scripts of the site need Node.js")
@pytest.mark.slow
@pytest.mark.parametrize(("language", "pages"), [("en", QUESTIONS), ("zh_CN", CHINESE)])
def test_the_first_results_of_a_question_have_the_page_that_answers_it(
    language: str, pages: dict[str, str], tmp_path: Path
) -> None:
    source, site = tmp_path / "docs", tmp_path / "site"
    shutil.copytree(DOCS, source, ignore=shutil.ignore_patterns("api*", "*.ipynb", "_*"))
    ranking = str(DOCS / "_templates" / "search_ranking.js")
    (source / "conf.py").write_text(CONF.format(language=language, ranking=ranking), "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(DOCS)}
    command = [sys.executable, "-m", "sphinx", "-Q", "-b", "html", source, site]
    subprocess.run(command, env=environment, check=True)
    asked = json.dumps(list(pages))
    found = subprocess.run(
        ["node", "-e", SEARCH, str(site), asked], capture_output=True, text=True, check=True
    )
    results = dict(zip(pages, json.loads(found.stdout), strict=True))
    missed = {
        question: results[question][:4]
        for question, page in pages.items()
        if page not in results[question][:SHOWN]
    }
    assert not missed
