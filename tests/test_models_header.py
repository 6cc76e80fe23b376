"""The reader of GGUF headers: right on whole files, an InputError and nothing else on broken ones."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

import pytest
from gguf_bytes import decoder, gguf, text, value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinkv_edge import models
from twinkv_edge.errors import InputError
from twinkv_edge.models.ggml_types import CACHE_TYPES, GGML_TYPES, cache_type, row_bytes
from twinkv_edge.models.gguf_header import Skipped, read_header

DATA = Path(__file__).parent / "data"

WHOLE = gguf(
    decoder("qwen3", n_layer=2)
    | {
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(40)],
        "tokenizer.ggml.scores": list(range(40)),
        "general.languages": ["en"],
        "qwen3.rope.freq_base": 1e6,
    },
    {"token_embd.weight": ((256, 4), 0), "blk.0.attn_k_norm.weight": ((64,), 0)},
)


def ggml_base() -> ctypes.CDLL:
    """The ggml that llama_cpp has loaded."""
    import llama_cpp

    library = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("*ggml-base.*"))))
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_name.restype = ctypes.c_char_p
    return library


def test_type_table_is_that_of_the_loaded_ggml() -> None:
    library = ggml_base()
    for number, kind in GGML_TYPES.items():
        assert library.ggml_type_name(number).decode() == kind.name
        assert library.ggml_type_size(number) == kind.size
        assert library.ggml_blck_size(number) == kind.block


def test_cache_types_by_name_and_number() -> None:
    for name, number in CACHE_TYPES.items():
        assert cache_type(name) == cache_type(name.upper()) == cache_type(number) == GGML_TYPES[number]
        assert cache_type(name).name == name
    for wrong in ("q6_K", "", 14, 99):
        with pytest.raises(InputError, match="is not one of f32, f16"):
            cache_type(wrong)
    assert row_bytes(cache_type("q8_0"), 192) == 6 * 34
    with pytest.raises(InputError, match="block of 32"):
        row_bytes(cache_type("q4_0"), 80)


def test_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(WHOLE)
    header = read_header(path)
    assert header.version == 3
    assert header.metadata["qwen3.block_count"] == 2
    assert header.metadata["qwen3.rope.freq_base"] == 1e6
    assert header.metadata["tokenizer.ggml.tokens"] == Skipped(40)
    assert header.metadata["tokenizer.ggml.scores"] == tuple(range(40))
    assert list(header.tensors) == ["token_embd.weight", "blk.0.attn_k_norm.weight"]
    assert header.tensors["token_embd.weight"].shape == (256, 4)
    assert header.weight_bytes == 4 * (256 * 4 + 64)
    kept = read_header(path, keep=frozenset({"tokenizer.ggml.tokens"}))
    assert kept.metadata["tokenizer.ggml.tokens"] == tuple(f"t{i}" for i in range(40))


def test_agrees_with_gguf_py() -> None:
    from gguf import GGUFReader

    path = DATA / "qwen3-tiny-f32.gguf"
    header, reader = read_header(path), GGUFReader(path)
    theirs = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == theirs
    assert [(t.name, t.shape, t.n_bytes) for t in header.tensors.values()] == [
        (t.name, tuple(int(n) for n in t.shape), int(t.n_bytes)) for t in reader.tensors
    ]


def test_vocabulary_longer_than_the_buffer(tmp_path: Path) -> None:
    """Strings are stepped over across the reader's buffer of 1 MB, also ones longer than it."""
    words = ["x" * 700, "", "y" * (3 << 20)] + ["z" * 50] * 40000
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf({"tokenizer.ggml.tokens": words, "after": 7}))
    assert read_header(path).metadata == {"tokenizer.ggml.tokens": Skipped(40003), "after": 7}
    whole = read_header(path, keep=frozenset({"tokenizer.ggml.tokens"}))
    assert whole.metadata["tokenizer.ggml.tokens"] == tuple(words)


def head(n_tensors: int, n_metadata: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_metadata) + rest


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = (1 << 64) - 1
BROKEN = {
    "empty": (b"", "is empty"),
    "short": (b"GGUF\3\0\0\0", "only 8 bytes"),
    "not gguf": (b"PK\3\4" + bytes(100), "does not begin with"),
    "a document": (b"Once upon a time there was a model " * 9, "does not begin with"),
    "version 1": (head(0, 0, bytes(99), version=1), "version 1"),
    "version 9": (head(0, 0, bytes(99), version=9), "version 9"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
    "huge metadata count": (head(0, HUGE, bytes(99)), "announces"),
    "huge tensor count": (head(HUGE, 0, bytes(99)), "announces"),
    "huge key": (head(0, 1, struct.pack("<Q", HUGE) + bytes(99)), "name of"),
    "huge string": (head(0, 1, text("k") + struct.pack("<IQ", 8, HUGE)), "middle of its header"),
    "huge array": (head(0, 1, text("k") + struct.pack("<IIQ", 9, 4, HUGE)), "middle of its header"),
    "huge string array": (head(0, 1, text("k") + struct.pack("<IIQ", 9, 8, HUGE)), "array of"),
    "array of arrays": (head(0, 1, text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(99)), "unknown type 9"),
    "unknown type": (head(0, 1, text("k") + struct.pack("<I", 77) + bytes(99)), "unknown type 77"),
    "no key": (head(0, 1, text("") + value(1) + bytes(9)), "is empty or there twice"),
    "key twice": (head(0, 2, 2 * (text("k") + value(1))), "is empty or there twice"),
    "alignment 0": (gguf({"general.alignment": 0}), "power of two"),
    "alignment text": (gguf({"general.alignment": "x"}), "power of two"),
    "too many dimensions": (head(1, 0, tensor("t", (1,) * 5) + bytes(99)), "5 dimensions"),
    "unknown tensor type": (head(1, 0, tensor("t", (32,), 31) + bytes(999)), "does not know"),
    "half a block": (head(1, 0, tensor("t", (33,), 2) + bytes(999)), "not whole blocks"),
    "tensor past the end": (head(1, 0, tensor("t", (32, 1 << 40)) + bytes(99)), "are missing"),
    "offset past the end": (head(1, 0, tensor("t", (32,), 0, HUGE) + bytes(99)), "are missing"),
    "tensor twice": (head(2, 0, 2 * tensor("t", (8,)) + bytes(999)), "same name"),
    "weights cut off": (WHOLE[:-40], "are missing"),
    "header cut off": (WHOLE[:300], "middle of its header"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file(name: str, tmp_path: Path) -> None:
    content, why = BROKEN[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=why) as caught:
        models.facts(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_path_that_is_no_readable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no model at"):
        models.facts(tmp_path / "missing.gguf")
    with pytest.raises(InputError, match="is a directory"):
        models.facts(tmp_path)
    with pytest.raises(InputError, match="can't be read"):
        models.facts("a\0b")
    with pytest.raises(InputError, match="can't be read"):
        models.facts(tmp_path / ("x" * 5000))
    os.mkfifo(tmp_path / "pipe")
    opened = os.open(tmp_path / "pipe", os.O_RDWR)  # so that opening the other end does not wait
    try:
        with pytest.raises(InputError, match="is not a file"):
            models.facts(tmp_path / "pipe")
    finally:
        os.close(opened)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # root may read everything, so the refusal is made
    with pytest.raises(InputError, match="Permission denied"):
        models.facts(tmp_path / "secret.gguf")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=6),
    length=st.integers(0, len(WHOLE)),
    cut=st.booleans(),
)
def test_damaged_bytes_never_crash(changes: list[tuple[int, int]], length: int, cut: bool, tmp_path: Path) -> None:
    content = bytearray(WHOLE)
    for at, byte in changes:
        content[at] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[:length] if cut else content)
    try:
        model = models.facts(path)
        models.why_not_rewritable(model)
        if model.cache_layers and model.head_dim_k % 32 == 0 == model.head_dim_v % 32:
            assert all(n > 0 for n in model.bytes_per_token("q8_0"))
    except InputError:
        pass
    else:
        assert model.weight_bytes <= len(WHOLE)
        assert 0 < model.n_layer <= 512


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rest=st.binary(max_size=300), n_tensors=st.integers(0, 3), n_metadata=st.integers(0, 3))
def test_random_headers_never_crash(rest: bytes, n_tensors: int, n_metadata: int, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    path.write_bytes(head(n_tensors, n_metadata, rest))
    with pytest.raises(InputError):  # none of them has a general.architecture
        models.facts(path)
