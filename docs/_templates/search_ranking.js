// Ranks pages by the words of a question that they have: a rare word weighs more than a common one,
// a word of the title more than one of a section's heading, and that more than one of the text. No
// word is required, since questions have words that no page has. A result links to the section
// whose heading has the most of the question.
const TITLE = 2, HEADING = 1, OBJECT = 10; // weights; an object is a name of the API
const SHOWN = 0.4; // results that score at least this share of the best
const LOWERED = { log: 0.4 }; // what was tried and dropped has the words of a task, not its answer

// How people ask for a page that has other words. A phrase counts if the question has all of its
// words, in any order, and then as much as rare words of a title.
const PHRASE = 3;
const PHRASES = {
  "errors/backward-twice": ["backward second time", "第二次 反向传播"],
  "errors/detach": ["detach hidden", "detach state", "detach 隐藏状态", "detach 状态"],
  "errors/inplace-operation": ["inplace operation", "leaf variable", "grad none", "叶子 变量", "梯度 none"],
  "errors/k1-k2": ["k1 k2"],
  "errors/last-batch": ["hidden state shape", "状态 形状"],
  "errors/memory-grows": ["memory leak", "ram keeps growing", "内存 增长", "显存 增长", "显存 上涨", "显存不够", "爆显存", "显存溢出", "内存不够", "内存不足"],
  "errors/nan-loss": ["exploding gradients", "nan loss", "loss inf", "exploding loss", "损失 爆炸", "梯度 爆炸"],
  "errors/retain-graph": ["retain_graph", "slower epoch", "slower iteration", "越来越慢"],
  "errors/two-losses": ["two losses", "两个损失", "多个 loss"],
  "explanation/stride-horizon-chunk": ["k1 k2", "batch size", "sequence length", "序列长度", "batch 大小"],
  "explanation/truncation": ["sequence length", "bptt length", "tbptt", "long dependencies", "choose horizon", "梯度消失", "长期依赖", "截断反向传播", "序列长度", "bptt 长度", "截断长度"],
  "explanation/windows": [
    "works offline", "after deployment", "predictions drift", "streaming bad", "good training bad live", "sliding window", "滑动窗口", "实时 效果", "上线",
    "forgets sequence", "lstm forgets", "rnn forgets", "forgets long", "long audio", "long recordings", "fails long", "worse longer", "跑久 不准", "运行 变差", "训练 部署 不一致", "production worse", "效果变差",
    "效果 变差",
  ],
  "how-to/agents": ["ppo", "stable baselines", "recurrent agent", "recurrent policy", "actor critic", "环境 策略", "强化学习", "智能体", "torchrl", "sb3"],
  "how-to/data": [
    "dataset", "multiple targets", "target columns", "several outputs", "cross validation", "split train test", "hdf5", "huge csv", "normalize",
    "normalise", "scaling", "pandas", "csv", "missing values", "parquet", "different length", "variable length", "padding", "读取 csv", "归一化", "标准化",
    "缺失值", "多个目标", "多目标", "输出目标", "多个输出", "数据集", "不同长度", "长度不同", "变长", "iterabledataset", "numpy array", "load data", "split data",
    "train validation", "train test", "validation set", "mask padding", "polars", "划分", "训练集", "测试集", "数据格式", "读取数据", "加载数据", "掩码", "wav files",
    "audio files", "音频文件", "own dataset", "embedding tokens", "word embedding", "词嵌入", "词元",
  ],
  "how-to/deploy": [
    "microcontroller", "embedded", "browser", "inference", "mobile", "onnx", "real time", "esp32", "arduino", "raspberry", "rust", "c++",
    "warm prediction", "steps before", "嵌入式", "单片机", "浏览器", "网页", "部署", "推理", "实时", "手机", "c code", "production", "serve model", "export model",
    "quantize", "实时推理", "导出模型", "上线", "c 语言", "previous steps", "steps feed", "how many steps", "without torch", "without pytorch", "不装 torch",
    "不用 pytorch", "树莓派",
  ],
  "how-to/distributed": [
    "ddp", "multi gpu", "slurm", "several machines", "two machines", "ray", "fsdp", "多卡", "多机", "两台", "几台", "分布式",
  ],
  "how-to/draw": [
    "visualize graph", "plot graph", "draw graph", "computation graph", "computational graph", "画计算图", "计算图可视化",
    "查看计算图",
  ],
  "how-to/extending": ["custom cell", "own cell", "custom policy", "梯度策略", "自定义策略", "自定义 单元", "自定义循环单元", "自己的单元"],
  "how-to/gpu": ["cuda", "apple silicon", "mps", "苹果", "显卡", "gpu 训练", "gpu 利用率", "gpu slow", "gpu utilization", "用 gpu"],
  "how-to/gradients": [
    "rtrl", "real time recurrent learning", "实时循环学习", "gradient checkpointing", "checkpoint gradient", "exact gradient", "never end", "endless", "梯度检查点", "精确梯度", "无穷", "无限长", "不截断", "how far back",
    "network remember", "measure memory", "horizon", "gradient bias", "记多久", "记住多远", "多远", "梯度视野", "gradient flows steps",
  ],
  "how-to/layers": [
    "faster training", "second order", "训练加速", "训练很慢", "mixed precision", "half precision", "autocast", "amp", "fp16", "float16", "bfloat16", "混合精度",
    "半精度", "dropout layers", "fused lstm", "speed up", "cpu slow", "加速", "层间 dropout", "gru slow", "lstm slow", "rnn slow", "training slow", "为什么慢",
    "速度慢",
  ],
  "how-to/ignite": ["ignite"],
  "how-to/lightning": ["pytorch lightning", "lightning trainer", "lightning"],
  "how-to/loop": [
    "save model", "load model", "save checkpoint", "save hidden state", "keep hidden state", "hidden state across", "resume training",
    "accumulate gradients", "validate training", "gradient clipping", "random seed", "reproducible", "deterministic", "nan inference", "f1",
    "confusion matrix", "teacher forcing", "imbalanced", "weighted loss", "weighted cross entropy", "class weights", "保存模型", "加载模型", "保存 模型",
    "加载 模型", "加载 训练好", "随机种子", "可复现", "可以复现", "学习率", "梯度累积", "中途验证", "隐藏状态 传递", "保存隐藏状态", "隐藏状态 清零", "隐藏状态 重置", "隐藏状态 传给", "pass hidden", "pass state", "hidden state next batch", "不平衡", "类别加权", "clip grad", "scheduler", "cosine",
    "progress bar", "类别不平衡", "样本不平衡", "进度条", "梯度裁剪", "结果 不一样", "结果不同", "different results", "evaluate", "evaluation", "test set", "评估", "测试集上",
    "same results", "batch prediction different", "step by step different",
  ],
  "how-to/losses": [
    "custom loss", "own loss", "two outputs", "multi task", "ctc", "ppo", "自定义损失", "损失函数", "多任务", "auxiliary loss", "two heads", "multilabel",
    "mask loss", "多标签",
  ],
  "how-to/migrating/hand-written": ["convert loop", "existing loop", "改写 循环", "已有 训练循环"],
  "how-to/migrating/keras": ["stateful", "keras"],
  "how-to/models": [
    "mamba", "state space", "transformer", "spiking", "脉冲神经网络", "状态空间", "convlstm", "xlstm", "rwkv", "video", "hyperparameter", "grid search",
    "sweep", "超参数", "视频", "线性循环",
  ],
  "how-to/optim": ["optimizer fastest", "optimizer slow", "fast adam", "优化器", "adamw", "weight decay", "sgd", "权重衰减"],
  "how-to/recipes/digits": ["spoken digits"],
  "how-to/recipes/ecg": ["心电图", "心律", "ecg"],
  "how-to/recipes/forecasting": [
    "forecast", "time series prediction", "predict steps ahead", "时间序列", "预测 未来", "多步预测", "负荷预测", "提前 小时",
  ],
  "how-to/recipes/fsdd": ["speech", "audio", "keyword spotting", "语音识别", "语音"],
  "how-to/recipes/nab": ["anomaly", "outlier", "异常检测"],
  "how-to/recipes/python": ["python script", "pandas example", "predictive maintenance", "预测性维护"],
  "how-to/recipes/rlc": ["circuit", "电路"],
  "how-to/recipes/slow-series": ["hourly", "daily", "hydrology", "rainfall", "小时 数据", "水文", "径流"],
  "how-to/recipes/wiener-hammerstein": ["system identification", "系统辨识"],
  "how-to/trace": ["vanishing", "exploding gradient", "看梯度", "监控梯度", "检查梯度", "gradient per step", "gradient norm", "saturated gates", "梯度 范数"],
  "how-to/your-module": [
    "bidirectional", "seq2seq", "encoder decoder", "编码器", "language model", "reinforcement learning", "custom module", "own module", "lstmcell", "grucell", "convolution", "batchnorm",
    "双向", "语言模型", "强化学习", "自定义 模块", "自己 模块", "自己写的", "卷积", "隐藏状态初始化", "own model", "custom model", "wrap model", "custom rnn", "done episode",
    "自定义模型", "自己的模型", "自己写",
  ],
  "reference/benchmarks": ["benchmark", "speed", "faster", "性能", "快多少", "速度对比"],
  "reference/command-line": [
    "early stopping", "best checkpoint", "predict csv", "stop training", "patience", "tensorboard", "wandb", "weights biases", "mlflow",
    "learning rate warmup", "overfitting", "log metrics", "command line", "早停", "停止训练", "最好的模型", "预测写", "提前停止", "过拟合", "学习率预热", "保存模型", "加载模型", "日志",
    "命令行", "without code", "no code", "train terminal", "不写代码", "终端", "超参数", "original units", "反归一化", "原始单位",
  ],
  "reference/doctor/TT205": ["validation score changes", "验证 每次"],
  "reference/doctor/TT211": ["hidden state shape", "expected hidden", "形状不对", "形状不匹配"],
  "reference/doctor/TT302": ["zero_grad"],
  "reference/doctor/index": ["debug", "find bug", "training does not learn", "调试", "不收敛", "不学习", "不下降", "不降", "loss does not decrease", "loss go", "unit tests", "pytest", "单元测试"],
  "reference/files": [
    "csv", "timestamp", "time stamp", "timestamps", "semicolon", "decimal comma", "date column", "时间戳", "读取 csv", "带 csv", "分号", "多标签", "multilabel",
    "last step", "最后一步", "irregular time", "sampling rate", "categories", "文件格式",
  ],
  "reference/flags": ["options", "all flags", "参数", "选项"],
  "reference/glossary": [
    "hidden state", "lane", "batch lanes", "batch size lanes", "tensor shape", "shape batch", "perplexity", "repackage_hidden", "隐藏状态是", "困惑度", "叶子张量", "多对一", "多对多", "术语", "what is", "meaning", "definition",
    "lane 是什么", "什么意思",
  ],
  "reference/report": ["html report", "plot loss", "报告", "损失曲线", "训练报告", "training report"],
  "reference/run-folder": [
    "load run", "log metrics", "metrics file", "continue training", "train more epochs", "code safe", "killed", "crashed", "interrupted", "resume training", "断点续训", "模型 在哪里", "好的模型 在哪", "代码安全", "中断", "接着训练", "继续训练", "恢复训练", "训练 恢复", "kill 训练",
  ],
  "reference/streams": [
    "num_workers", "dataloader", "data loader", "workers", "数据加载", "mixed lengths", "shuffle recordings", "lanes number", "路数", "组 batch",
  ],
  "tutorial/heartbeats": ["real time", "live prediction", "实时推理", "实时预测", "心跳", "入门"],
};

Search._performSearch = (query, words, excluded, _highlighted, names) => {
  const index = Search._index, stemmer = new Stemmer();
  const pages = (record) => [record ?? []].flat(); // one page is stored as a number
  const lookUp = (word, table) => (Object.hasOwn(table, word) ? pages(table[word]) : []);
  const lookUpPart = (word) =>
    Object.keys(index.terms).filter((term) => word.length > 3 && term.includes(word))
      .flatMap((term) => pages(index.terms[term]));

  const lengths = index.docnames.map(() => 0); // in different words
  Object.values(index.terms).flatMap(pages).forEach((page) => lengths[page]++);
  const average = lengths.reduce((sum, length) => sum + length, 0) / lengths.length;

  const weights = new Map(), having = new Map();
  for (const word of words) {
    const whole = [...lookUp(word, index.terms), ...lookUp(word, index.titleterms)];
    having.set(word, new Set(whole.length ? whole : lookUpPart(word)));
    const rarity = Math.log(1 + lengths.length / having.get(word).size);
    const share = /[\u4e00-\u9fff]/.test(word) ? 0.5 : 1; // pairs of characters overlap
    weights.set(word, having.get(word).size ? share * rarity : 0);
  }
  const weigh = (stems) => stems.reduce((sum, word) => sum + (weights.get(word) ?? 0), 0);
  const weighText = (text) =>
    weigh([...new Set(splitQuery(text.toLowerCase()).map((word) => stemmer.stemWord(word)))]);

  const asked = (page) => (PHRASES[page] ?? []).reduce((best, phrase) => {
    const stems = splitQuery(phrase.toLowerCase()).map((word) => stemmer.stemWord(word));
    if (!stems.every((word) => words.has(word))) return best;
    const rare = Math.log(1 + lengths.length);
    return Math.max(best, stems.reduce((sum, word) => sum + (weights.get(word) || rare), 0));
  }, 0);

  const sections = index.docnames.map(() => ({ heading: "", anchor: "", weight: 0 }));
  for (const [heading, places] of Object.entries(index.alltitles)) {
    const weight = weighText(heading);
    for (const [page, anchor] of places)
      if (anchor !== null && weight > sections[page].weight)
        sections[page] = { heading: ` > ${heading}`, anchor: "#" + anchor, weight };
  }

  const results = index.docnames.map((name, page) => {
    const title = index.titles[page], { heading, anchor, weight } = sections[page];
    const text = weigh([...words].filter((word) => having.get(word).has(page)));
    const length = Math.max(1, (1 + lengths[page] / average) / 2);
    const unwanted = [...excluded].some((word) => lookUp(word, index.terms).includes(page));
    const titled = TITLE * weighText(title) + HEADING * weight + PHRASE * asked(name);
    const ranked = unwanted ? 0 : (text / length + titled) * (LOWERED[name] ?? 1);
    return [name, title + heading, anchor, null, ranked, index.filenames[page], "text"];
  });
  const best = Math.max(...results.map((result) => result[4]));
  const objects = [...names].flatMap((name) => Search.performObjectSearch(name, names));
  objects.forEach((object) => { object[4] += OBJECT; });
  return results.filter((result) => result[4] > 0 && result[4] >= SHOWN * best)
    .concat(objects)
    .sort(_orderResultsByScoreThenName);
};
