"""Odd but legal files of signals, and what soundfile, edfio and wfdb read in them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edfio
import numpy as np
import soundfile

from odd_files import Reference, Writer, cases, matrix

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # wfdb uses what pandas deprecates
    import wfdb


def changed(path: Path, at: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(new)] = new
    path.write_bytes(content)


def sound(
    subtype: str,
    *,
    channels: int = 1,
    form: str | None = None,
    change: Callable[[Path], None] = lambda _: None,
) -> Writer:
    """A sound in float64."""

    def write(path: Path) -> Reference:
        samples = 0.7 * np.sin(np.outer(np.arange(400), np.arange(1, channels + 1)) * 0.05)
        soundfile.write(path, samples, 8000, subtype=subtype, format=form)
        change(path)
        return matrix(soundfile.read(path, dtype="float64", always_2d=True)[0])

    return write


def unknown_length(path: Path) -> None:
    """As programs write to a pipe."""
    changed(path, 4, b"\xff\xff\xff\xff")
    changed(path, 40, b"\xff\xff\xff\xff")


def odd_chunks(path: Path) -> None:
    """One before the format, and one after the data."""
    content = path.read_bytes()
    body = b"note\x03\x00\x00\x00abc\x00" + content[12:] + b"LIST\x04\x00\x00\x00INFO"
    path.write_bytes(b"RIFF" + (len(body) + 4).to_bytes(4, "little") + b"WAVE" + body)


def edf(*signals: Any, **options: Any) -> Writer:
    """Signals in their physical units, by their labels."""

    def write(path: Path) -> Reference:
        kind = edfio.Bdf if path.suffix == ".bdf" else edfio.Edf
        kind(signals, **options).write(path)
        return edf_values(path)

    return write


def edf_values(path: Path) -> Reference:
    read = edfio.read_bdf if path.suffix == ".bdf" else edfio.read_edf
    return Reference({signal.label: np.array(signal.data) for signal in read(path).signals})


def wave(kind: Any = edfio.EdfSignal, **options: Any) -> Any:
    """A signal of four seconds at 100 samples a second."""
    samples = 80 * np.sin(np.arange(400) * 0.11)
    return kind(samples, 100, **{"label": "EEG Fpz-Cz", "physical_dimension": "uV"} | options)


TWO = wave(), wave(label="EOG", physical_range=(-250, 250))


def edf_inverted_range(path: Path) -> Reference:
    edf(*TWO)(path)
    content = path.read_bytes()
    changed(path, 464, content[480:488])
    changed(path, 480, content[464:472])
    return edf_values(path)


def edf_changed(at: int, new: bytes) -> Writer:
    """The values are those of the file as it was."""

    def write(path: Path) -> Reference:
        reference = edf(*TWO)(path)
        changed(path, at, new)
        return reference

    return write


def record(
    form: str,
    *,
    gain: float = 200,
    baseline: int = 0,
    change: Callable[[Path], None] = lambda _: None,
) -> Writer:
    """Two signals in their physical units."""

    def write(path: Path) -> Reference:
        signals = np.column_stack([np.sin(np.arange(60) * 0.3), np.cos(np.arange(60) * 0.2)]) * 0.5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wfdb.wrsamp(
                path.stem,
                360,
                ["mV", "mV"],
                ["MLII", "V5"],
                p_signal=signals,
                fmt=[form, form],
                adc_gain=[gain, 100],
                baseline=[baseline, 0],
                write_dir=str(path.parent),
            )
            change(path)
        return record_values(path)

    return write


def record_values(path: Path) -> Reference:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values: Any = wfdb.rdrecord(str(path.with_suffix("")))
    return Reference(dict(zip(values.sig_name, values.p_signal.T, strict=True)))


def invalid_samples(path: Path) -> None:
    samples = np.fromfile(path.with_suffix(".dat"), "<i2")
    samples[[4, 7, 31]] = -32768
    samples.tofile(path.with_suffix(".dat"))


def comments(path: Path) -> None:
    header = path.read_text().splitlines()
    path.write_text("\r\n".join(["# Größe", *header, "# age: 71", ""]))


def two_signal_files(path: Path) -> None:
    samples = np.fromfile(path.with_suffix(".dat"), "<i2").reshape(-1, 2)
    first, *signals = path.read_text().splitlines()
    for number, line in enumerate(signals):
        samples[:, number].tofile(path.with_name(f"part{number}.dat"))
        signals[number] = f"part{number}.dat {line.split(' ', 1)[1]}"
    path.write_text("\n".join([first, *signals, ""]))


def segments(path: Path) -> None:
    for name in ("one", "two"):
        record("16")(path.with_name(f"{name}.hea"))
    path.write_text(f"{path.stem}/2 2 360 120\none 60\ntwo 60\n")


def segments_with_a_gap(path: Path) -> Reference:
    """As in MIMIC: a layout, a gap between two segments, and a signal that one of them lacks."""
    record("16")(path.with_name("s1.hea"))
    content = path.with_name("s1.hea").read_text().splitlines()
    one = content[1].replace("s1.dat", "s0.dat")
    path.with_name("s0.hea").write_text(f"s0 1 360 60\n{one}\n")
    path.with_name("s0.dat").write_bytes(path.with_name("s1.dat").read_bytes()[:120])
    names = "".join(f"~ 0 200/mV 16 0 0 0 0 {name}\n" for name in ("MLII", "V5"))
    path.with_name("layout.hea").write_text(f"layout 2 360 0\n{names}")
    path.write_text(f"{path.stem}/4 2 360 130\nlayout 0\ns0 60\n~ 10\ns1 60\n")
    return record_values(path)


NOTES = [edfio.EdfAnnotation(1.5, 0.5, "blink"), edfio.EdfAnnotation(3, None, "Größe")]
HALF = wave(digital_range=(0, 255)), wave(label="EOG", digital_range=(-100, 32767))
BDF = wave(edfio.BdfSignal), wave(edfio.BdfSignal, label="Status")
COMMON: dict[str, Writer] = {
    "wav_pcm_16.wav": sound("PCM_16", channels=2),
    "wav_pcm_24.wav": sound("PCM_24", channels=3),
    "wav_pcm_32.wav": sound("PCM_32"),
    "wav_float.wav": sound("FLOAT"),
    "wav_double.wav": sound("DOUBLE"),
    "wav_u8.wav": sound("PCM_U8"),
    "wav_with_odd_chunks.wav": sound("PCM_16", change=odd_chunks),
    "flac_16.flac": sound("PCM_16", channels=2),
    "flac_24.flac": sound("PCM_24"),
    "edf_with_annotations.edf": edf(*TWO, annotations=NOTES),
    "edf_two_signals.edf": edf(*TWO),
    "edf_anonymised_date.edf": edf_changed(168, b"xx.xx.xx00.00.00"),
    "bdf_two_signals.bdf": edf(*BDF, annotations=NOTES),
    "wfdb_16.hea": record("16"),
    "wfdb_212.hea": record("212"),
    "wfdb_invalid_samples.hea": record("16", change=invalid_samples),
    "wfdb_segments_with_a_gap.hea": segments_with_a_gap,
    "wfdb_two_signal_files.hea": record("16", change=two_signal_files),
}
ODD: dict[str, Writer] = {
    "wav_ulaw.wav": sound("ULAW"),
    "wav_extensible.wav": sound("PCM_24", channels=6, form="WAVEX"),
    "wav_of_unknown_length.wav": sound("PCM_16", change=unknown_length),
    "wav_rf64.wav": sound("PCM_16", form="RF64"),
    "ogg_vorbis.ogg": sound("VORBIS", channels=2),
    "edf_inverted_range.edf": edf_inverted_range,
    "edf_unknown_number_of_records.edf": edf_changed(236, b"-1      "),
    "edf_records_of_half_a_second.edf": edf(*HALF, data_record_duration=0.5),
    "wfdb_80.hea": record("80", gain=100),
    "wfdb_24_baseline.hea": record("24", gain=1234.5, baseline=1024),
    "wfdb_32.hea": record("32", gain=100_000),
    "wfdb_comments.hea": record("16", change=comments),
    "wfdb_segments.hea": record("16", change=segments),
}
SIGNALS = cases(COMMON, ODD)
