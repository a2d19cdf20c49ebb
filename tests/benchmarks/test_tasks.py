"""How answers are scored, on answers that are known to be right or wrong."""

import json
from pathlib import Path

import pytest

from benchmarks import tasks
from benchmarks.report import ROOT

DATA = ROOT.parent / "shared/data"
ADD = {"prompt": "def add(a, b):\n", "entry_point": "add", "test": "def check(f):\n    assert f(2, 3) == 5\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sum_up = {"question": "How much is 600 and 400?", "answer": "It is <<600+400=1000>>1,000.\n#### 1,000"}
    for name, item in ((tasks.GSM8K, sum_up), (tasks.GSM8K_EXAMPLES, sum_up), (tasks.HUMANEVAL, ADD)):
        (tmp_path / name).write_text(json.dumps(item) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" 600 + 400 = 1000\n#### 1000", True),
        ("#### $1,000.00\n", True),
        ("#### 1000 apples and 7 pears", True),
        (" It is 1,000", True),
        (" First 1000, then 7.", False),
        ("#### -1000", False),
        (" I do not know.", False),
        ("", False),
    ],
)
def test_the_final_number_decides(folder: Path, answer: str, right: bool) -> None:
    gsm8k, _ = tasks.load(folder, None)
    assert gsm8k.correct(gsm8k.problems[0], answer) is right


def test_the_prompt_shows_worked_examples_without_the_calculators_marks(folder: Path) -> None:
    prompt = tasks.load(folder, None)[0].problems[0].prompt
    assert "It is 1,000.\n#### 1,000" in prompt and "<<" not in prompt
    assert prompt.endswith("Question: How much is 600 and 400?\nAnswer:")


@pytest.mark.parametrize(("answer", "right"), [("    return a + b", True), ("    return a - b", False), ("(", False)])
def test_the_problems_own_tests_decide(folder: Path, answer: str, right: bool) -> None:
    _, humaneval = tasks.load(folder, 1)
    try:
        assert humaneval.correct(humaneval.problems[0], answer) is right
    except tasks.sandbox.IsolationError as error:
        pytest.skip(str(error))


def test_a_folder_without_the_files_has_no_tasks(tmp_path: Path) -> None:
    assert tasks.load(tmp_path, None) == []


def test_no_samples_are_no_tasks(folder: Path) -> None:
    assert len(tasks.load(folder, None)) == 2 and tasks.load(folder, 0) == []


@pytest.mark.skipif(not (DATA / tasks.HUMANEVAL).is_file(), reason="the data sets are not beside the repository")
def test_reference_answers_are_right() -> None:
    gsm8k, humaneval = tasks.load(DATA, None)
    assert all(gsm8k.correct(problem, problem.item["answer"]) for problem in gsm8k.problems)
    for problem in humaneval.problems[:5]:
        try:
            assert humaneval.correct(problem, problem.item["canonical_solution"])
        except tasks.sandbox.IsolationError as error:
            pytest.skip(str(error))
