"""docs/adding-a-policy.md does what it says: its code runs, registered here or found in somebody's package."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import twinkv_edge as tk
from twinkv_edge import policies

PAGE = Path(__file__).parent.parent / "docs" / "adding-a-policy.md"


def example() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert found
    return found.group(1)


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An installed package with the example in it and an entry point, as pip leaves them."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "vnorm.py").write_text(example(), encoding="utf-8")
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[twinkv_edge.policies]\nvnorm = my_package.vnorm:VNorm\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield "vnorm"
    for name in ("my_package", "my_package.vnorm"):
        sys.modules.pop(name, None)


def test_the_example_is_30_lines_at_most() -> None:
    assert len(example().splitlines()) <= 30


def test_a_third_party_policy_is_found_and_compresses(
    third_party: str, qwen3_tiny: str, golden_qwen3: Any, open_llm: Callable[..., tk.CompressedLlama]
) -> None:
    assert third_party in policies.names()
    cfg = tk.Compression(policy=third_party, ratio=0.5, repair="none", policy_options={"power": 2.0})
    llm = open_llm(qwen3_tiny, compression=cfg)
    llm.eval(golden_qwen3["tokens"].tolist()[:400])
    norms = np.linalg.norm(llm.kv.values(0), axis=-1)[4:-64, 0]
    report = llm.compress()
    assert (report.policy, report.n_after) == ("vnorm", 200)
    kept = llm.kv.positions(0)[4:-64, 0]
    threshold = np.sort(norms)[-132]
    assert set(kept.tolist()) == set((np.flatnonzero(norms >= threshold) + 4).tolist())


def test_an_entry_point_that_is_no_policy(third_party: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package-1.0.dist-info" / "entry_points.txt").write_text(
        "[twinkv_edge.policies]\nvnorm = my_package.vnorm:np\n"
    )
    importlib.invalidate_caches()
    with pytest.raises(tk.InputError, match="names no subclass of Policy"):
        policies.available()
