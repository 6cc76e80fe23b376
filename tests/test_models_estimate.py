"""What a session costs: exact where llama.cpp is exact, and honest about whether it fits."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import llama_cpp
import pytest
from gguf_bytes import decoder, write
from hypothesis import given
from hypothesis import strategies as st

from twinkv_edge import models
from twinkv_edge.errors import InputError, UnsupportedModelError
from twinkv_edge.models.footprint import Estimate, kept_tokens, padded
from twinkv_edge.models.ggml_types import CACHE_TYPES

DATA = Path(__file__).parent / "data"
GB = 1 << 30


@pytest.fixture(scope="module")
def smollm() -> models.ModelFacts:
    return models.facts(models.default_model())


# ---- against llama.cpp ----


@pytest.fixture(scope="module")
def llama_log() -> Iterator[Callable[..., dict[str, float]]]:
    """Makes a context in llama.cpp and returns the buffer sizes, in bytes, that it prints."""
    lines: list[str] = []

    @llama_cpp.llama_log_callback
    def keep(_: int, text: bytes, __: ctypes.c_void_p) -> None:
        lines.append(text.decode(errors="replace"))

    llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
    loaded: dict[Path, object] = {}

    def sizes(path: Path, n_ctx: int, kind: str, n_batch: int, flash: bool, swa_full: bool) -> dict[str, float]:
        if path not in loaded:
            loaded[path] = llama_cpp.llama_model_load_from_file(
                str(path).encode(), llama_cpp.llama_model_default_params()
            )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_batch
        params.type_k = params.type_v = CACHE_TYPES[kind]
        params.flash_attn_type, params.swa_full = int(flash), swa_full
        lines.clear()
        context = llama_cpp.llama_init_from_model(loaded[path], params)
        assert context, lines[-5:]
        text = "".join(lines)
        llama_cpp.llama_free(context)

        def total(what: str) -> float:
            found = re.findall(what + r" buffer size =\s*([\d.]+) MiB", text)
            assert found, text
            return sum(map(float, found)) * (1 << 20)

        return {"kv": total("KV"), "compute": total("compute")}

    yield sizes
    for model in loaded.values():
        llama_cpp.llama_model_free(model)
    llama_cpp.llama_log_set(ctypes.cast(None, llama_cpp.llama_log_callback), ctypes.c_void_p(0))


CONTEXTS = [
    # n_ctx, cache type, n_batch, flash attention, full sliding caches
    (512, "f16", 512, True, True),
    (1000, "f16", 512, True, True),
    (4096, "f32", 512, True, True),
    (4096, "bf16", 512, True, True),
    (4096, "q8_0", 512, True, True),
    (4096, "q4_1", 512, True, True),
    (4096, "q5_0", 128, True, True),
    (4096, "q5_1", 128, True, False),
    (4096, "iq4_nl", 512, True, False),
    (4096, "q4_0", 64, True, False),
    (2048, "f16", 512, False, True),
    (300, "f16", 1024, False, False),
]


@pytest.fixture(scope="module", params=["smollm2", "golden qwen3", "tiny-gemma3", "tiny-mqa", "tiny-deci"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "smollm2":
        return models.default_model()
    if request.param == "golden qwen3":
        return DATA / "qwen3-tiny-f32.gguf"
    return models.random_model(request.param, path=tmp_path_factory.mktemp("models") / "tiny.gguf")


def test_agrees_with_what_llama_cpp_allocates(any_model: Path, llama_log: Callable[..., dict[str, float]]) -> None:
    for n_ctx, kind, n_batch, flash, swa_full in CONTEXTS:
        if not flash and models.facts(any_model).architecture == "deci":
            continue  # llama.cpp pads V to the widest layer then
        real = llama_log(any_model, n_ctx, kind, n_batch, flash, swa_full)
        ours = models.estimate(
            any_model, n_ctx, type_k=kind, type_v=kind, n_batch=n_batch, flash_attn=flash, swa_full=swa_full
        )
        assert ours.cache_allocated == pytest.approx(real["kv"], abs=0.011 * (1 << 20)), (n_ctx, kind)
        # an upper bound, and not a wild one
        assert real["compute"] <= ours.compute + 0.011 * (1 << 20), (n_ctx, kind, n_batch, flash)
        assert ours.compute <= 1.15 * real["compute"] + (1 << 20), (n_ctx, kind, n_batch, flash)


# ---- arithmetic ----


def test_embedded_model_by_hand(smollm: models.ModelFacts) -> None:
    got = models.estimate(smollm, 8000, 6144, target_tokens=1024, free=GB)
    per_cell = 2 * 30 * 3 * 64 * 2  # K and V, layers, heads, elements, bytes of f16
    assert got.n_cells == 8192
    assert got.cache_allocated == 8192 * per_cell
    assert (got.cache_full, got.cache_kept, got.n_kept) == (6144 * per_cell, 1024 * per_cell, 1024)
    assert got.weights == smollm.weight_bytes
    assert got.needed == got.weights + got.cache_allocated + got.compute
    assert (got.fits, got.suggestion, got.free) == (True, None, GB)
    bounded = models.estimate(smollm, 2048, 6144, target_tokens=1024, prefill="bounded", free=GB)
    assert bounded.cache_full == (1024 + 512) * per_cell
    assert bounded.cache_kept == got.cache_kept


def test_defaults(smollm: models.ModelFacts) -> None:
    got = models.estimate(models.default_model())
    assert (got.plan.n_ctx, got.plan.n_tokens, got.n_kept) == (8192, 8192, 8192)
    assert got.cache_kept == got.cache_full == got.cache_allocated
    assert got.free is None or got.fits is (got.needed <= got.free)
    # a context beyond the trained length is llama.cpp's to warn about; the document ends where training did
    assert models.estimate(smollm, 16384).plan.n_tokens == 8192
    json.dumps(got.as_dict())


def test_sliding_layers_are_not_evicted_from(tmp_path: Path) -> None:
    path = models.random_model("tiny-gemma3", path=tmp_path / "m.gguf")  # 5 sliding layers, 1 dense
    per_layer = 2 * 2 * 64 * 2
    full = models.estimate(path, 4096, 4000, ratio=0.5)
    assert full.cache_allocated == 6 * 4096 * per_layer
    assert full.cache_kept == (2000 + 5 * 4000) * per_layer
    small = models.estimate(path, 4096, 4000, ratio=0.5, swa_full=False)
    assert small.cache_allocated == (4096 + 5 * 768) * per_layer  # window of 256 and a batch of 512
    assert small.cache_kept == (2000 + 5 * 768) * per_layer


def test_mla_keeps_no_values(tmp_path: Path) -> None:
    shape = decoder("deepseek2", attention__kv_lora_rank=128, attention__head_count_kv=1)
    shape |= {"deepseek2.attention.key_length": 160, "deepseek2.attention.value_length": 128}
    got = models.estimate(write(tmp_path / "m.gguf", shape), 256)
    assert got.cache_allocated == 256 * 2 * 160 * 2


@given(n=st.integers(1, 10**6), percent=st.integers(0, 99))
def test_kept_tokens_is_computed_on_the_decimal(n: int, percent: int) -> None:
    kept = kept_tokens(n, percent / 100)
    exact = n * (1 - Fraction(percent, 100))
    assert kept == -(-exact.numerator // exact.denominator)
    assert 1 <= kept <= n


def test_kept_tokens_bounds() -> None:
    assert kept_tokens(10, 0.9) == 1  # (1 - 0.9) * 10 is 0.9999999999999998 in floats, 1.0000000000000002 for 0.7...
    assert kept_tokens(10, 0.7) == 3
    assert kept_tokens(100, 0.5, target_tokens=30) == 30
    assert kept_tokens(20, 0.5, target_tokens=30) == 20
    for ratio in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(InputError, match=r"ratio must be in \[0, 1\)"):
            kept_tokens(10, ratio)
    with pytest.raises(InputError, match="target_tokens"):
        kept_tokens(10, 0.0, target_tokens=0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"n_ctx": 0}, "must be at least 1"),
        ({"n_tokens": 0}, "must be at least 1"),
        ({"n_batch": 0}, "must be at least 1"),
        ({"prefill": "lazy"}, "prefill must be"),
        ({"n_tokens": 8193, "n_ctx": 16384}, "trained for"),
        ({"n_tokens": 4000, "n_ctx": 2048}, 'use n_ctx=4096 or prefill="bounded"'),
        ({"n_tokens": 8000, "n_ctx": 1024, "target_tokens": 1024, "prefill": "bounded"}, "use n_ctx=1536$"),
        ({"type_k": "q3_K"}, "is not one of"),
        ({"type_v": "q8_0", "flash_attn": False}, "needs flash_attn"),
        ({"ratio": 1.0}, "ratio must be in"),
    ],
)
def test_bad_options(smollm: models.ModelFacts, options: dict[str, object], why: str) -> None:
    with pytest.raises(InputError, match=why):
        models.estimate(smollm, **options)  # type: ignore[arg-type]


def test_models_without_a_cache(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is recurrent"):
        models.estimate(write(tmp_path / "m.gguf", decoder("mamba", attention__head_count=0)))
    with pytest.raises(InputError, match="no model at"):
        models.estimate(tmp_path / "none.gguf")


# ---- what would fit ----


def follow(smollm: models.ModelFacts, got: Estimate) -> Estimate:
    """The estimate of the suggested options."""
    assert got.suggestion is not None
    words = got.suggestion.split()
    options = {w[2:].replace("-", "_"): v for w, v in zip(words[::2], words[1::2], strict=True)}
    plan = replace(got.plan, **{k: int(v) if v.isdigit() else v for k, v in options.items()})
    return models.estimate(
        smollm, plan.n_ctx, plan.n_tokens, type_k=plan.type_k, type_v=plan.type_v, ratio=plan.ratio,
        target_tokens=plan.target_tokens, prefill=plan.prefill, n_batch=plan.n_batch, free=got.free,
    )  # fmt: skip


@given(free_mb=st.integers(120, 400), n_tokens=st.integers(100, 8000), ratio=st.sampled_from([0.0, 0.5, 0.9]))
def test_what_is_suggested_fits(smollm: models.ModelFacts, free_mb: int, n_tokens: int, ratio: float) -> None:
    got = models.estimate(smollm, 8192, n_tokens, ratio=ratio, free=free_mb << 20)
    if got.fits:
        assert got.suggestion is None
    elif got.suggestion and got.suggestion.startswith("--"):
        assert follow(smollm, got).fits
    else:  # 92 MB of weights and a compute buffer of 25 MB for batches of 128
        assert got.needed > got.free  # type: ignore[operator]
        assert free_mb < 130


def test_suggestions_from_gentle_to_hard(smollm: models.ModelFacts) -> None:
    def suggested(free_mb: int, n_tokens: int = 8000) -> str | None:
        return models.estimate(smollm, 8192, n_tokens, free=free_mb << 20).suggestion

    assert suggested(400) is None
    assert suggested(300, n_tokens=3000) == "--n-ctx 3584"
    assert suggested(300) == "--n-batch 128"
    assert suggested(290) == "--type-k q8_0 --type-v q8_0"
    assert suggested(220) == "--type-k q8_0 --type-v q8_0 --n-batch 128"
    assert suggested(180) == "--type-k q4_0 --type-v q4_0 --n-batch 128"
    assert suggested(160) == "--prefill bounded --target-tokens 1000 --n-ctx 1792 --n-batch 128"
    assert (suggested(100) or "").startswith("no options help: with 92 MB of weights")


def test_no_eviction_suggested_where_it_is_impossible(tmp_path: Path) -> None:
    path = models.random_model("tiny-deci", path=tmp_path / "m.gguf")
    tiny = models.estimate(path, 4096, 4096, free=600 << 10)
    assert tiny.fits is False
    assert "bounded" not in (tiny.suggestion or "bounded")


def test_padding_is_llama_cpps() -> None:
    assert [padded(n) for n in (1, 256, 257, 8192)] == [256, 256, 512, 8192]


def test_compute_grows_with_the_batch(smollm: models.ModelFacts) -> None:
    large, small = (models.estimate(smollm, 8192, n_batch=n).compute for n in (512, 128))
    assert large == 4 * small
