"""The pickle reader: official files come out whole; hostile ones are refused and nothing in them runs."""

import io
import os
import pickle
import pickletools
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from sipp.errors import DataError
from sipp.experiments.data import safepickle
from sipp.experiments.data.safepickle import load_pickle


class Canary:
    """Creates the file `path` when it is unpickled the ordinary way."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def python2_batch(pixels: bytes, n: int) -> bytes:
    """What Python 2 wrote in the official archive: protocol 2, byte strings, `numpy.core.multiarray`."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    dtype = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    shape = b"K" + bytes([n]) + b"M" + struct.pack("<H", len(pixels) // n) + b"\x86"
    array += b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    labels = b"](" + b"K\x03" * n + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + labels + b"u."


def test_python2_file(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 300), np.uint8)
    path = tmp_path / "batch"
    path.write_bytes(python2_batch(pixels.tobytes(), 5))
    batch = load_pickle(path)
    assert np.array_equal(batch["data"], pixels) and batch["labels"] == [3] * 5
    assert np.array_equal(pickle.loads(path.read_bytes(), encoding="bytes")[b"data"], pixels)  # the reading is right


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_python3_files(tmp_path: Path, protocol: int, order: str) -> None:
    pixels = np.array(np.random.default_rng(0).integers(0, 256, (4, 30), np.uint8), order=order)
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": pixels, "labels": [1, 2], "text": "ü", "none": None}, protocol))
    batch = load_pickle(path)
    assert np.array_equal(batch["data"], pixels)
    assert batch["labels"] == [1, 2] and batch["none"] is None


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_canary(tmp_path: Path, protocol: int) -> None:
    touched = tmp_path / "touched"
    raw = pickle.dumps({"data": Canary(touched), "labels": []}, protocol)
    path = tmp_path / "batch"
    path.write_bytes(raw)
    with pytest.raises(
        DataError, match=r"refused as a data file because of the name (posix|nt)\.mkdir.*nothing in it was run"
    ):
        load_pickle(path)
    assert not touched.exists()
    pickle.loads(raw)
    assert touched.exists()  # the canary is alive: an ordinary reader would have run it


def refused(tmp_path: Path, raw: bytes) -> str:
    path = tmp_path / "batch"
    path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        load_pickle(path)
    return str(caught.value)


def test_other_ways_in(tmp_path: Path) -> None:
    cases = {
        "builtins.eval": b"\x80\x02cbuiltins\neval\nU\x011\x85R.",
        "os.system": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        "numpy.load": b"\x80\x02cnumpy\nload\n.",
        "numpy.core.multiarray.scalar": b"\x80\x02cnumpy.core.multiarray\nscalar\n.",
        "_codecs.decode": b"\x80\x02c_codecs\ndecode\n.",
        "instruction INST": b"(ios\nsystem\n.",
        "instruction OBJ": b"(cnumpy\nndarray\no.",
        "instruction NEWOBJ": b"\x80\x02cnumpy\nndarray\n)\x81.",
        "instruction EXT1": b"\x80\x02\x82\x01.",
        "instruction PERSID": b"P1\n.",
        "instruction BINPERSID": b"K\x01Q.",
        "unknown way": b"\x80\x02cnumpy\nndarray\n)R.",
        "attempt to change a name": b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.",
        "element type b'O8'": b"\x80\x02cnumpy\ndtype\nU\x02O8\x85R.",
        "encoding 'zlib'": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R.",
    }
    for reason, raw in cases.items():
        assert reason in refused(tmp_path, raw), reason
    assert safepickle.NDARRAY is safepickle.ALLOWED["numpy", "ndarray"]  # the attempt left no trace


def test_memory_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = struct.pack("<I", 2**31 - 1)
    assert "more entries" in refused(tmp_path, b"\x80\x02Nr" + huge + b".")  # a memo of 2^31 entries
    assert "remain" in refused(tmp_path, b"\x80\x03B" + huge + b"abc.")  # bytes longer than the file
    assert "remain" in refused(tmp_path, b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"abc.")
    assert "remain" in refused(tmp_path, b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"abc.")
    good = python2_batch(b"abcd", 2)
    shape = b"K\x02M\x02\x00\x86"
    assert shape in good
    for wrong, reason in (
        (b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86", "reshape"),  # 2^62 elements out of four bytes
        (b"K\x02K\x03\x86", "reshape"),
        (b"K\x02J\xff\xff\xff\xff\x86", "do not fit together"),  # -1, which numpy would fill in
    ):
        assert reason in refused(tmp_path, good.replace(shape, wrong))
    monkeypatch.setattr(safepickle, "MAX_BYTES", 10)
    assert "was not opened" in refused(tmp_path, pickle.dumps({"data": 1}))


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of the byte strings that the changes make
def test_cut_and_changed_files_raise_data_errors_only(tmp_path: Path) -> None:
    raw = python2_batch(bytes(range(60)), 3)
    for n_bytes in range(len(raw)):
        refused(tmp_path, raw[:n_bytes])
    rng = random.Random(0)
    path = tmp_path / "batch"
    n_refused = 0
    for _ in range(200):
        changed = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            load_pickle(path)
        except DataError:
            n_refused += 1
    assert 50 < n_refused < 200  # pixels may change and still be pixels


def test_the_scan_runs_before_the_program(tmp_path: Path) -> None:
    raw = pickle.dumps({"data": [1, 2, 3]}, 2)
    names = {opcode.name for opcode, _, _ in pickletools.genops(io.BytesIO(raw))}
    assert names <= safepickle.OPCODES
    for name in ("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "NEXT_BUFFER"):
        assert name not in safepickle.OPCODES
