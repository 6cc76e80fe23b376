"""Official metrics of the benchmarks, each from 0 to 1: how right a generated text is.

RULER (Hsieh et al., 2024): string_match_all and string_match_part. LongBench (Bai et al., 2024): qa_f1, rouge_l,
classification, retrieval, count, code_similarity. LooGLE (Li et al., 2024): cloze_partial. MMLU-Pro (Wang et al.,
2024): choice. ROUGE-L and the edit similarity are those of the packages the benchmarks use or, for the
latter, of its successor; both are in the extra `quality`.
"""

from __future__ import annotations

import ast
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import InputError

_MISSING = "this metric needs a package that is not installed: pip install 'twinkv-edge[quality]'"


@dataclass(frozen=True)
class Metric:
    """How an answer is judged.

    Attributes:
        score: (generated text, reference answers, all classes) -> 0 .. 1.
        settled: (text so far, reference answers) -> whether the score cannot change any more, however the text goes on.
        first_line: Only the first line that is not empty counts.
        only_grows: More text never lowers the score.
    """

    score: Callable[[str, Sequence[str], Sequence[str]], float]
    settled: Callable[[str, Sequence[str]], bool] = lambda text, answers: False
    first_line: bool = False
    only_grows: bool = False

    def judge(self, text: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
        if self.first_line:
            text = text.lstrip("\n").split("\n")[0]
        return float(self.score(text, answers, classes))

    def is_settled(self, text: str, answers: Sequence[str]) -> bool:
        """Whether generation may stop here."""
        return (self.first_line and "\n" in text.lstrip("\n")) or self.settled(text, answers)


def string_match_all(text: str, answers: Sequence[str]) -> float:
    """Share of the references that appear in the text, whatever their case."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def string_match_part(text: str, answers: Sequence[str]) -> float:
    """1 if any of the references appears in the text, whatever its case."""
    return float(any(answer.lower() in text.lower() for answer in answers))


def normalized(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces: as SQuAD compares answers."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def qa_f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall over normalized words."""
    ours, theirs = normalized(text).split(), normalized(answer).split()
    same = sum((Counter(ours) & Counter(theirs)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(ours), same / len(theirs)
    return 2 * precision * recall / (precision + recall)


def rouge_l(text: str, answer: str) -> float:
    """ROUGE-L F1 of the package `rouge`, which LongBench and LooGLE use; 0 where it finds no words."""
    try:
        from rouge import Rouge
    except ImportError as e:
        raise InputError(_MISSING) from e
    try:
        return float(Rouge(metrics=["rouge-l"]).get_scores([text], [answer], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):  # nothing to compare; or a text too long for its recursion
        return 0.0


def classification(text: str, answer: str, classes: Sequence[str]) -> float:
    """1 / number of class names found in the text, if the right one is among them.

    Names that are part of the right one do not count against it: "Number" in "Number of something".
    """
    found = [name for name in classes if name in text]
    found = [name for name in found if name == answer or name not in answer]
    return 1 / len(found) if answer in found else 0.0


def _share_of_numbers(text: str, right: str) -> float:
    numbers = re.findall(r"\d+", text)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def retrieval(text: str, answer: str) -> float:
    """Share of the numbers in the text that name the right paragraph; the reference reads "Paragraph 7"."""
    found = re.search(r"Paragraph (\d+)", answer)
    if not found:
        raise InputError(f"a reference answer reads {answer!r} instead of 'Paragraph' and a number")
    return _share_of_numbers(text, found[1])


def count(text: str, answer: str) -> float:
    """Share of the numbers in the text that are the right one."""
    return _share_of_numbers(text, answer)


def _code_line(text: str) -> str | None:
    """The first line of code: none of those with marks of comments or of formatting."""
    lines = text.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), None)


def code_similarity(text: str, answer: str) -> float:
    """Edit similarity of the first line of code, in whole percent as the benchmark rounds it."""
    try:
        from rapidfuzz import fuzz
    except ImportError as e:
        raise InputError(_MISSING) from e
    line = _code_line(text)
    return round(fuzz.ratio(line, answer)) / 100 if line and answer else 0.0


def _code_settled(text: str, answers: Sequence[str]) -> bool:
    whole, newline, _ = text.lstrip("\n").rpartition("\n")
    return bool(newline) and _code_line(whole) is not None


def cloze_partial(text: str, answer: str) -> float:
    """Share of masked entities of which at least one word is right; both texts are dictionaries by mask."""
    right = _dictionary(answer)
    if not right:
        raise InputError(f"a reference answer is no dictionary of masks: {answer!r}")
    ours = _dictionary(text)
    return sum(bool(set(value.split()) & set(ours.get(mask, "").split())) for mask, value in right.items()) / len(right)


def _dictionary(text: str) -> dict[str, str]:
    found = re.search(r"\{.*?\}", text, re.DOTALL)
    try:
        value = ast.literal_eval(found[0]) if found else {}
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


_CHOICE = re.compile(r"answer is:?\s*\(?([A-J])\b\)?|^\s*\(?([A-J])\b(?!')", re.IGNORECASE)


def choice(text: str, answer: str) -> float:
    """1 if the letter chosen is right: that after "answer is", or the one the text begins with."""
    found = _CHOICE.search(text)
    return float(bool(found) and (found[1] or found[2]).upper() == answer.upper()) if found else 0.0


def _best(one: Callable[[str, str], float]) -> Callable[[str, Sequence[str], Sequence[str]], float]:
    """The best score over the references."""
    return lambda text, answers, classes: max((one(text, answer) for answer in answers), default=0.0)


def _best_class(text: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    return max((classification(text, answer, classes) for answer in answers), default=0.0)


def _satisfied(score: Callable[[str, Sequence[str]], float]) -> Metric:
    """A string match: what was found stays found."""
    return Metric(
        lambda text, answers, classes: score(text, answers),
        settled=lambda text, answers: score(text, answers) == 1,
        only_grows=True,
    )


METRICS: dict[str, Metric] = {
    "string_match_all": _satisfied(string_match_all),
    "string_match_part": _satisfied(string_match_part),
    "qa_f1": Metric(_best(qa_f1)),
    "qa_f1_first_line": Metric(_best(qa_f1), first_line=True),
    "rouge_l": Metric(_best(rouge_l)),
    "rouge_l_first_line": Metric(_best(rouge_l), first_line=True),
    "classification": Metric(_best_class, first_line=True),
    "retrieval": Metric(_best(retrieval)),
    "count": Metric(_best(count)),
    "code_similarity": Metric(_best(code_similarity), settled=_code_settled),
    "cloze_partial": Metric(
        _best(cloze_partial), settled=lambda text, answers: bool(re.search(r"\{.*?\}", text, re.DOTALL))
    ),
    "choice": Metric(_best(choice), settled=lambda text, answers: bool(_CHOICE.search(text + " ") and len(text) > 3)),
}
