"""What `twinkv-edge models` shows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from gguf_bytes import decoder, write
from rich.console import Console

from twinkv_edge import models


def test_description() -> None:
    got = models.describe(models.default_model(), target_tokens=1024)
    json.dumps(got)
    assert (got["supported"], got["reason"], got["model"]["kinds"]) == (True, None, [])
    assert got["model"]["bytes_per_token_f16"] == 23040
    assert [(r["n_cells"], r["plan"]["type_k"]) for r in got["estimates"]] == [
        (n, kind) for n in (2048, 8192) for kind in ("f16", "q8_0", "q4_0")
    ]
    assert all(r["n_kept"] == 1024 for r in got["estimates"])
    assert len(models.describe(models.default_model(), 3000)["estimates"]) == 3
    text = shown(got)
    for word in ("llama 135M", "9 query, 3 K/V of 64", "0.90 (no QK-norm)", "22.5 KB per token", "1024"):
        assert word in text


def shown(description: dict[str, object]) -> str:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(models.render(description))
    return console.export_text()


def test_description_of_what_cannot_be_evicted_from(tmp_path: Path) -> None:
    got = models.describe(models.random_model("tiny-mamba", path=tmp_path / "m.gguf"))
    assert (got["supported"], got["estimates"], got["model"]["kinds"]) == (False, [], ["recurrent"])
    assert "no: is recurrent" in shown(got)


def test_a_models_name_is_not_markup(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", decoder() | {"general.name": "[/bold] [red]x"})
    assert "[/bold] [red]x" in shown(models.describe(path))


def test_description_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkv_edge.models.description.free_memory", lambda: 290 << 20)
    got = models.describe(models.default_model())
    assert [r["fits"] for r in got["estimates"]] == [True, True, True, False, True, True]
    assert "no: --type-k q8_0 --type-v q8_0" in shown(got)


def test_cache_types_that_do_not_divide_the_heads_are_left_out(tmp_path: Path) -> None:
    shape = decoder(attention__key_length=80, attention__value_length=80)
    got = models.describe(write(tmp_path / "m.gguf", shape), 512)
    assert [r["plan"]["type_k"] for r in got["estimates"]] == ["f16"]
