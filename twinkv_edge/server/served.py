"""The model behind the endpoints: reuses what a cache holds of a prompt, compresses long ones, and can be stopped."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import pipeline
from ..compression import Compression, kept_tokens
from ..errors import CacheStateError, InputError
from ..llama import CompressedLlama
from ..report import CompressionReport
from ..rolling import check_bounded
from .conversations import WORTH_TOKENS, Conversations, usable
from .metrics import Metrics

Tokens = npt.NDArray[np.intc]


class Stopped(Exception):
    """The client went away, or the server shuts down: nobody waits for this answer."""


@dataclass
class Job:
    """One request, on its way through.

    Attributes:
        settings: How its prompt is compressed.
        asked: The request itself says so; otherwise only prompts above the server's threshold are.
        gone: The client went away.
        report: What was done, for the answer.
    """

    settings: Compression
    asked: bool = False
    gone: bool = False
    report: dict[str, Any] = field(default_factory=dict)


current: ContextVar[Job] = ContextVar("twinkv_job")
"""The request that a thread works on: llama_cpp.server hands the model nothing but its own arguments."""


class ServedLlama(CompressedLlama):
    """A `CompressedLlama` for one request at a time, from any thread.

    Args:
        alias: The model's name in answers; its path is never shown.
        compress_above: Prompts longer than this many tokens are compressed, also when the request does not ask.
        conversations: How many conversations are kept in memory beside the one in the cache.
        **kwargs: As `CompressedLlama` takes them.
    """

    n_tokens: int

    def __init__(self, *args: Any, alias: str, compress_above: int | None, conversations: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alias, self.compress_above = alias, compress_above
        self.defaults = self.compression
        self.metrics = Metrics()
        self.stopping: Callable[[], bool] = lambda: False
        self._conversations = Conversations(conversations)
        self._job = Job(self.defaults)
        self._gauge()

    def prompt_tokens(self, prompt: str | list[int]) -> list[int]:
        """Tokens of a prompt as `Llama.create_completion` makes them."""
        if isinstance(prompt, list):
            return prompt
        model = self._model
        cls, sep = int(model.token_cls()), int(model.token_sep())
        first = cls if cls != -1 else self.token_bos()
        begin = [first] if model.add_bos_token() and first != -1 else []
        end = [sep if sep != -1 else self.token_eos()] if model.add_eos_token() or sep != -1 else []
        return [*begin, *self.tokenize(prompt.encode("utf-8"), add_bos=False, special=True), *end]

    def check(self, tokens: list[int], settings: Compression) -> None:
        """Whether a prompt can be answered at all; asked before it waits for its turn.

        Raises:
            InputError: It fits neither the cells nor the length the model was trained for, or the settings cannot hold.
        """
        n, cells = len(tokens), self.kv.n_cells_allocated
        tau = self.facts.default_tau if settings.tau is None else settings.tau
        try:
            pipeline.make_policy(settings, tau, self.facts.path)
        except (TypeError, ValueError) as e:  # InputError is one of them
            raise InputError(f"policy {settings.policy!r} cannot be used: {e}") from e
        if n < 1:
            raise InputError("the prompt is empty")
        if n >= self.n_ctx_train:
            raise InputError(f"the prompt is {n} tokens, but the model was trained for {self.n_ctx_train}: shorten it")
        if settings.prefill == "bounded":
            check_bounded(settings, self.n_batch, cells)
        elif n >= cells and not self._continues(np.asarray(tokens, dtype=np.intc), cells):
            least = settings.n_sink + settings.n_recent + self.n_batch
            instead = (
                f', ask for {{"prefill": "bounded", "target_tokens": {cells - self.n_batch}}},'
                if cells - self.n_batch >= least
                else ""
            )
            raise InputError(
                f"the prompt is {n} tokens, but the cache has {cells} cells: shorten it{instead} or start the server "
                "with a larger --n-ctx"
            )

    def _continues(self, tokens: Tokens, cells: int) -> bool:
        """Whether a compressed conversation goes on with this prompt, so that fewer cells than tokens are enough."""
        found = [(usable(self._input_ids, self.kv.boundary, tokens), self.kv.snapshot())]
        best, number = self._conversations.best(tokens)
        found += [(best, self._conversations.snapshot(number))] if best else []
        # the compressed cells stay, and every token since takes one
        return any(n and s.table is not None and s.table.shape[-1] + tokens.size - s.boundary < cells for n, s in found)

    # -- one request -------------------------------------------------------------------------------------------------

    def create_completion(self, prompt: str | list[int], *args: Any, **kwargs: Any) -> Any:
        """As Llama.create_completion, on a cache that was made ready for this prompt."""
        job = current.get(None) or Job(self.defaults)
        self._job = job
        self._prepare(self.prompt_tokens(prompt), job)
        kwargs["model"] = self.alias
        return super().create_completion(prompt, *args, **kwargs)

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        """As CompressedLlama.generate; ends early when nobody waits for the answer any more."""
        job = self._job
        for token in super().generate(tokens, *args, **kwargs):
            self.metrics.add(generated_tokens_total=1)
            yield token
            if job.gone or self.stopping():
                break

    def _prepare(self, tokens: list[int], job: Job) -> None:
        """Evaluates all but the prompt's last token, reusing what a cache holds, and compresses.

        The last one is left to the answer, whose first token then sees the compressed cache.
        """
        prompt = np.asarray(tokens, dtype=np.intc)
        reused = self._take_up(prompt[:-1])
        self.compression = job.settings
        self._read(tokens, job, reused)
        report = None
        try:
            report = self._compress(job)
        except CacheStateError:
            # what the policy needs was not captured when the reused part was read, or it was packed in another layout
            if not reused:
                raise
            self.reset()
            reused = 0
            self._read(tokens, job, reused)
            report = self._compress(job)
        self._count(job, len(tokens), reused, report)

    def _take_up(self, prompt: Tokens) -> int:
        """Brings the conversation into the cache that saves most of the prompt; returns how many tokens it saves."""
        live = usable(self._input_ids, self.kv.boundary, prompt)
        kept, number = self._conversations.best(prompt)
        another = self.n_tokens - live > WORTH_TOKENS  # more than a last answer would be lost
        if kept > live:
            self._conversations.swap(number, self, put=another)
            self.metrics.add(conversations_restored_total=1)
            live = kept
        elif another:
            self._conversations.put(self)
        if live == 0:
            self.reset()
        self.n_tokens = live
        self._requires_eval = True
        return live

    def _read(self, tokens: list[int], job: Job, start: int) -> None:
        def step(done: int, total: int, cells: int) -> None:
            if job.gone or self.stopping():
                raise Stopped

        self.eval(tokens[start:-1], step)

    def _compress(self, job: Job) -> CompressionReport | None:
        """Evicts down to the share of the whole conversation that the settings leave, so that turn after turn no more
        is lost than was asked for. Prompts too short for that are left alone."""
        cfg, n = job.settings, self.n_tokens
        if cfg.policy == "none" or not n:
            return None
        if not job.asked and (self.compress_above is None or n < self.compress_above):
            return None
        if self.kv.boundary and n - self.kv.boundary < cfg.n_recent:
            return None  # a short turn: its few queries would decide alone where the earlier ones were not kept
        target = max(kept_tokens(n, cfg.ratio, cfg.target_tokens), cfg.n_sink + cfg.n_recent)
        if target >= self.kv.n_cells or (cfg.trigger_tokens is not None and target >= cfg.trigger_tokens):
            return None
        return self.compress(cfg.with_(target_tokens=target))

    def _count(self, job: Job, n: int, reused: int, report: CompressionReport | None) -> None:
        reports = [*([report] if report else []), *self.compressions]
        self._rolling.reports.clear()
        self.metrics.add(
            prompt_tokens_total=n,
            prompt_tokens_reused_total=reused,
            compressions_total=len(reports),
            evicted_tokens_total=sum(r.n_before - r.n_after for r in reports),
            repair_swaps_total=sum(r.swaps for r in reports),
        )
        self._gauge()
        job.report = {
            "prompt_tokens": n,
            "reused_tokens": reused,
            "cells": self.kv.n_cells,
            "compression": report.to_dict() if report else None,
        }

    def _gauge(self) -> None:
        """Read here, where no other thread touches the cache; /metrics only repeats it."""
        found = self.footprint()
        self.metrics.set(
            cache_cells=found.cells,
            cache_cells_allocated=found.cells_allocated,
            cache_used_bytes=found.bytes_used,
            cache_resident_bytes=found.bytes_resident,
            conversations_kept=len(self._conversations),
            conversations_kept_bytes=self._conversations.n_bytes,
        )
