"""The benchmarks' metrics: values worked out by hand, and the packages that the benchmarks themselves use."""

from __future__ import annotations

import pytest

from twinkv_edge.errors import InputError
from twinkv_edge.tasks import metrics
from twinkv_edge.tasks.metrics import METRICS


def judge(name: str, text: str, *answers: str, classes: tuple[str, ...] = ()) -> float:
    return METRICS[name].judge(text, answers, classes)


def test_string_matches() -> None:
    assert judge("string_match_all", "It is Amber, and 12", "amber", "12", "34", "56") == 0.5
    assert judge("string_match_part", "it is AMBER", "amber", "34") == 1
    assert judge("string_match_part", "neither", "amber", "34") == 0
    assert METRICS["string_match_all"].is_settled("12 and 34", ["12", "34"])
    assert not METRICS["string_match_all"].is_settled("12 and 3", ["12", "34"])
    assert METRICS["string_match_part"].is_settled("34", ["12", "34"])


def test_qa_f1() -> None:
    # "cat sat on mat" against "cat on red mat": 3 of 4 words either way
    assert judge("qa_f1", "The cat sat, on a mat.", "a cat on the red mat") == pytest.approx(0.75)
    assert judge("qa_f1", "Paris", "in Paris, France", "paris") == 1
    assert judge("qa_f1", "the", "a") == 0  # articles are no words
    assert judge("qa_f1_first_line", "\nParis\nis in France", "Paris") == 1
    assert METRICS["qa_f1_first_line"].is_settled("\nParis\n", ["Rome"])
    assert not METRICS["qa_f1_first_line"].is_settled("\n\nParis", ["Rome"])


def test_rouge_l_is_that_of_the_package() -> None:
    rouge = pytest.importorskip("rouge")
    text, answer = "the report says that costs rose by a third", "costs rose by one third says the report"
    expected = rouge.Rouge().get_scores(text, answer)[0]["rouge-l"]["f"]
    assert judge("rouge_l", text, answer) == pytest.approx(expected)
    assert judge("rouge_l", "a b c d", "a x c y") == pytest.approx(0.5)  # a common subsequence of 2 of 4 words
    assert judge("rouge_l", "", answer) == 0
    assert judge("rouge_l", ".", ".") == 0  # the package finds no words and complains


def test_classification() -> None:
    classes = ("Number of something", "Number", "City", "Country")
    assert judge("classification", " City\nCountry", "City", classes=classes) == 1
    assert judge("classification", "City or Country", "City", classes=classes) == 0.5
    assert judge("classification", "Number of something", "Number of something", classes=classes) == 1
    assert judge("classification", "Country", "City", classes=classes) == 0


def test_retrieval_and_count() -> None:
    assert judge("retrieval", "Paragraph 3, or 13", "Paragraph 3") == 0.5
    assert judge("retrieval", "none", "Paragraph 3") == 0
    assert judge("count", "7 or 7 or 8", "7") == pytest.approx(2 / 3)
    with pytest.raises(InputError, match="Paragraph"):
        judge("retrieval", "3", "three")


def test_code_similarity() -> None:
    fuzz = pytest.importorskip("rapidfuzz.fuzz")
    text = "\n# a comment\n```\n    return x + 1\nmore"
    assert judge("code_similarity", text, "    return x + 1") == 1
    assert judge("code_similarity", "return x", "return y") == round(fuzz.ratio("return x", "return y")) / 100 == 0.88
    assert judge("code_similarity", "# only a comment", "x") == 0
    settled = METRICS["code_similarity"].is_settled
    assert settled("# no\nreturn x\n", ["y"])
    assert not settled("# no\nreturn x", ["y"])


def test_cloze() -> None:
    answer = "{'<mask-0>': 'Ada Lovelace', '<mask-1>': 'London'}"
    assert judge("cloze_partial", " {'<mask-0>': 'Ada', '<mask-1>': 'Paris'} and so on", answer) == 0.5
    assert judge("cloze_partial", "Ada and London", answer) == 0
    assert judge("cloze_partial", "{'<mask-0>': ", answer) == 0
    with pytest.raises(InputError, match="dictionary"):
        judge("cloze_partial", "{}", "Ada")


@pytest.mark.parametrize(
    ("text", "letter"),
    [("C) because", "C"), (" (d).", "D"), ("The answer is (B).", "B"), ("the answer is: E", "E"), ("J", "J")],
)
def test_choice(text: str, letter: str) -> None:
    assert judge("choice", text, letter) == 1
    assert judge("choice", text, "A") == 0


def test_no_choice_is_none() -> None:
    assert judge("choice", "Both are fine", "B") == 0
    assert judge("choice", "", "A") == 0


def test_normalization() -> None:
    assert metrics.normalized(" The  cat's A-team, an  Answer ") == "cats ateam answer"
