"""What the model answers under many compressions of one prompt: side by side where it can be, else one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ... import lanes
from ...lanes import Lanes
from ...llama import CompressedLlama
from ...pipeline import Plan
from . import answers
from .answers import Answer, Ends

LANES = 16  # answers at once: a batch of more is hardly faster by the token
SEQUENCES = 64  # that a context for many answers has: each takes one
ANSWER_CELLS = 2048  # and the cells it has beside the prompt's: 16 of RULER's longest answers


def replies(llm: CompressedLlama, suffix: Sequence[int], made: Sequence[Plan], ends: Ends) -> list[str]:
    """Answers by the likeliest tokens, one for every plan.

    Args:
        llm: With the prompt evaluated, nothing evicted, and nothing captured any more.
        suffix: The rest of the prompt, at least one token.

    Returns:
        An answer per plan. The cache is as before.
    """
    first = distinct(made)
    each = sorted(set(first))
    apart = [made[i] for i in each]
    beside = min(lanes.most(llm), _room(llm) // (len(suffix) + ends.max_tokens))
    if beside < 2:
        texts = _one_by_one(llm, suffix, apart, ends)
    else:
        size = lanes.most(llm)
        groups = [apart[i : i + size] for i in range(0, len(apart), size)]
        texts = [text for group in groups for text in _side_by_side(llm, suffix, group, ends)]
    found = dict(zip(each, texts, strict=True))
    return [found[i] for i in first]


def distinct(made: Sequence[Plan]) -> list[int]:
    """For every plan the first one that keeps the very same tokens."""
    first: dict[bytes, int] = {}
    return [first.setdefault(np.packbits(plan.retained).tobytes(), i) for i, plan in enumerate(made)]


def _room(llm: CompressedLlama) -> int:
    """Cells for answers."""
    return llm.kv.n_cells_allocated - llm.kv.n_cells


def _side_by_side(llm: CompressedLlama, suffix: Sequence[int], made: Sequence[Plan], ends: Ends) -> list[str]:
    """Always several answers in the making: where one ends, the next begins, until there may be no cells for one more;
    then those in the making end, and the others begin with all cells free.

    The question is evaluated in the batches it would have alone: llama.cpp sums in another order from 64 tokens on.
    """
    found = [Answer(llm, ends) for _ in made]
    longest = len(suffix) + ends.max_tokens
    waiting = deque(range(len(made)))
    pending: dict[int, list[int]] = {}  # the last token of every answer in the making
    free = _room(llm)  # what those may take was taken off
    with Lanes(llm, [plan.retained for plan in made]) as side:
        while waiting or pending:
            while waiting and len(pending) < min(LANES, llm.n_batch) and free >= longest:
                lane = waiting.popleft()
                for piece in answers.batches(suffix[:-1], llm.n_batch):
                    side.decode({lane: piece})
                pending[lane] = list(suffix[-1:])
                free -= longest
            if not pending:
                side.begin_again()
                free = _room(llm)
                continue
            for lane, logits in side.decode(pending).items():
                answer = found[lane]
                if answer.ends_with(int(logits.argmax())):
                    del pending[lane]
                    free += ends.max_tokens - len(answer.tokens)
                else:
                    pending[lane] = answer.tokens[-1:]
    return [answer.text for answer in found]


def _one_by_one(llm: CompressedLlama, suffix: Sequence[int], made: Sequence[Plan], ends: Ends) -> list[str]:
    texts: list[str] = []
    earlier: list[list[int]] = []
    copy = Copies(llm)
    try:
        for plan in made:
            copy.keep(plan)
            texts.append(answers.greedy(llm, suffix, ends, earlier))
    finally:
        copy.give_back()
    return texts


class Copies:
    """The prefilled cache, to be reduced again and again.

    By masks; or, where the cache is not in host memory, by evicting from a saved state.
    """

    def __init__(self, llm: CompressedLlama) -> None:
        self._llm = llm
        self._state = None if llm.kv.can_hide else llm.save_state()

    def keep(self, plan: Plan) -> None:
        """The whole cache again, but for what the plan leaves out."""
        everything = bool(plan.retained.all())
        if self._state is None:
            self._llm.kv.mask(None if everything else plan.retained)
            return
        self._llm.load_state(self._state)
        if not everything:
            self._llm.kv.evict(plan.retained)

    def give_back(self) -> None:
        """Nothing is hidden any more."""
        if self._state is None:
            self._llm.kv.mask(None)
