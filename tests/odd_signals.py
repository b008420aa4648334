"""Odd but legal files of signals, and what soundfile, edfio and wfdb read in them."""

import warnings
from pathlib import Path
from typing import Any

import edfio
import numpy as np
import soundfile

from odd_files import Reference, Register, matrix

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # wfdb uses what pandas deprecates
    import wfdb

SIGNALS = Register()

# Sound


def sound(path: Path, subtype: str, *, channels: int = 1, form: str | None = None) -> Reference:
    """Write a sound, and read it in float64."""
    samples = 0.7 * np.sin(np.outer(np.arange(400), np.arange(1, channels + 1)) * 0.05)
    soundfile.write(path, samples, 8000, subtype=subtype, format=form)
    return matrix(soundfile.read(path, dtype="float64", always_2d=True)[0])


@SIGNALS.common(".wav")
def wav_pcm_16(path: Path) -> Reference:
    return sound(path, "PCM_16")


@SIGNALS.common(".wav")
def wav_pcm_16_stereo(path: Path) -> Reference:
    return sound(path, "PCM_16", channels=2)


@SIGNALS.common(".wav")
def wav_pcm_24(path: Path) -> Reference:
    return sound(path, "PCM_24", channels=3)


@SIGNALS.common(".wav")
def wav_pcm_32(path: Path) -> Reference:
    return sound(path, "PCM_32")


@SIGNALS.common(".wav")
def wav_float(path: Path) -> Reference:
    return sound(path, "FLOAT")


@SIGNALS.common(".wav")
def wav_double(path: Path) -> Reference:
    return sound(path, "DOUBLE")


@SIGNALS.common(".wav")
def wav_u8(path: Path) -> Reference:
    return sound(path, "PCM_U8")


@SIGNALS.odd(".wav")
def wav_ulaw(path: Path) -> Reference:
    return sound(path, "ULAW")


@SIGNALS.odd(".wav")
def wav_extensible(path: Path) -> Reference:
    return sound(path, "PCM_24", channels=6, form="WAVEX")


@SIGNALS.odd(".wav")
def wav_of_unknown_length(path: Path) -> Reference:
    sound(path, "PCM_16")
    content = bytearray(path.read_bytes())
    content[4:8] = content[40:44] = b"\xff\xff\xff\xff"  # as programs write to a pipe
    path.write_bytes(content)
    return matrix(soundfile.read(path, dtype="float64", always_2d=True)[0])


@SIGNALS.odd(".wav")
def wav_with_an_odd_chunk_first(path: Path) -> Reference:
    sound(path, "PCM_16")
    content = bytearray(path.read_bytes())
    content[12:12] = b"note\x03\x00\x00\x00abc\x00"
    content[4:8] = (len(content) - 8).to_bytes(4, "little")
    path.write_bytes(content)
    return matrix(soundfile.read(path, dtype="float64", always_2d=True)[0])


@SIGNALS.odd(".wav")
def wav_rf64(path: Path) -> Reference:
    return sound(path, "PCM_16", form="RF64")


@SIGNALS.odd(".wav")
def wav_with_a_chunk_after_the_data(path: Path) -> Reference:
    sound(path, "PCM_16")
    content = bytearray(path.read_bytes()) + b"LIST\x04\x00\x00\x00INFO"
    content[4:8] = (len(content) - 8).to_bytes(4, "little")
    path.write_bytes(content)
    return matrix(soundfile.read(path, dtype="float64", always_2d=True)[0])


@SIGNALS.common(".flac")
def flac_16(path: Path) -> Reference:
    return sound(path, "PCM_16", channels=2)


@SIGNALS.common(".flac")
def flac_24(path: Path) -> Reference:
    return sound(path, "PCM_24")


@SIGNALS.odd(".ogg")
def ogg_vorbis(path: Path) -> Reference:
    return sound(path, "VORBIS", channels=2)


# EDF and BDF


def edf(path: Path, *signals: Any, **options: Any) -> Reference:
    """Write signals, and read them in their physical units."""
    kind = edfio.Bdf if path.suffix == ".bdf" else edfio.Edf
    kind(signals, **options).write(path)
    return edf_values(path)


def edf_values(path: Path) -> Reference:
    """The signals of a file by their labels."""
    read = edfio.read_bdf if path.suffix == ".bdf" else edfio.read_edf
    return Reference({signal.label: np.array(signal.data) for signal in read(path).signals})


def wave(kind: Any = edfio.EdfSignal, **options: Any) -> Any:
    """A signal of four seconds at 100 samples a second."""
    samples = 80 * np.sin(np.arange(400) * 0.11)
    return kind(samples, 100, **{"label": "EEG Fpz-Cz", "physical_dimension": "uV"} | options)


@SIGNALS.common(".edf")
def edf_two_signals(path: Path) -> Reference:
    return edf(path, wave(), wave(label="EOG", physical_range=(-250, 250)))


@SIGNALS.odd(".edf")
def edf_inverted_range(path: Path) -> Reference:
    edf(path, wave(physical_range=(-250, 250)), wave(label="EOG"))
    content = bytearray(path.read_bytes())
    content[464:472], content[480:488] = content[480:488], content[464:472]
    path.write_bytes(content)
    return edf_values(path)


@SIGNALS.common(".edf")
def edf_with_annotations(path: Path) -> Reference:
    notes = [edfio.EdfAnnotation(1.5, 0.5, "blink"), edfio.EdfAnnotation(3, None, "Größe")]
    return edf(path, wave(), wave(label="EOG"), annotations=notes)


@SIGNALS.common(".edf")
def edf_anonymised_date(path: Path) -> Reference:
    reference = edf(path, wave(), wave(label="EOG"))
    content = bytearray(path.read_bytes())
    content[168:184] = b"xx.xx.xx00.00.00"
    path.write_bytes(content)
    return reference


@SIGNALS.odd(".edf")
def edf_unknown_number_of_records(path: Path) -> Reference:
    reference = edf(path, wave(), wave(label="EOG"))
    content = bytearray(path.read_bytes())
    content[236:244] = b"-1      "
    path.write_bytes(content)
    return reference


@SIGNALS.odd(".edf")
def edf_records_of_half_a_second(path: Path) -> Reference:
    signals = wave(digital_range=(0, 255)), wave(label="EOG", digital_range=(-100, 32767))
    return edf(path, *signals, data_record_duration=0.5)


@SIGNALS.common(".bdf")
def bdf_two_signals(path: Path) -> Reference:
    return edf(path, wave(edfio.BdfSignal), wave(edfio.BdfSignal, label="Status"))


# WFDB


def record(path: Path, form: str, *, gain: float = 200, baseline: int = 0) -> Reference:
    """Write two signals of a record, and read them in their physical units."""
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
    return record_values(path)


def record_values(path: Path) -> Reference:
    """The physical signals of a record by their names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values: Any = wfdb.rdrecord(str(path.with_suffix("")))
    return Reference(dict(zip(values.sig_name, values.p_signal.T, strict=True)))


@SIGNALS.common(".hea")
def wfdb_16(path: Path) -> Reference:
    return record(path, "16")


@SIGNALS.common(".hea")
def wfdb_212(path: Path) -> Reference:
    return record(path, "212")


@SIGNALS.odd(".hea")
def wfdb_80(path: Path) -> Reference:
    return record(path, "80", gain=100)


@SIGNALS.odd(".hea")
def wfdb_24_baseline(path: Path) -> Reference:
    return record(path, "24", gain=1234.5, baseline=1024)


@SIGNALS.odd(".hea")
def wfdb_32(path: Path) -> Reference:
    return record(path, "32", gain=100_000)


@SIGNALS.common(".hea")
def wfdb_invalid_samples(path: Path) -> Reference:
    record(path, "16")
    samples = np.fromfile(path.with_suffix(".dat"), "<i2")
    samples[[4, 7, 31]] = -32768
    samples.tofile(path.with_suffix(".dat"))
    return record_values(path)


@SIGNALS.odd(".hea")
def wfdb_comments_and_no_rate_in_signals(path: Path) -> Reference:
    record(path, "16")
    header = path.read_text().splitlines()
    path.write_text("\r\n".join(["# Größe", *header, "# age: 71", ""]))
    return record_values(path)


@SIGNALS.common(".hea")
def wfdb_two_signal_files(path: Path) -> Reference:
    record(path, "16")
    samples = np.fromfile(path.with_suffix(".dat"), "<i2").reshape(-1, 2)
    for number in range(2):
        samples[:, number].tofile(path.with_name(f"part{number}.dat"))
    first, *signals = path.read_text().splitlines()
    for number, line in enumerate(signals):
        signals[number] = f"part{number}.dat {line.split(' ', 1)[1]}"
    path.write_text("\n".join([first, *signals, ""]))
    return record_values(path)


@SIGNALS.odd(".hea")
def wfdb_segments(path: Path) -> Reference:
    for name in ("one", "two"):
        record(path.with_name(f"{name}.hea"), "16")
    path.write_text(f"{path.stem}/2 2 360 120\none 60\ntwo 60\n")
    return record_values(path)
