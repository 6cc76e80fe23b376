"""A whole run: every sample that the results file does not hold yet, here or in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import models, tasks
from ...errors import CacheStateError, InputError
from ...llama import CompressedLlama
from ...tasks import Request
from . import replies
from .results import Line, Results
from .sample_run import measure
from .settings import Settings, Wanted

Say = Callable[[str], None]
SPARE_CELLS = 64  # a prompt's length is counted before it is cut in two, and guesses reach a little further


@dataclass(frozen=True)
class Bench:
    """What every process needs to make and measure samples: it is sent to the workers."""

    model: Path
    settings: Settings
    wanted: Wanted

    def open(self) -> CompressedLlama:
        """The model with a context that holds a sample. Raises InputError where llama.cpp refuses it."""
        from ...models.ggml_types import CACHE_TYPES

        s = self.settings
        # answers are taken back, and a sliding window has forgotten by then what stood before them: it keeps them all,
        # and the model has one sequence only
        sliding = bool(models.facts(str(self.model)).n_swa)
        try:
            return CompressedLlama(
                str(self.model),
                n_ctx=s.length + SPARE_CELLS + (0 if sliding else replies.ANSWER_CELLS),
                n_seq_max=replies.SEQUENCES,
                n_threads=s.threads,
                n_threads_batch=s.threads,
                n_batch=s.n_batch,
                swa_full=sliding,
                type_k=CACHE_TYPES[s.type_k],
                type_v=CACHE_TYPES[s.type_v],
            )
        except (ValueError, RuntimeError) as e:
            if isinstance(e, InputError):
                raise
            raise InputError(f"llama.cpp cannot load {self.model} with a cache of {s.length} cells: {e}") from e

    def request(self, llm: CompressedLlama) -> Request:
        def count(text: str) -> int:
            return len(llm.tokenize(text.encode(), add_bos=True, special=False))

        s = self.settings
        return Request(s.length, count, s.seed, self.wanted.data, self.wanted.texts, s.continuation)


def measure_one(llm: CompressedLlama, bench: Bench, task: str, index: int) -> Line:
    """One line of results."""
    return measure(llm, tasks.create(task).sample(index, bench.request(llm)), bench.settings)


def run(bench: Bench, results: Results, workers: int, say: Say) -> dict[str, str]:
    """Measures what is missing.

    Args:
        workers: Processes, each with a model of its own; 1: this one.
        say: Told of progress, a line at a time.

    Returns:
        Tasks that were skipped, and why.

    Raises:
        InputError: A task cannot make its samples; a worker died.
        KeyboardInterrupt: As it came; results so far are in the file.
    """
    llm = bench.open()
    try:
        todo, skipped = _todo(bench, results, bench.request(llm))
        for task, reason in skipped.items():
            say(f"{task} is skipped: {reason}")
        progress = _Progress(len(todo), say)
        if workers == 1:
            for task, index in todo:
                progress.step(_add(results, measure_one(llm, bench, task, index)))
    finally:
        llm.close()
    if workers > 1 and todo:
        for line in _in_workers(bench, todo, min(workers, len(todo))):
            progress.step(_add(results, line))
    return skipped


def _add(results: Results, line: Line) -> Line:
    try:
        results.add(line)
    except OSError as e:
        raise InputError(f"cannot write to {results.path}: {e.strerror}; make room and run the same again") from e
    return line


def _todo(bench: Bench, results: Results, request: Request) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """Samples to measure: the first of every task, then the second ones, so that a run cut short is even."""
    skipped, sizes = {}, {}
    for name in bench.wanted.tasks:
        task = tasks.create(name)
        if reason := task.missing(request):
            skipped[name] = reason
        else:
            size = task.size(request)
            sizes[name] = bench.wanted.samples if size is None else min(size, bench.wanted.samples)
    every = [(name, i) for i in range(bench.wanted.samples) for name, size in sizes.items() if i < size]
    return [each for each in every if each not in results.lines], skipped


class _Progress:
    """Says what was done and how long the rest will take, by the mean so far."""

    def __init__(self, total: int, say: Say) -> None:
        self._total, self._say, self._done = total, say, 0
        self._start = time.monotonic()

    def step(self, line: Line) -> None:
        self._done += 1
        left = (time.monotonic() - self._start) / self._done * (self._total - self._done)
        self._say(f"[{self._done}/{self._total}] {line['task']} {line['index']}, {duration(left)} left")


def duration(seconds: float) -> str:
    """In the unit one would say it in."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# -- workers -------------------------------------------------------------------------------------------------------

_worker: tuple[CompressedLlama, Bench] | None = None


def _begin(bench: Bench) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = bench.open(), bench


def _end_with_parent() -> None:
    """A parent that was killed ends no one: nobody would wait for our results any more."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


def _work(task: str, index: int) -> Line:
    assert _worker
    return measure_one(*_worker, task, index)


def _in_workers(bench: Bench, todo: list[tuple[str, int]], workers: int) -> Iterator[Line]:
    context = multiprocessing.get_context("spawn")  # llama.cpp's threads do not survive a fork
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(bench,))
    try:
        waiting: set[Future[Any]] = {pool.submit(_work, *each) for each in todo}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield _line(future)
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:  # those still at a sample: it is measured again when the run goes on
            process.terminate()


def _line(future: Future[Any]) -> Line:
    from concurrent.futures.process import BrokenProcessPool

    try:
        line: Line = future.result()
        return line
    except BrokenProcessPool as e:
        raise CacheStateError(
            "a worker process died, perhaps for want of memory: run the same again with fewer --workers to go on"
        ) from e
