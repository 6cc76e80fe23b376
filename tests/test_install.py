"""What a mismatched, missing or half installation says."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata

import pytest

import twinkv_edge as tk
from twinkv_edge import _versions


def test_another_llama_cpp_than_the_one_built_against(monkeypatch: pytest.MonkeyPatch) -> None:
    _versions.check_versions()
    monkeypatch.setattr(metadata, "version", lambda name: "0.3.99")
    with pytest.raises(tk.InstallError, match=r"0\.3\.99 is installed; reinstall"):
        _versions.check_versions()
    with pytest.raises(ImportError):
        importlib.reload(tk)


def test_without_the_extension_the_kernels_run_on_numba_and_the_rest_says_what_to_do() -> None:
    code = """
import sys, warnings
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "twinkv_edge._native":
            raise ImportError("not built here")
sys.meta_path.insert(0, Block())
import numpy as np, twinkv_edge as tk
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    counts = tk.twin_counts(np.ones((80, 4), np.float32), 0.9)
    tk.twin_counts(np.ones((80, 4), np.float32), 0.9)
assert counts[0] == 47, counts
assert len(caught) == 1 and "not built here" in str(caught[0].message), caught
try:
    tk.CompressedLlama()
except tk.InstallError as e:
    assert "reinstall" in str(e), e
else:
    raise SystemExit("it opened a model without the extension")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_no_llama_cpp() -> None:
    code = "import sys, twinkv_edge; assert 'llama_cpp' not in sys.modules and 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_kernels_and_llama_cpp_share_one_library() -> None:
    """Loaded in the wrong order there would be two llama.cpp in the process."""
    code = """
import numpy as np, twinkv_edge as tk
tk.twin_counts(np.ones((80, 4), np.float32), 0.9, backend="native")
import llama_cpp
paths = {line.split()[-1] for line in open("/proc/self/maps") if "libllama" in line}
assert len(paths) == 1, paths
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc/self/maps")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
