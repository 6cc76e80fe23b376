"""`bench kernels`: what it returns, prints and draws; the figures themselves are the machine's."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from twinkv_edge import twins
from twinkv_edge.bench import kernels, real_keys
from twinkv_edge.errors import InputError


@pytest.fixture(scope="module")
def result():
    return kernels.run(sizes=(300, 64), dims=(32,), repeats=2, n_threads=2)


def test_every_backend_and_instruction_set_is_there(result):
    names = {row["name"] for row in result["rows"] if row["operation"] == "twin_counts"}
    assert names >= {"numpy reference"} | {f"native {isa}" for isa, here in twins.isas().items() if here}
    for row in result["rows"]:
        assert row["rate"] == pytest.approx(2 * row["n"] ** 2 * row["d"] / row["seconds"])
        assert row["fastest"] <= row["seconds"]
        assert row["vs_numpy"] > 0
        assert set(row["of_peak"]) == set(result["peaks"])
    assert [row["vs_numpy"] for row in result["rows"] if row["backend"] == "numpy reference"] == [1.0, 1.0]
    assert twins.isa() == next(isa for isa, here in twins.isas().items() if here)  # the best again
    json.dumps(result)


def test_table_and_plot(result, tmp_path):
    table = kernels.markdown(result)
    assert table.count("\n| twin_counts") == sum(row["operation"] == "twin_counts" for row in result["rows"])
    pytest.importorskip("matplotlib")
    kernels.plot(result, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").read_bytes()[:4] == b"\x89PNG"


def test_figures_hold_or_not():
    def row(operation, name, seconds, vs_numpy=None):
        shape = {"n": 8192, "d": 128}
        return {"operation": operation, "name": name, "seconds": seconds, "rate": 1e12, "vs_numpy": vs_numpy, **shape}

    best = f"native {twins.isa()}"
    rows = [row("twin_counts", best, 0.01, 61.0), row("best_twin", best, 0.008), row("twin_counts", "numba", 0.1, 4.0)]
    rows += [row("repair", best, 0.01), row("repair by coverage", best, 0.02)]
    got = kernels.figures({"rows": rows, "peaks": {"bf16 AVX-512": 0.5e12}})
    avx2 = 61.0 if best in ("native avx2", "native avx2int8") else None  # where that is the best there is
    assert [f.got for f in got] == [61.0, 2.0, avx2, pytest.approx(0.8), 2.0, 4.0]
    assert [f.holds for f in got] == [True, True, avx2 and True, True, False, False]


def test_benchmark_keys_have_twins_like_a_cache():
    keys = kernels.clustered_keys(2000, 64)
    counts = twins.twin_counts(keys, 0.85)
    assert 0.001 < counts.mean() / 2000 < 0.05
    np.testing.assert_array_equal(counts, kernels.numpy_reference(keys, 0.85))


@pytest.mark.parametrize("bad", [{"sizes": ()}, {"dims": (0,)}, {"repeats": 0}, {"backends": ["fpga"]}])
def test_bad_input_is_refused(bad):
    with pytest.raises(InputError):
        kernels.run(**{"sizes": (32,), "dims": (8,), **bad})


def test_real_keys(tiny: Callable[[str], str], qwen3_tiny: str) -> None:
    found = real_keys.run(tiny("tiny-mqa"), n_tokens=300, tau=0.5, n_threads=1)
    assert (found["n_heads"], found["d"], found["mismatches"]) == (2, 64, 0)
    assert 0 < found["with_twins"] < 1
    assert "0 of 600 counts differ" in real_keys.markdown(found)
    with pytest.raises(InputError, match="no vocabulary"):  # llama.cpp would abort
        real_keys.run(qwen3_tiny, n_tokens=300)


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0.85, 0.9])
def test_no_count_of_a_real_cache_differs(smollm2: str, tau: float) -> None:
    assert real_keys.run(smollm2, n_tokens=6144, tau=tau)["mismatches"] == 0
