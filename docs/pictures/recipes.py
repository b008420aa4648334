"""The pictures of the recipes: what each data set is, or what its table says."""

from docs.pictures.shapes import bars, boxes, figures, spans


def draw() -> dict[str, str]:
    """A picture for each recipe without one of its own."""
    return {
        "ecg.svg": _ecg(),
        "nab.svg": _nab(),
        "rlc.svg": _rlc(),
        "wiener.svg": _wiener(),
        "forecasting.svg": _forecasting(),
        "slow.svg": _slow(),
        "digits.svg": _digits(),
        "pumps.svg": _pumps(),
    }


def _of_table(title: str, rows: dict[str, float], ours: tuple[int, ...], note: str) -> str:
    description = "; ".join(f"{name}: {value:g}" for name, value in rows.items())
    shown = [(name, value, f"{value:g}") for name, value in rows.items()]
    return bars(title, description, shown, ours=ours, note=note)


def _ecg() -> str:
    rows = figures("how-to/recipes/ecg.md", "F1 premature beat", "trained on")
    return _of_table("Premature beats found (F1)", rows, (1, 2, 3, 4), "python benchmarks/ecg.py")


def _nab() -> str:
    rows = figures("how-to/recipes/nab.md", "F1 anomaly")
    names = ("as they are", "standardised by their first 15 %", "the same, cosine schedule")
    named = {str(name): value for name, value in zip(names, rows.values(), strict=True)}
    return _of_table("Anomalies found (F1), by the inputs", named, (1, 2), "mean of three seeds")


def _rlc() -> str:
    parts = [(1667 * i, min(1667 * (i + 1), 6667), 0.42, "") for i in range(4)]
    strides = [(s, s + 100, 0.42, "") for s in range(0, 6667, 100)]
    return spans(
        "A training recording of 6,667 steps",
        "With the exact gradient four updates, each of which flows back through all of its 1,667"
        " steps. With a stride of 100 the gradient is cut 66 times.",
        6667,
        (
            ("exact, cut every 1,667 steps", parts),
            ("truncated, cut every 100 steps", strides),
        ),
        back=[(0, stop, start) for start, stop, _, _ in parts],
        notes=("Arrows: how far the gradient of an update flows back.",),
    )


def _wiener() -> str:
    return boxes(
        "The circuit that the net imitates",
        "The input voltage passes a filter, a diode and a second filter. The net gets the input and"
        " its own state, never the measured output.",
        {
            "u": (0, 0, "u: input"),
            "f": (1, 0, "filter"),
            "d": (2, 0, "diode"),
            "g": (3, 0, "filter"),
            "v": (0, 1, "u: input"),
            "net": (1, 1, "LSTM"),
            "h": (2, 1, "its state"),
            "y": (3, 1, "y: output"),
        },
        "u>f f>d d>g g>y v>net net>h h>y",
        ours="net h",
        columns=4,
    )


def _forecasting() -> str:
    page = "how-to/recipes/forecasting.md"
    columns = {
        "the model": "RMSE, model",
        "the value now": "value now",
        "the value a week before": "value one week before",
    }
    tables = {name: figures(page, column) for name, column in columns.items()}
    rows = {
        f"{hour} h ahead: {name}": table[hour]
        for hour in ("1", "24", "168")
        for name, table in tables.items()
    }
    return _of_table(
        "Error of a forecast (RMSE)", rows, (0, 3, 6), "python benchmarks/forecasting.py"
    )


def _slow() -> str:
    page = "how-to/recipes/slow-series.md"
    columns = {
        "the value now": "now",
        "the change is predicted": "difference",
        "the same, inputs by first steps": "and first:400",
        "the value is predicted": "plain",
    }
    rows = {name: figures(page, column)["6"] for name, column in columns.items()}
    return _of_table(
        "Error 6 hours ahead (RMSE), ETTh1", rows, (1, 2), "python benchmarks/forecast_ett.py"
    )


def _digits() -> str:
    return spans(
        "From samples to one label",
        "Eighty samples make one step of 10 ms. A clip has 14 to 228 steps, and only its last one"
        " has a target.",
        24,
        (
            ("samples, 8,000 a second", [(s / 4, s / 4 + 0.25, 0.3, "") for s in range(96)]),
            ("steps of 80 samples, 10 ms each", [(s, s + 1, 0.42, "") for s in range(24)]),
            (
                "the label: at the last step of a clip",
                [(0, 13, 0.1, ""), (13, 14, 0.9, ""), (14, 23, 0.1, ""), (23, 24, 0.9, "")],
            ),
        ),
        marks=((1, 0), (1, 14)),
        notes=("Bar: a clip starts, and the state is zeros.",),
    )


def _pumps() -> str:
    return spans(
        "What the net has to remember",
        "After a pulse of the pressure nothing shows for 20 rows. Then the alarm is on for 10.",
        60,
        (
            ("pressure: a pulse", [(0, 60, 0.1, ""), (10, 11, 0.9, "")]),
            ("alarm: 20 rows later, for 10 rows", [(0, 60, 0.1, ""), (30, 40, 0.6, "alarm")]),
            ("the state has to hold the pulse", [(11, 30, 0.3, "20 rows")]),
        ),
    )
