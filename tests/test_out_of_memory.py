"""Allocations that fail while evicting: in a child process whose address space is capped more and more tightly."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif("linux" not in sys.platform, reason="caps the address space, as only Linux does")

# Evicts under a cap of `spare` bytes above what the process has; prints what happened, and whether the cache is then
# as it was (when it failed) or as it is without a cap (when it did not).
CHILD = """
import json, resource, sys
import numpy as np, llama_cpp
import twinkv_edge as tk
from twinkv_edge import pipeline

model, way, policy = sys.argv[1:4]
llm = tk.CompressedLlama(model, n_ctx=2560, n_threads=1, n_threads_batch=1, compression=tk.Compression(policy=policy))
tokens = np.random.default_rng(0).integers(1, 500, 2000).tolist()
cfg = llm.compression.with_(target_tokens=1900, tau=0.5)

def state():
    blob = llm.kv.sequence_state()
    return blob.tobytes(), llm.kv.positions(0).tobytes(), llm.kv.n_cells

def size():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

if way == "blob":
    type(llm.kv).in_place = property(lambda self: False)
llm.eval(tokens)
before = state()
blob = llm.save_state()
llm.compress(cfg)
wanted = state()
outcomes = {}
for spare in [0, 2, 4, 8, 12, 16, 20, 24, 28, 32, 48, 1024]:
    llm.load_state(blob)
    llm.eval([])
    assert state() == before
    resource.setrlimit(resource.RLIMIT_AS, (size() + (spare << 18), resource.RLIM_INFINITY))
    error = ""
    try:
        llm.compress(cfg)
    except (MemoryError, tk.TwinKVError) as e:
        error = type(e).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    now = state()
    outcomes[spare] = [error, now == (before if error else wanted)]
print(json.dumps(outcomes))
"""


# what is freed goes back at once, so that every larger allocation asks the system anew and meets the cap
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "16384",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
}


@pytest.mark.parametrize("way", ["in place", "blob"])
def test_the_cache_is_as_it_was(way: str, qwen3_tiny: str) -> None:
    command = [sys.executable, "-c", CHILD, qwen3_tiny, way, "knorm"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **MALLOC})
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    failed = [spare for spare, (error, _) in outcomes.items() if error]
    assert failed, "the caps were too wide to make anything fail"
    assert len(failed) < len(outcomes), "nothing passed, so what passes was not compared"
    assert all(whole for _, whole in outcomes.values()), outcomes
