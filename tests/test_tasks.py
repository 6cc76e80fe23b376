"""Generated tasks have the structure of the originals, fit their length, and are the same for the same seed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from twinkv_edge import tasks
from twinkv_edge.errors import InputError
from twinkv_edge.tasks import Request, Sample
from twinkv_edge.tasks.base import largest
from twinkv_edge.tasks.ruler_niah import TASKS as NIAH
from twinkv_edge.tasks.words import NOISE

pytest.importorskip("wonderwords")
GENERATED = [n for n, cls in tasks.available().items() if cls.group == "ruler" and not n.startswith("qa_")]
TEXTS = [n for n, cls in tasks.available().items() if cls.group == "continuation" and n != "continue_files"]
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"


def count(text: str) -> int:
    """Stands for a tokenizer: pieces of at most four letters or digits, and every other mark."""
    return len(re.findall(r"\w{1,4}|[^\w\s]", text))


def make(name: str, length: int = 2048, seed: int = 0, index: int = 0, data: Path | None = None) -> Sample:
    return tasks.create(name).sample(index, Request(length, count, seed, data))


def test_all_of_ruler_is_there() -> None:
    assert len(GENERATED) == 11
    assert [n for n in tasks.chosen(["ruler"]) if n not in GENERATED] == ["qa_1", "qa_2"]
    assert len(tasks.chosen(["longbench"])) == 16
    assert len(tasks.chosen(["loogle", "mmlu_pro"])) == 5
    assert tasks.chosen(["vt", "vt", "niah_single_1"]) == ["niah_single_1", "vt"]
    with pytest.raises(InputError, match="ruler"):
        tasks.chosen(["riddles"])


@pytest.mark.parametrize("name", [*GENERATED, *TEXTS])
def test_samples_are_deterministic_and_fill_their_length(name: str) -> None:
    for length in (1024, 2500):
        a = make(name, length)
        assert a == make(name, length)
        assert a.prompt != make(name, length, seed=1).prompt
        assert a.prompt != make(name, length, index=1).prompt
        used = count(a.prompt) + a.max_tokens
        assert used <= length
        # short by less than one more sentence, item or zeta step
        assert used > length - (120 if name != "fwe" else length // 20 + 60)


@pytest.mark.parametrize("cls", NIAH, ids=lambda cls: cls.name)
def test_needles(cls: type) -> None:
    for index in range(4):
        s = make(cls.name, index=index)
        shape = {"numbers": r"\d{7}", "uuids": UUID}[cls.value_kind]
        found = re.findall(rf"One of the special magic {cls.value_kind} for (\S+) is: ({shape})\.", s.context)
        asked = [key for key, _ in found if key in s.question]
        assert set(s.answers) == {value for key, value in found if key in s.question}
        assert len(s.answers) == cls.values * cls.queries == len(asked)
        if cls.haystack == "needle":
            assert len(found) > 20
        else:
            assert len(found) == max(cls.keys, cls.queries) * cls.values
        assert (s.context.count(NOISE) > 10) == (cls.haystack == "noise")
        single = cls.values * cls.queries == 1
        assert s.context.startswith("A special magic" if single else "Some special magic")
        assert s.answer_prefix.endswith("provided text is" if single else "provided text are")
        key = UUID if cls.key_kind == "uuids" else r"\S+-\S+"
        assert all(re.fullmatch(key, k) for k, _ in found)


def test_needles_stand_anywhere() -> None:
    depths = []
    for index in range(12):
        s = make("niah_single_2", index=index)
        depths.append(s.context.index("One of the special") / len(s.context))
    assert min(depths) < 0.3
    assert max(depths) > 0.7


def test_variable_tracking() -> None:
    s = make("vt")
    example, main = s.context.split("Memorize and track")[1:]
    assert s.max_tokens == 30
    for text, letters in ((main, 5), (example, 3)):
        first = re.search(rf"VAR ([A-Z]{{{letters}}}) = (\d{{5}})\n", text)
        assert first
        links = re.findall(rf"VAR ([A-Z]{{{letters}}}) = VAR ([A-Z]{{{letters}}}) ", text)
        assert len(links) == 4
        names = [first[1], *(new for new, _ in links)]
        assert [old for _, old in links] == names[:-1]  # a chain, in order
        if text is main:
            assert s.answers == tuple(names)
            assert first[2] in s.question
        else:
            assert " ".join(names) in text  # the worked answer
    assert main.count(NOISE) > 10


@pytest.mark.parametrize(("length", "repeats", "rare"), [(2048, 6, 1), (6000, 30, 3)])
def test_common_words(length: int, repeats: int, rare: int) -> None:
    s = make("cwe", length)
    main = s.context.split("Memorize the ones that appear most often.")[2]
    frequencies = Counter(re.findall(r"\d+\. (\S+)", main))
    assert {w for w, n in frequencies.items() if n == repeats} == set(s.answers)
    assert len(s.answers) == 10
    assert {n for w, n in frequencies.items() if w not in s.answers} == {rare}
    worked = s.context.split("Memorize the ones that appear most often.")[1]
    assert "list are: 1. " in worked


def test_frequent_words_follow_the_zeta_distribution() -> None:
    s = make("fwe", 4096)
    words = s.context.removeprefix(s.context[: s.context.index("coded words. ")] + "coded words. ").split()
    frequencies = Counter(words)
    ranked = [word for word, _ in frequencies.most_common(4)]
    assert ranked[0] == "..."
    assert tuple(ranked[1:]) == s.answers
    n = frequencies["..."]
    for rank, word in enumerate(s.answers, 2):
        assert frequencies[word] == pytest.approx(n / rank**2, abs=1)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="greater length"):
        make("cwe", 200)
    with pytest.raises(InputError, match="continuation"):
        make("continue_novel", 200)
    assert largest(range, len, 37, least=1, guess=5, what="a range") == range(37)
    assert largest(range, len, 99, least=1, guess=64, most=50, what="a range") == range(50)


def test_question_answering(tmp_path: Path) -> None:
    paragraphs = [
        {"context": f"Paragraph {i} of the book.", "qas": [
            {"question": f"Where is {i}?", "answers": [{"text": f"place {i}"}] * 2, "is_impossible": False},
            {"question": "Never?", "answers": [], "is_impossible": True},
        ]} for i in range(30)
    ]  # fmt: skip
    (tmp_path / "dev-v2.0.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hotpot = [
        {"question": f"Q{i}?", "answer": f"A{i}", "supporting_facts": [[f"T{i}0", 0], [f"T{i}3", 0]],
         "context": [[f"T{i}{j}", [f"Sentence {i} {j}.", " More."]] for j in range(5)]}
        for i in range(8)
    ]  # fmt: skip
    (tmp_path / "hotpotqa.json").write_text(json.dumps(hotpot))
    request = Request(300, count, 0, tmp_path)
    assert tasks.create("qa_1").missing(Request(300, count)) != ""
    assert tasks.create("qa_1").size(request) == 30
    s = make("qa_1", 300, data=tmp_path)
    number = re.search(r"Where is (\d+)\?", s.question)
    assert number
    assert s.answers == (f"place {number[1]}",)
    assert f"Paragraph {number[1]} of the book." in s.context
    assert s.context.count("Document ") > 10
    s = make("qa_2", 200, data=tmp_path)
    i = s.answers[0][1:]
    assert f"Sentence {i} 0." in s.context
    assert f"Sentence {i} 3." in s.context
    (tmp_path / "dev-v2.0.json").write_text("{}")
    (tmp_path / "squad.json").unlink(missing_ok=True)


def test_longbench_is_cut_in_the_middle(tmp_path: Path) -> None:
    row = {"context": "first " + "word " * 3000 + "last", "input": "Who {is} it?", "answers": ["a", "b"]}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "trec.jsonl").write_text(json.dumps({**row, "all_classes": ["City", "Number"]}) + "\n")
    s = make("longbench_hotpotqa", 1024, data=tmp_path)
    assert s.context.startswith("Answer the question based on the given passages.")
    assert "passages.\nfirst word" in s.context
    assert s.context.endswith("word last")
    assert s.question.endswith("Question: Who {is} it?\nAnswer:")
    assert 1000 < count(s.prompt) + 32 <= 1024
    assert (s.answers, s.metric, s.max_tokens) == (("a", "b"), "qa_f1", 32)
    assert make("longbench_trec", data=tmp_path).classes == ("City", "Number")
    reason = tasks.create("longbench_qasper").missing(Request(1024, count, 0, tmp_path))
    assert "qasper" in reason


def test_loogle_and_mmlu_pro(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    cloze = {"context": "A text.", "question": "Where did <mask-0> go?", "answer": ["Ada", "Rome"]}
    (tmp_path / "shortdep_cloze.jsonl").write_text(json.dumps(cloze))
    s = make("loogle_shortdep_cloze", data=tmp_path)
    assert s.answers == ("{'<mask-0>': 'Ada', '<mask-1>': 'Rome'}",)
    (tmp_path / "mmlu_pro").mkdir()
    table = pyarrow.Table.from_pylist(
        [{"question": "2 + 2?", "options": ["3", "4", "N/A"], "answer": "B", "category": "math"}]
    )
    parquet.write_table(table, tmp_path / "mmlu_pro" / "test-00000-of-00001.parquet")
    s = make("mmlu_pro", data=tmp_path)
    assert "about math.\n\nQuestion: 2 + 2?\nOptions:\nA. 3\nB. 4\n" in s.context
    assert (s.answers, s.metric) == (("B",), "choice")
    (tmp_path / "longdep_qa.jsonl").write_text("{broken")
    with pytest.raises(InputError, match="broken"):
        make("loogle_longdep_qa", data=tmp_path)
