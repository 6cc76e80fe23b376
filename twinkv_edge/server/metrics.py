"""Counters of the server, as text that Prometheus reads."""

from __future__ import annotations

import threading
from typing import Any

_HELP = {
    "requests_total": ("counter", "Completions that were asked for."),
    "requests_refused_total": ("counter", "Requests answered with an error."),
    "requests_abandoned_total": ("counter", "Requests whose client went away before the answer was whole."),
    "prompt_tokens_total": ("counter", "Tokens of prompts, reused or evaluated."),
    "prompt_tokens_reused_total": ("counter", "Tokens of prompts that a cache held already."),
    "generated_tokens_total": ("counter", "Tokens of answers."),
    "compressions_total": ("counter", "Times that the cache was evicted from."),
    "evicted_tokens_total": ("counter", "Tokens per head that were evicted."),
    "repair_swaps_total": ("counter", "Swaps of the repair pass, over all layers and heads."),
    "conversations_restored_total": ("counter", "Conversations taken up again from memory."),
    "requests_waiting": ("gauge", "Requests that wait or are answered now."),
    "conversations_kept": ("gauge", "Conversations in memory beside the one in the cache."),
    "conversations_kept_bytes": ("gauge", "Bytes they take."),
    "cache_cells": ("gauge", "Cells of the cache in use, per head, after the last answer."),
    "cache_cells_allocated": ("gauge", "Cells of the cache."),
    "cache_used_bytes": ("gauge", "Bytes of the cells in use, after the last answer."),
    "cache_resident_bytes": ("gauge", "Bytes of the cache in memory, after the last answer."),
}


class Metrics:
    """Numbers by name. Threads may add at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys(_HELP, 0)

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def set(self, **values: float) -> None:
        with self._lock:
            self._values.update({name: value for name, value in values.items() if name in _HELP})

    def to_dict(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._values)

    def text(self) -> str:
        """The text exposition format, version 0.0.4. Numbers only, so nothing needs to be escaped."""
        lines = []
        for name, value in self.to_dict().items():
            kind, what = _HELP[name]
            lines += [f"# HELP twinkv_{name} {what}", f"# TYPE twinkv_{name} {kind}", f"twinkv_{name} {value:.17g}"]
        return "\n".join(lines) + "\n"
