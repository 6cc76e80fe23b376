"""Damaged session files are refused, every one: flips, cuts, splices, and files that lie with right checksums."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import decode, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

import twinkv_edge as tk
from twinkv_edge.session import layout

KEPT = 12


@pytest.fixture(scope="module")
def llm(qwen3_tiny: str) -> Iterator[tk.CompressedLlama]:
    llm = tk.CompressedLlama(qwen3_tiny, n_ctx=256, n_threads=1)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def whole(llm: tk.CompressedLlama, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A session of 16 cells, ragged. The cache holds 9 other tokens afterwards."""
    path = tmp_path_factory.mktemp("session") / "whole.twinkv"
    llm.eval(prompt(24))
    retained = np.zeros((llm.kv.n_layers, llm.kv.n_head_kv, 24), dtype=np.bool_)
    retained[..., 24 - KEPT :] = True
    retained[0, 0, 20:] = False
    llm.kv.evict(retained)
    llm.eval(prompt(4))
    tk.Session.save(llm, path, metadata={"title": "a small one"})
    llm.reset()
    llm.eval(prompt(9))
    return path.read_bytes()


def refused(path: Path, raw: bytes, llm: tk.CompressedLlama | None = None) -> None:
    """By the file layer, and by a real load, which leaves the cache alone."""
    path.write_bytes(raw)
    with pytest.raises(tk.TwinKVError, match=path.name):
        tk.Session.load(llm, path) if llm else tk.Session.read(path)
    if llm:
        assert (llm.n_tokens, llm.kv.n_cells, llm.kv.n_tokens) == (9, 9, 9)


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """One to three flips, cuts, splices, swaps or overwrites; the head is hit as often as the rest."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        size = max(1, len(out))
        at = rng.randrange(min(size, rng.choice((64, 2500, size))))
        length = rng.choice((1, 4, 64, rng.randrange(1, size + 1)))
        kind = rng.randrange(6)
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            out[at:at] = out[rng.randrange(size) :][:length]
        elif kind == 4:
            out[at : at + length] = rng.randbytes(min(length, 64))
        else:
            other = rng.randrange(size)
            out[at : at + 4], out[other : other + 4] = out[other : other + 4], out[at : at + 4]
    return bytes(out)


@pytest.mark.parametrize("n", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_random_mutations(llm: tk.CompressedLlama, whole: bytes, tmp_path: Path, n: int) -> None:
    path, rng, tried, loads = tmp_path / "a.twinkv", random.Random(n), 0, 0
    expected = decode(llm, [5])
    llm.n_tokens = 9
    llm.kv.rollback(9)
    while tried < n:
        raw = mutated(whole, rng)
        if raw == whole:
            continue
        refused(path, raw, llm if tried % 20 == 0 else None)
        tried, loads = tried + 1, loads + (tried % 20 == 0)
    assert loads == n // 20
    np.testing.assert_array_equal(decode(llm, [5]), expected)
    llm.n_tokens = 9
    llm.kv.rollback(9)
    path.write_bytes(whole)
    assert tk.Session.read(path).metadata == {"title": "a small one"}


def test_every_byte_and_every_length_counts(whole: bytes, tmp_path: Path) -> None:
    """No byte of the first 200, the last 64, or one in 97 between can change, and no length is taken for whole."""
    path = tmp_path / "a.twinkv"
    for at in {*range(200), *range(200, len(whole), 97), *range(len(whole) - 64, len(whole))}:
        raw = bytearray(whole)
        raw[at] ^= 0xFF
        refused(path, bytes(raw))
    for size in {*range(0, 100), *range(100, len(whole), 997), len(whole) - 1}:
        refused(path, whole[:size])
    refused(path, whole + b"\0")
    refused(path, whole + whole)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_mutation(llm: tk.CompressedLlama, whole: bytes, tmp_path_factory: Any, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 300)))
    raw = whole[:start] + data.draw(st.binary(max_size=300)) + whole[end:]
    if raw != whole:
        refused(tmp_path_factory.getbasetemp() / "any.twinkv", raw, llm)


def test_newer_version_says_so(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.twinkv"
    path.write_bytes(whole[:8] + b"\x02\0\0\0" + whole[12:])
    with pytest.raises(tk.SessionError, match=r"version 2 of the format.*update"):
        tk.Session.read(path)
    path.write_bytes(b"%PDF-1.7 and so on")
    with pytest.raises(tk.SessionError, match="not a session file"):
        tk.Session.read(path)
    with pytest.raises(tk.InputError, match="no session at"):
        tk.Session.read(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(tk.InputError, match="is not a file"):
        tk.Session.read(tmp_path / "pipe")


Lie = Callable[[dict[str, Any], dict[str, Any]], Any]


def _set(array: str, index: Any, value: Any) -> Lie:
    return lambda head, arrays: arrays[array].__setitem__(index, value)


def _word(at: int, value: int) -> Lie:
    """Of the state."""
    return lambda head, arrays: arrays["state"][at : at + 4].__setitem__(
        slice(None), np.frombuffer(np.int32(value).tobytes(), np.uint8)
    )


N_CELLS = KEPT + 4
BODY = 16 + 12 * N_CELLS  # v_transposed, n_layer, then the first layer's type and size of a row
LIES: dict[str, Lie] = {
    "fewer tokens": lambda head, arrays: head.update(n_tokens=20),
    "more cells": lambda head, arrays: head.update(n_cells=17),
    "a boundary past the end": lambda head, arrays: head.update(boundary=400),
    "no boundary": lambda head, arrays: head.update(boundary=0),
    "a number as text": lambda head, arrays: head.update(n_tokens="28"),
    "a negative number": lambda head, arrays: head.update(n_protected=-1),
    "no model": lambda head, arrays: head.pop("model"),
    "an unknown field": lambda head, arrays: head.update(later=1),
    "another setting": lambda head, arrays: head["compression"].update(ratio=7),
    "layers that are no numbers": lambda head, arrays: head["cache"].update(layers=["a"]),
    "more layers": lambda head, arrays: head["cache"].update(layers=[0, 1, 2, 3, 4]),
    "no state": lambda head, arrays: arrays.pop("state"),
    "one array more": lambda head, arrays: arrays.update(more=np.zeros(3, np.uint8)),
    "tokens of another vocabulary": _set("tokens", 3, 1 << 30),
    "a negative token": _set("tokens", 3, -2),
    "a position past the boundary": _set("positions", (0, 1, KEPT - 1), 24),
    "positions that do not ascend": _set("positions", (1, 1, 4), 3),
    "a hole": _set("positions", (1, 1, 4), -1),
    "a head without cells": _set("positions", (1, 1), -1),
    "positions below -1": _set("positions", (0, 0, KEPT - 1), -2),
    "bytes of the state missing": lambda head, arrays: arrays.update(state=arrays["state"][:-1]),
    "another last position": _word(16 + 12 * (N_CELLS - 1), 99),
    "positions of the state that repeat": _word(16 + 12 * 5, 4),
    "a negative position": _word(16 + 12 * 5, -1),
    "another number of cells": _word(12, N_CELLS - 1),
    "V laid out otherwise": _word(BODY, 1),
    "another type of rows": _word(BODY + 8, 0),  # its size is right: only llama.cpp notices
    "another magic": _word(0, 7),  # so here
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("empty", [False, True])
def test_right_checksums_and_wrong_contents(
    llm: tk.CompressedLlama, whole: bytes, tmp_path: Path, lie: str, empty: bool
) -> None:
    path = tmp_path / "a.twinkv"
    path.write_bytes(whole)
    with layout.SessionFile(path) as file:
        head, arrays = file.head, file.arrays()
    LIES[lie](head, arrays)
    layout.write(path, head, arrays)
    expected = decode(llm, [5, 6])
    llm.n_tokens = 0 if empty else 9
    llm.kv.rollback(llm.n_tokens)
    with pytest.raises(tk.TwinKVError):
        tk.Session.load(llm, path)
    if empty:
        assert llm.n_tokens == llm.kv.n_cells == 0
        llm.eval(prompt(9))
    assert llm.kv.n_cells == 9
    np.testing.assert_array_equal(decode(llm, [5, 6]), expected)
    llm.n_tokens = 9
    llm.kv.rollback(9)


SAVES_IN_A_LOOP = """
import os, sys, time
import twinkv_edge as tk
llm = tk.CompressedLlama(sys.argv[1], n_ctx=1024, n_threads=1)
llm.eval([1 + i % 400 for i in range(900)])
began = time.perf_counter()
for _ in range(4):
    tk.Session.save(llm, sys.argv[2], metadata={"i": -1})
print((time.perf_counter() - began) / 4, flush=True)
for line in sys.stdin:
    pid = os.fork()  # there are no other threads; opening the model anew would take all of the time
    i = int(line)
    while pid == 0:
        tk.Session.save(llm, sys.argv[2], metadata={"i": i})
        i += 1
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="kills leave a temporary file where files must have a name")
@pytest.mark.parametrize("n", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_while_saving_leave_a_whole_file(qwen3_tiny: str, tmp_path: Path, n: int) -> None:
    path, rng = tmp_path / "a.twinkv", random.Random(n)
    child = subprocess.Popen(
        [sys.executable, "-c", SAVES_IN_A_LOOP, qwen3_tiny, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin
    assert child.stdout
    try:
        one_save = float(child.stdout.readline())
        found = []
        for kill in range(n):
            child.stdin.write(f"{kill * 1_000_000}\n")
            child.stdin.flush()
            pid = int(child.stdout.readline())
            time.sleep(rng.uniform(0, 4 * one_save))
            os.kill(pid, signal.SIGKILL)
            assert child.stdout.readline() == "gone\n"
            found.append(tk.Session.read(path).metadata["i"])
        # what is there is the newest that was whole: it never goes back, and many of the lives saved something
        assert found == sorted(found)
        assert len(set(found)) > n // 6
    finally:
        child.stdin.close()
        child.wait(timeout=30)
        child.stdout.close()
    left = [name for name in os.listdir(tmp_path) if name != path.name]
    assert len(left) <= 1 + n // 50  # between getting a name and getting the right one there is a moment
