"""Random models: true shapes, valid weights, loadable, and never half written."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFReader, dequantize

from twinkv_edge import models
from twinkv_edge.errors import InputError
from twinkv_edge.models.gguf_header import read_header
from twinkv_edge.models.random_blocks import QUANTS, ggml_type, random_chunks
from twinkv_edge.models.shapes import SHAPES, llama3_rope_factors, shape_of
from twinkv_edge.models.vocabulary import vocabulary

TINY = [name for name in SHAPES if name.startswith("tiny")]
TEXT = "The quick brown fox, 1234 times: Übermut tut selten gut!"


@contextmanager
def loaded(path: Path, **options: object) -> Iterator[llama_cpp.Llama]:
    llm = llama_cpp.Llama(str(path), n_ctx=512, verbose=False, n_threads=1, **options)
    try:
        yield llm
    finally:
        llm.close()


def last_logits(llm: llama_cpp.Llama) -> np.ndarray:
    """Logits of the last token, [vocab]."""
    pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(pointer, (llm.n_vocab(),)).copy()


def check_decoding(path: Path) -> None:
    """Prefill and 8 greedy tokens: all logits finite, and spread as a trained model's are."""
    with loaded(path) as llm:
        llm.eval(llm.tokenize(TEXT.encode()))
        for _ in range(8):
            logits = last_logits(llm)
            assert np.isfinite(logits).all()
            assert 1 < logits.std() < 12
            llm.eval([int(logits.argmax())])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny model of that name, written once."""
    directory = tmp_path_factory.mktemp("tiny")

    @cache
    def make(like: str) -> Path:
        return models.random_model(like, path=directory / f"{like}.gguf")

    return make


@pytest.mark.parametrize("like", TINY)
def test_tiny_models_decode(like: str, tiny: Callable[[str], Path]) -> None:
    check_decoding(tiny(like))
    model, shape = models.facts(tiny(like)), SHAPES[like]
    assert (model.architecture, model.n_layer, model.n_embd) == (
        shape.architecture,
        shape.n_layer,
        shape.n_embd,
    )
    assert (model.n_vocab, model.n_ctx_train) == (shape.n_vocab, shape.n_ctx_train)
    assert model.rope_freq_base == shape.rope_freq_base
    assert model.has_qk_norm is shape.qk_norm
    assert model.n_swa == shape.n_swa


@pytest.mark.parametrize("like", TINY)
def test_llama_cpp_reads_the_same_facts(like: str, tiny: Callable[[str], Path]) -> None:
    model = models.facts(tiny(like))
    with loaded(model.path) as llm:
        theirs = llm.model
        assert llama_cpp.llama_model_n_layer(theirs) == model.n_layer
        assert llama_cpp.llama_model_n_embd(theirs) == model.n_embd
        assert llama_cpp.llama_model_n_ctx_train(theirs) == model.n_ctx_train
        if model.cache_layers:
            assert llama_cpp.llama_model_n_head(theirs) == model.n_head
            assert llama_cpp.llama_model_n_head_kv(theirs) == model.n_head_kv_by_layer[0]
        assert llama_cpp.llama_model_n_swa(theirs) == model.n_swa
        assert llama_cpp.llama_model_is_recurrent(theirs) == model.is_recurrent
        assert llama_cpp.llama_model_is_hybrid(theirs) == model.is_hybrid
        assert llama_cpp.llama_model_size(theirs) == model.weight_bytes
        mrope = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)
        assert (llama_cpp.llama_model_rope_type(theirs) in mrope) is model.is_m_rope


@pytest.mark.parametrize("quant", QUANTS)
def test_every_quant_decodes(quant: str, tmp_path: Path) -> None:
    path = models.random_model("tiny-untied", path=tmp_path / "m.gguf", quant=quant)
    check_decoding(path)
    tensors = read_header(path).tensors
    assert tensors["blk.0.ffn_up.weight"].kind.name == quant
    assert tensors["blk.0.attn_norm.weight"].kind.name == "f32"
    # rows of 128 are not whole blocks of q6_K's 256
    assert tensors["output.weight"].kind.name == ("q8_0" if quant.startswith("q") else quant)
    assert models.facts(path).quantization == ("q8_0" if quant == "q4_0" or quant == "q4_1" else quant)


@pytest.mark.parametrize("name", [*QUANTS, "q6_K"])
def test_weights_have_the_standard_deviation_asked_for(name: str) -> None:
    from gguf import GGMLQuantizationType

    number, kind = ggml_type(name)
    rng, n = np.random.default_rng(7), 256 * 4096
    raw = np.concatenate(list(random_chunks(kind, n, 0.02, rng)))
    assert raw.nbytes == n // kind.block * kind.size
    values = dequantize(raw.reshape(256, -1), GGMLQuantizationType(number)).astype(np.float64)
    assert values.size == n
    assert values.std() == pytest.approx(0.02, rel=0.01)
    # means: of all, and of each row, which would otherwise share an offset
    assert abs(values.mean()) < 0.02 * 4 / math.sqrt(n)
    assert np.abs(values.mean(axis=1)).max() < 0.02 * 5 / math.sqrt(4096)


def test_pieces_do_not_depend_on_being_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor is made in pieces, none of them larger than asked for."""
    _, kind = ggml_type("q4_0")
    monkeypatch.setattr("twinkv_edge.models.random_blocks._CHUNK", 1000 * kind.size)
    pieces = list(random_chunks(kind, 32 * 2500, 1.0, np.random.default_rng(0)))
    assert [p.nbytes // kind.size for p in pieces] == [1000, 1000, 500]


def test_embedded_shape_is_that_of_the_embedded_model() -> None:
    """Tensor by tensor; the real file's metadata, too."""
    real = read_header(models.default_model())
    shape = shape_of("smollm2-135m")
    assert {p.name: p.shape for p in shape.parts()} == {t.name: t.shape for t in real.tensors.values()}
    for key, value in shape.metadata().items():
        if f"llama.{key}" in real.metadata:
            assert real.metadata[f"llama.{key}"] == pytest.approx(value), key
    assert set(shape.metadata()) - {k.removeprefix("llama.") for k in real.metadata} == {
        "attention.key_length",  # 576 / 9, which llama.cpp computes where the file is silent
        "attention.value_length",
    }


@pytest.mark.parametrize(
    ("like", "parameters"),
    [("smollm2-135m", 134_515_008), ("llama-3.2-1b", 1_235_814_400), ("qwen3-4b", 4_022_468_096)],
)
def test_parameter_counts_are_the_published_ones(like: str, parameters: int) -> None:
    parts = shape_of(like).parts()
    assert sum(math.prod(p.shape) for p in parts if p.name != "rope_freqs.weight") == parameters


def test_llama3_rope_factors() -> None:
    """Against the formula in the form transformers writes it, on the frequencies themselves."""
    got = np.array(llama3_rope_factors(64, 500000.0, 32.0, 1.0, 4.0, 8192))
    inverse = 1.0 / 500000.0 ** (np.arange(0, 64, 2) / 64)
    wavelength = 2 * np.pi / inverse
    scaled = np.where(wavelength > 8192 / 1.0, inverse / 32, inverse)
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    between = (1 - smooth) * scaled / 32 + smooth * scaled
    medium = (wavelength >= 8192 / 4.0) & (wavelength <= 8192 / 1.0)
    np.testing.assert_allclose(inverse / got, np.where(medium, between, scaled), rtol=1e-12)
    assert (got[0], got[-1]) == (1.0, 32.0)
    assert (np.diff(got) >= 0).all()
    assert 0 < medium.sum() < 32


def test_rope_factors_are_in_the_file(tiny: Callable[[str], Path]) -> None:
    path = tiny("tiny-llama3")
    tensor = next(t for t in GGUFReader(path).tensors if t.name == "rope_freqs.weight")
    expected = llama3_rope_factors(64, 500000.0, 32.0, 1.0, 4.0, 8192)
    np.testing.assert_array_equal(tensor.data, np.array(expected, np.float32))
    assert models.facts(path).has_rope_factors
    long = models.facts(tiny("tiny-phi3"))
    assert (long.has_rope_factors, long.rope_scaling_type, long.rope_orig_ctx) == (True, "longrope", 4096)


@pytest.mark.parametrize("n", [512, 1024, 49152, 60000])
def test_vocabulary(n: int) -> None:
    words = vocabulary(n)
    assert len(words.tokens) == len(words.types) == n
    assert len(set(words.tokens)) == n
    known = set(words.tokens)
    assert all("".join(m.split(" ")) in known and set(m.split(" ")) <= known for m in words.merges)
    assert words.types[49152:] == [5] * max(n - 49152, 0)
    assert words.rest["tokenizer.ggml.model"] == "gpt2"


def test_vocabulary_too_small() -> None:
    with pytest.raises(InputError, match="at least 512"):
        vocabulary(511)


def test_text_survives_the_tokenizer(tiny: Callable[[str], Path]) -> None:
    with loaded(tiny("tiny-llama")) as llm:
        tokens = llm.tokenize(TEXT.encode(), add_bos=False)
        assert llm.detokenize(tokens).decode() == TEXT
        assert len(tokens) < len(TEXT)  # merges are there
        assert llm.create_completion("Hello", max_tokens=3, temperature=0)["usage"]["completion_tokens"] <= 3
        assert "<|im_start|>" in llm.metadata["tokenizer.chat_template"]


# VmHWM, as ru_maxrss counts the parent's pages before exec as the child's
WRITE_AND_MEASURE = """
import re, sys
from twinkv_edge import models
models.random_model("llama-3.2-1b", 1, sys.argv[1])
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.skipif("sys.platform != 'linux'")
def test_true_shape_in_bounded_memory(tmp_path: Path) -> None:
    """One layer of Llama-3.2-1B: 250 MB, most of it the embedding of 128,256 tokens."""
    big = tmp_path / "m.gguf"
    command = [sys.executable, "-c", WRITE_AND_MEASURE, str(big)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 160 << 10  # 60 MB of them are Python, numpy and gguf
    model = models.facts(big)
    # q6_K embedding, q4_0 matrices, f32 norms and RoPE factors
    matrices = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
    assert model.weight_bytes == 2048 * 128256 // 256 * 210 + matrices // 32 * 18 + 4 * (3 * 2048 + 32)
    assert (model.n_vocab, model.n_ctx_train, model.n_layer) == (128256, 131072, 1)
    assert (model.n_head, model.n_head_kv, model.head_dim_k) == (32, 8, 64)
    assert read_header(big).tensors["token_embd.weight"].kind.name == "q6_K"
    with loaded(big) as llm:  # the padding is there to make the size true, and no text becomes it
        tokens = llm.tokenize(TEXT.encode(), add_bos=False)
        assert max(tokens) < 49152
        assert llm.detokenize(tokens).decode() == TEXT
    check_decoding(big)
    big.unlink()


def test_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = models.random_model(
        "tiny-llama", path=tmp_path / "m.gguf", progress=lambda done, total: seen.append((done, total))
    )
    total = models.facts(path).weight_bytes
    assert seen[-1] == (total, total)
    assert all(a[0] < b[0] for a, b in itertools.pairwise(seen))


def test_qwen3_4b_layer_decodes(tmp_path: Path) -> None:
    path = models.random_model("qwen3-4b", 1, tmp_path / "m.gguf")
    model = models.facts(path)
    assert (model.default_tau, model.head_dim_k, model.n_head_kv, model.n_vocab) == (0.85, 128, 8, 151936)
    check_decoding(path)


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    a, b, c = (
        models.random_model("tiny-llama", path=tmp_path / f"{i}.gguf", seed=seed).read_bytes()
        for i, seed in enumerate((1, 1, 2))
    )
    assert a == b
    assert a != c
    assert len(a) == len(c)


def test_layers(tmp_path: Path) -> None:
    """The first layers of a longer model are those of a shorter one."""
    one, three = (models.random_model("tiny-untied", n, tmp_path / f"{n}.gguf") for n in (1, 3))
    short = {t.name: t.data.tobytes() for t in GGUFReader(one).tensors}
    long = {t.name: t.data.tobytes() for t in GGUFReader(three).tensors}
    assert (models.facts(one).n_layer, models.facts(three).n_layer) == (1, 3)
    same = [name for name in short if "attn_output" not in name and "ffn_down" not in name]
    assert all(short[name] == long[name] for name in same)
    assert len(long) == len(short) + 2 * sum(name.startswith("blk.0.") for name in short)
    assert models.facts(models.random_model("tiny-deci", 3, tmp_path / "d.gguf")).n_head_kv_by_layer == (
        2,
        1,
        2,
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"like": "gpt-5"}, "no shape called 'gpt-5'; there are smollm2-135m"),
        ({"layers": 0}, "from 1 to 512"),
        ({"layers": 513}, "from 1 to 512"),
        ({"layers": True}, "from 1 to 512"),
        ({"quant": "q2_K"}, "is not one of f32"),
        ({"quant": "q6_K"}, "is not one of f32"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"path": "/no/such/directory/m.gguf"}, "make it first"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=why):
        models.random_model(**({"like": "tiny-llama", "path": tmp_path / "m.gguf"} | arguments))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(InputError, match="give another path"):
        models.random_model("tiny-llama", path=tmp_path / "m.gguf")


def test_a_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("twinkv_edge.models.random_gguf._write_weights", full)
    with pytest.raises(InputError, match=r"m\.gguf can't be written: No space left on device"):
        models.random_model("tiny-llama", path=tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    with pytest.raises(InputError, match="can't be written: Is a directory"):
        models.random_model("tiny-llama", path=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"before")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.random_model("tiny-llama", path=path, progress=stop)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    models.random_model("tiny-llama", path=path)
    assert models.facts(path).n_layer == 2
    assert list(tmp_path.iterdir()) == [path]


def test_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = models.random_model("tiny-mqa")
    assert path == tmp_path / "twinkv-edge" / "random" / "tiny-mqa-2x-q4_0-seed0.gguf"
    os.utime(path, (1, 1))
    assert models.random_model("tiny-mqa") == path
    assert path.stat().st_mtime == 1  # used again
    assert models.random_model("tiny-mqa", quant="f16") != path
    assert models.random_model("tiny-mqa", 1) != path
    assert models.random_model("tiny-mqa", seed=1) != path
    path.write_bytes(path.read_bytes()[:-5000])
    assert models.random_model("tiny-mqa") == path  # a damaged one is made again
    assert models.facts(path).n_head_kv == 1
