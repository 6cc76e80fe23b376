"""Loading a model, filling its cache, and streaming an answer."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import CacheStateError, InputError
from .options import AnswerOptions, ModelOptions
from .prompt import Vocabulary, common_prefix

if TYPE_CHECKING:
    from ..compression import Compression
    from ..llama import CompressedLlama


class Interrupted(Exception):
    """The user stopped the reading of a prompt; what was read so far is in the cache."""


def load(
    options: ModelOptions,
    n_ctx: int,
    compression: Compression,
    *,
    seed: int = 0,
    make: Callable[..., CompressedLlama] | None = None,
    **more: Any,
) -> CompressedLlama:
    """Loads the model and makes its context; `make`: a subclass to use, `more`: what it takes beside the usual.

    Raises:
        InputError: llama.cpp refuses the file or the context.
        UnsupportedModelError: The model keeps no cache that can be rewritten.
    """
    from .. import CompressedLlama
    from ..models.ggml_types import CACHE_TYPES

    threads = options.n_threads()
    try:
        return (make or CompressedLlama)(
            str(options.path()),
            n_ctx=n_ctx,
            compression=compression,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=options.n_batch,
            type_k=CACHE_TYPES[options.type_k.lower()],
            type_v=CACHE_TYPES[options.type_v.lower()],
            seed=seed,
            **more,
        )
    except InputError:
        raise
    except (ValueError, RuntimeError) as e:  # llama_cpp's own
        raise InputError(f"llama.cpp cannot load {options.path()} with a cache of {n_ctx} cells: {e}") from e


def prefill(
    llm: CompressedLlama,
    tokens: list[int],
    progress: Callable[[int], None] = lambda done: None,
    *,
    stopped: Callable[[], bool] = lambda: False,
    n_protected: int = 0,
) -> int:
    """Evaluates all but the last token of a prompt, reusing what the cache holds of it.

    The last one is left to the answer, whose first token then sees the cache as it is by then. The first n_protected
    tokens stay out of every eviction.

    Returns:
        The most cells per head that were in use on the way.

    Raises:
        CacheStateError: The prompt does not fit; nothing was evaluated.
        Interrupted: `stopped()` after a batch.
    """
    common = common_prefix(llm.input_ids[: llm.n_tokens].tolist(), tokens[:-1])
    if common < llm.n_tokens:
        if common < llm.kv.boundary:
            llm.reset()
            common = 0
        llm.n_tokens = common
    llm.protect(n_protected)
    peak = 0

    def step(done: int, total: int, cells: int) -> None:
        nonlocal peak
        peak = max(peak, cells)
        progress(common + done)
        if stopped() and done < total:
            raise Interrupted

    llm.eval(tokens[common:-1], step)
    return max(peak, llm.kv.n_cells)


@dataclass
class Answer:
    """An answer as it grows.

    Attributes:
        tokens: What was generated, without the token that ends an answer.
        text: The same as text.
        finish_reason: "stop": the model ended it; "length": max_tokens; "context": the cache or the trained length is
            full; "interrupted".
        seconds: Wall time from the prompt's last token on.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "interrupted"
    seconds: float = 0.0


def stream(
    llm: CompressedLlama,
    vocabulary: Vocabulary,
    tokens: list[int],
    options: AnswerOptions,
    answer: Answer,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[str]:
    """Answers a prompt piece by piece, and keeps `answer` up to date; ends early when `stopped()`.

    The cache holds the prompt and the answer afterwards (its last token perhaps not yet).
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    began = time.perf_counter()
    llm.set_seed(options.seed)
    try:
        for token in llm.generate(tokens, **options.sampler()):
            if vocabulary.ends_answer(token):
                answer.finish_reason = "stop"
                break
            answer.tokens.append(token)
            piece = decoder.decode(vocabulary.piece(token))
            if not answer.text:
                piece = piece.lstrip()  # vocabularies that begin words with a space begin answers with one
            if piece:
                answer.text += piece
                yield piece
            if stopped():
                break
            if len(answer.tokens) >= options.max_tokens:
                answer.finish_reason = "length"
                break
            if llm.kv.n_cells >= llm.kv.n_cells_allocated or len(tokens) + len(answer.tokens) >= llm.n_ctx_train:
                answer.finish_reason = "context"
                break
    except CacheStateError:
        if not answer.tokens:
            raise
        answer.finish_reason = "context"
    finally:
        answer.seconds = time.perf_counter() - began
        if rest := decoder.decode(b"", final=True):
            answer.text += rest
