"""Answers and likelihoods on one cache as it is: greedy decoding that guesses ahead, and teacher forcing.

A guess changes no answer, only its time: guessed tokens are evaluated in one batch, and kept as far as each is the one
that greedy decoding takes anyway. What earlier configurations answered to the same question is a very good guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np
import numpy.typing as npt

from ...llama import CompressedLlama

FloatArray = npt.NDArray[np.float32]
GUESS = 8  # tokens guessed at once, at most: fewer after a wrong guess
LOOP = 24  # tokens said over and over, the same at least three times, after which an answer has ended
CHUNK = 64  # tokens teacher-forced at once: bounds the logits held


def decode(llm: CompressedLlama, tokens: Sequence[int]) -> FloatArray:
    """Evaluates tokens at the end and returns a view of the logits of each, float32 [len(tokens), vocabulary].

    The view is llama.cpp's own memory: it is good until the next evaluation. At most n_batch tokens.
    """
    llm.kv.check_room(len(tokens))
    start = llm.n_tokens
    llm._batch.set_batch(batch=list(tokens), n_past=start, logits_all=True)
    llm._ctx.decode(llm._batch)
    llm.input_ids[start : start + len(tokens)] = tokens
    llm.n_tokens = start + len(tokens)
    llm.kv.advance(len(tokens))
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits(llm.ctx), (len(tokens), llm.n_vocab()))


def back_to(llm: CompressedLlama, n_tokens: int) -> None:
    """Takes tokens back until n_tokens are left."""
    llm.n_tokens = n_tokens
    llm.kv.rollback(n_tokens)


def guesses(answer: Sequence[int], earlier: Sequence[Sequence[int]]) -> list[int]:
    """What may come next: how an earlier answer that began alike went on, or what followed the last two tokens before.

    Args:
        answer: Tokens so far.
        earlier: Answers to the same question, the most recent one last.
    """
    n = len(answer)
    for other in reversed(earlier):
        if len(other) > n and list(other[:n]) == list(answer):
            return list(other[n : n + GUESS])
    if n < 2:
        return []
    pair = list(answer[-2:])
    for text in (answer[:-1], *reversed(earlier)):
        for i in range(len(text) - 2, 0, -1):
            if text[i - 1] == pair[0] and text[i] == pair[1]:
                return list(text[i + 1 : i + 1 + GUESS])
    return []


def loops(answer: Sequence[int]) -> bool:
    """Whether an answer only repeats itself: its end is the same tokens three times or more, LOOP tokens in all.

    Greedy decoding of a small model hardly ever leaves such a loop, and half of all tokens of wrong answers are in one.
    """
    n = len(answer)
    for period in range(1, n // 3 + 1):
        times = max(3, -(-LOOP // period))
        if period * times <= n and answer[-1] == answer[-1 - period]:
            end = list(answer[n - period * times :])
            if end[period:] == end[:-period]:
                return True
    return False


@dataclass(frozen=True)
class Ends:
    """When an answer ends, other than by the model's own word.

    Attributes:
        max_tokens: Its longest.
        finished: Told the answer so far; whether its score cannot change any more.
        until_loop: Whether an answer that only repeats itself has ended.
    """

    max_tokens: int
    finished: Callable[[str], bool]
    until_loop: bool = False


class Answer:
    """An answer as it grows, token by token."""

    def __init__(self, llm: CompressedLlama, ends: Ends) -> None:
        self._llm, self._ends = llm, ends
        self._vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
        self.tokens: list[int] = []
        self.text = ""

    def ends_with(self, token: int) -> bool:
        """Takes the next token, and says whether the answer has ended."""
        if llama_cpp.llama_vocab_is_eog(self._vocabulary, token):
            return True
        self.tokens.append(token)
        self.text = str(self._llm.detokenize(self.tokens), "utf-8", "replace")
        return (
            len(self.tokens) >= self._ends.max_tokens
            or (self._ends.until_loop and loops(self.tokens))
            or self._ends.finished(self.text)
        )


def greedy(llm: CompressedLlama, suffix: Sequence[int], ends: Ends, earlier: list[list[int]]) -> str:
    """Evaluates `suffix` on the cache as it is and answers by the likeliest tokens.

    Args:
        suffix: The rest of the prompt, at least one token.
        earlier: Answers to the same question so far; this one is added.

    Returns:
        The answer. The cache is as before.
    """
    start, pending = llm.n_tokens, list(suffix)
    answer, ended = Answer(llm, ends), False
    size = GUESS // 2  # a batch of n costs some n / 2 single tokens: guessing wrong is not free
    try:
        for piece in batches(pending[:-1], llm.n_batch):
            decode(llm, piece)
        pending = pending[-1:]
        while not ended:
            ahead = guesses(answer.tokens, earlier)[: min(size, ends.max_tokens - len(answer.tokens) - 1)]
            here = llm.n_tokens
            best = decode(llm, [*pending, *ahead]).argmax(axis=1).tolist()
            right = next((i for i, token in enumerate(ahead) if token != best[i]), len(ahead))
            size = min(GUESS, 2 * right + 1) if ahead else size
            back_to(llm, here + 1 + right)
            ended = any(answer.ends_with(token) for token in best[: right + 1])
            pending = answer.tokens[-1:]
    finally:
        back_to(llm, start)
    earlier.append(answer.tokens)
    return answer.text


def batches(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    """In pieces of at most `size`."""
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


@dataclass(frozen=True)
class Likelihood:
    """How likely a text was, a mean over its tokens.

    Attributes:
        nll: Negative log-likelihood in nats.
        kl: Kullback-Leibler divergence of the prediction from the full cache's, in nats.
    """

    nll: float
    kl: float


def likelihood(
    llm: CompressedLlama, last: int, continuation: Sequence[int], full: FloatArray, *, is_full: bool
) -> Likelihood:
    """Teacher forcing: the likelihood of a continuation on the cache as it is, which is as before afterwards.

    Args:
        last: The prompt's last token, not evaluated yet.
        continuation: The tokens to be predicted, N.
        full: float32 [N, vocabulary], log-probabilities on the full cache; filled in where `is_full`.
        is_full: Whether this is the full cache.
    """
    start = llm.n_tokens
    given = [last, *continuation[:-1]]
    nll = kl = 0.0
    try:
        for first in range(0, len(given), CHUNK):
            piece = given[first : first + CHUNK]
            log_p = log_softmax(decode(llm, piece))
            rows = slice(first, first + len(piece))
            if is_full:
                full[rows] = log_p
            nll -= float(log_p[np.arange(len(piece)), continuation[rows]].sum(dtype=np.float64))
            if not is_full:
                kl += float((np.exp(full[rows]) * (full[rows] - log_p)).sum(dtype=np.float64))
    finally:
        back_to(llm, start)
    return Likelihood(nll / len(given), kl / len(given))


def log_softmax(logits: FloatArray) -> FloatArray:
    """Log-probabilities of each row of logits."""
    shifted: FloatArray = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
