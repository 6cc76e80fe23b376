"""A llama_cpp.Llama whose KV cache can be compressed."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from . import captured, decode_context, models, pipeline, policies, rolling
from ._install import native
from .cells import Snapshot
from .compression import Compression
from .errors import CacheStateError, InputError, UnsupportedModelError
from .kv_cache import KVCache
from .report import CompressionReport, Footprint


class CompressedLlama(llama_cpp.Llama):  # type: ignore[misc]
    """llama_cpp.Llama with `compress()`: everything Llama does goes on working, before and after.

    Args:
        model_path: A GGUF file; default: the embedded SmolLM2-135M-Instruct.
        n_ctx: Cells of the KV cache. Tokens that were evicted no longer count against it.
        compression: Settings of `compress()`; each call may override them.
        n_seq_max: Sequences that share the cells: the conversation, a spare one for evictions, and more for
            `lanes.Lanes`. Models with a sliding window have the conversation's only.
        **llama_kwargs: As llama_cpp.Llama takes them. Flash attention is on unless turned off here: without it V is
            stored transposed, and its memory cannot be given back in place.

    Raises:
        InputError: The file is missing or no usable GGUF.
        UnsupportedModelError: The model keeps no KV cache that can be rewritten.
    """

    _ctx: Any
    input_ids: npt.NDArray[np.intc]
    scores: npt.NDArray[np.single]

    def __init__(
        self,
        model_path: str | None = None,
        *,
        n_ctx: int = 8192,
        compression: Compression | None = None,
        n_seq_max: int = 2,
        **llama_kwargs: Any,
    ) -> None:
        self._stack = contextlib.ExitStack()  # Llama closes it when deleted, also where its own __init__ never ran
        path = str(model_path if model_path is not None else models.default_model())
        self.facts = models.facts(path)
        models.require_rewritable(self.facts, (compression or Compression()).layout)
        self._compression = compression or Compression()
        self._tap = native.Tap()
        self._context_params: Any = None
        self._kv: KVCache | None = None
        self._n_ctx_cells = 0
        self._n_seq_max = n_seq_max
        self._rolling = rolling.Rolling(self)
        llama_kwargs.setdefault("flash_attn", True)
        llama_kwargs.setdefault("verbose", False)
        super().__init__(model_path=path, n_ctx=n_ctx, **llama_kwargs)
        try:
            kv = KVCache(self._ctx.ctx, self._tap, self.facts, self.n_threads_batch)
            kv.discover(self._decode_one)
            self._kv = kv
            self.capture_for()
        except BaseException:
            self.close()
            raise

    # llama_cpp.Llama fills in `context_params` and then makes its context from it: the tap goes in at assignment.
    @property
    def context_params(self) -> Any:
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        callback = type(params.cb_eval) if hasattr(params, "cb_eval") else None
        if callback is None:
            raise UnsupportedModelError("this llama-cpp-python has no cb_eval in its context parameters")
        params.cb_eval = ctypes.cast(self._tap.callback, callback)
        params.cb_eval_user_data = ctypes.c_void_p(self._tap.user_data)
        if not self.facts.n_swa:
            # a spare sequence in the same cells lets eviction close up the cache in place; it costs no memory here, but
            # a sliding-window cache would grow with it
            params.n_seq_max, params.kv_unified = max(2, self._n_seq_max, params.n_seq_max), True
        self._context_params = params

    # Llama checks prompts and max_tokens against _n_ctx: the tokens that can be in play, evicted ones included.
    @property
    def _n_ctx(self) -> int:
        if self._kv and self._rolling.bounds_the_cache:
            return max(self._n_ctx_cells, self.n_ctx_train)
        evicted = self._kv.boundary - self._kv.n_compressed_cells if self._kv else 0
        return min(self._n_ctx_cells + evicted, max(self._n_ctx_cells, self.n_ctx_train))

    @_n_ctx.setter
    def _n_ctx(self, value: int) -> None:
        self._n_ctx_cells = value

    @property
    def n_ctx_train(self) -> int:
        """Positions the model was trained for: tokens may go past n_ctx cells, but not past this."""
        return int(self._model.n_ctx_train())

    @property
    def kv(self) -> KVCache:
        """The KV cache: keys, values, true positions, `evict`."""
        if self._kv is None:
            raise CacheStateError("the context is not ready, or was closed")
        return self._kv

    @property
    def compressions(self) -> list[CompressionReport]:
        """Reports of the evictions that happened by themselves since the last reset()."""
        return self._rolling.reports

    def protect(self, n_tokens: int) -> None:
        """Keeps the first n_tokens of the conversation (a system prompt) out of every eviction, until reset()."""
        if n_tokens < 0:
            raise InputError(f"{n_tokens} tokens cannot be protected: give 0 or more")
        self._rolling.n_protected = n_tokens

    @property
    def tau(self) -> float:
        """The similarity threshold in use: the setting's, or the default for this model (TwinKV, section 4.4)."""
        return self.facts.default_tau if self.compression.tau is None else self.compression.tau

    def _decode_one(self, ctx: Any = None) -> None:
        bos = self.token_bos()
        self._batch.set_batch(batch=[max(bos, 0)], n_past=0, logits_all=False)
        (ctx or self._ctx).decode(self._batch)

    @property
    def compression(self) -> Compression:
        """Settings of `compress()`. What their policy needs to see is captured from the next evaluation on."""
        return self._compression

    @compression.setter
    def compression(self, compression: Compression) -> None:
        self._capture(compression)
        self._compression = compression

    def capture_for(self, *wanted: policies.Needs | policies.Policy | Compression | str) -> None:
        """Captures, while tokens are evaluated from now on, what these policies need beside that of `compression`.

        Only prompts evaluated afterwards can be scored by them: call it before `eval`, or evaluate again after `reset`.

        Raises:
            InputError: An unknown policy or option, or something that a policy needs for this model is missing.
        """
        self._capture(self.compression, *wanted)

    def _capture(self, *wanted: policies.Needs | policies.Policy | Compression | str) -> None:
        needs = policies.Needs()
        for each in wanted:
            if isinstance(each, str):
                each = self.compression.with_(policy=each, policy_options={})
            if isinstance(each, Compression):
                each = pipeline.make_policy(each, self.tau, self.facts.path)
            needs |= each if isinstance(each, policies.Needs) else each.needs
        captured.configure(self._tap, needs, self.n_threads_batch)

    # -- compressing ---------------------------------------------------------------------------------------------

    def compress(
        self, compression: Compression | None = None, *, progress: pipeline.Progress | None = None, **changes: Any
    ) -> CompressionReport:
        """Evicts tokens from the cache now, by the settings given here or at construction.

        Args:
            compression: Settings for this call; default: `self.compression`.
            progress: Called with (layers done, layers) while scoring.
            **changes: Single settings to change for this call, e.g. ratio=0.7.

        Returns:
            What was done. The next token is decoded at position `n_tokens` of the report.

        Raises:
            InputError, CacheStateError: See `pipeline.make_plan` and `KVCache.evict`; the cache is as it was.
        """
        cfg = compression or self.compression
        if changes:
            cfg = cfg.with_(**changes)
        self._follow()
        cfg = self._rolling.protecting(cfg)
        tau = self.facts.default_tau if cfg.tau is None else cfg.tau
        return pipeline.compress(self.kv, cfg, tau, progress)

    def move_to_context(self, n_ctx: int) -> None:
        """Moves the cache into a fresh context of n_ctx cells and frees the old one; see `decode_context.move`.

        The next sampling needs a decoded token first: leave the prompt's last token out before compressing, as
        `generate` will decode it.
        """
        self._follow()
        if self.lora_path:
            raise InputError("a context with a LoRA adapter cannot be moved: its adapter belongs to the old context")
        moved = decode_context.move(self._model, self.context_params, self.kv, n_ctx, self._decode_one, self.verbose)
        old, self._ctx = self._ctx, self._stack.enter_context(contextlib.closing(moved.ctx))
        self._tap, self._kv, self._context_params = moved.tap, moved.kv, moved.params
        self._n_ctx_cells = self.n_ctx()
        self._requires_eval = True  # logits stay with the old context
        self.capture_for()
        old.close()

    def footprint(self) -> Footprint:
        """Cells and bytes of the cache: allocated, used, resident."""
        return self.kv.footprint()

    # -- following what Llama does -------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Llama takes tokens back by lowering n_tokens; the cache follows before anything is decoded or evicted."""
        self.kv.rollback(self.n_tokens)

    def reset(self) -> None:
        """Starts over: the next evaluation begins with an empty cache."""
        super().reset()
        self._rolling.reset()
        if self._kv is not None:
            self._follow()

    def eval(self, tokens: Sequence[int], progress: rolling.Progress | None = None) -> None:
        """Evaluates tokens at the end of the conversation, evicting on the way if the settings say so.

        Args:
            tokens: Token ids.
            progress: Called with (tokens evaluated, tokens in all, cells in use) after every batch.

        Raises:
            CacheStateError: No room for them, or n_tokens was moved into the compressed part. Nothing was evaluated.
            InputError: Bounded prefill past the length the model was trained for.
        """
        tokens = list(tokens)
        self._follow()
        done = 0
        for batch in self._rolling.batches(tokens):
            self._eval_batch(batch)
            done += len(batch)
            if progress:
                progress(done, len(tokens), self.kv.n_cells)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As Llama.tokenize. Raises InputError for a model without a vocabulary, where llama.cpp would abort."""
        if llama_cpp.llama_vocab_type(self._model.vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            raise InputError(f"{self.facts.name} has no vocabulary: evaluate token ids instead of text")
        return list(super().tokenize(text, add_bos, special))

    def _eval_batch(self, tokens: list[int]) -> None:
        self.kv.check_room(len(tokens))
        self._grow(self.n_tokens + len(tokens))
        start = self.n_tokens
        try:
            super().eval(tokens)
        finally:
            self.kv.advance(self.n_tokens - start)
        if failure := self._tap.take_failure():
            raise UnsupportedModelError(failure)

    def _grow(self, n: int) -> None:
        """Llama sizes its per-token arrays by n_ctx; a compressed conversation may be longer."""
        if n > self.input_ids.shape[0]:
            size = max(n, min(self.n_ctx_train, 2 * self.input_ids.shape[0]))
            self.input_ids = np.resize(self.input_ids, size)
            if self._logits_all:
                grown = np.empty((size, self.scores.shape[1]), dtype=self.scores.dtype)
                grown[: self.scores.shape[0]] = self.scores
                self.scores = grown

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        """As Llama.generate. A prompt that diverges inside the compressed part is evaluated again from the start."""
        tokens = list(tokens)
        reset = kwargs.get("reset", args[6] if len(args) > 6 else True)
        if reset and self.n_tokens > 0 and self._reusable(tokens) < self.kv.boundary:
            self.reset()
        yield from super().generate(tokens, *args, **kwargs)

    def _reusable(self, tokens: list[int]) -> int:
        """Tokens of the cache that Llama.generate will reuse for this prompt."""
        cached = self._input_ids
        n = min(len(cached), len(tokens))
        different = np.nonzero(cached[:n] != np.asarray(tokens[:n], dtype=cached.dtype))[0]
        common = int(different[0]) if different.size else n
        if common < len(tokens):
            return common
        live = self.n_tokens == len(tokens) and not self._requires_eval
        return common if live else common - 1  # without live logits the last token is decoded again

    def save_state(self) -> Any:
        """As Llama.save_state, with the true positions of a compressed cache."""
        self._follow()
        state = super().save_state()
        state.twinkv = self.kv.snapshot()
        return state

    def load_state(self, state: Any) -> None:
        """As Llama.load_state; takes states of a plain llama_cpp.Llama too."""
        self._grow(state.input_ids.shape[0])
        super().load_state(state)
        self._grow(self._n_ctx_cells)
        self.kv.restore(getattr(state, "twinkv", None) or Snapshot(state.n_tokens))


def score(
    llm: CompressedLlama, tokens: Sequence[int], policy: str = "snapkv", **options: Any
) -> npt.NDArray[np.float32]:
    """Scores that a policy gives to the tokens of a prompt: float32 [L, H, n], higher means keep.

    The prompt is evaluated from the start; the cache holds it afterwards.

    Raises:
        InputError: An unknown policy or option, or no tokens.
    """
    tokens = list(tokens)
    if not tokens:
        raise InputError("no tokens to score")
    made = pipeline.make_policy(llm.compression.with_(policy=policy, policy_options=options), llm.tau, llm.facts.path)
    llm.reset()
    llm.capture_for(made)
    try:
        llm.eval(tokens)
        return pipeline.scores(llm.kv, made)
    finally:
        llm.capture_for()
