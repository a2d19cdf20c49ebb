"""Two tasks with answers that can be checked: GSM8K (the number is right) and HumanEval (the tests pass)."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import sandbox as sandbox

GSM8K, GSM8K_EXAMPLES, HUMANEVAL = "gsm8k_test_even.jsonl", "gsm8k_train_1500.jsonl", "humaneval_even.jsonl"
SHOTS = 5
NUMBER = re.compile(r"-?\$?[\d,]*\.?\d+")


@dataclass(frozen=True)
class Problem:
    prompt: str
    stop: tuple[str, ...]
    max_tokens: int
    item: dict[str, Any]
    """The line of the data file."""


@dataclass(frozen=True)
class Task:
    name: str
    problems: list[Problem]

    def correct(self, problem: Problem, answer: str) -> bool:
        """Raises sandbox.IsolationError where a program can't be run safely."""
        return _solves(problem, answer) if self.name == "HumanEval" else _same_number(problem, answer)


def load(folder: Path, samples: int | None) -> list[Task]:
    """The tasks whose files are in `folder`, the first `samples` problems of each (None: all, 0: no tasks)."""
    tasks = []
    if (folder / GSM8K).is_file() and (folder / GSM8K_EXAMPLES).is_file():
        tasks.append(Task("GSM8K", _gsm8k(folder)[:samples]))
    if (folder / HUMANEVAL).is_file():
        tasks.append(Task("HumanEval", _humaneval(folder)[:samples]))
    return [task for task in tasks if task.problems]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _gsm8k(folder: Path) -> list[Problem]:
    """A few worked examples before each question, the same for all."""
    examples = _lines(folder / GSM8K_EXAMPLES)[:SHOTS]
    before = "".join(f"Question: {e['question']}\nAnswer: {_worked(e['answer'])}\n\n" for e in examples)
    return [
        Problem(f"{before}Question: {item['question']}\nAnswer:", ("\nQuestion:", "\n\n"), 256, item)
        for item in _lines(folder / GSM8K)
    ]


def _worked(answer: str) -> str:
    """A reference answer without the calculator's marks."""
    return re.sub(r"<<.*?>>", "", answer)


def _same_number(problem: Problem, answer: str) -> bool:
    """The number after ####, or the last one where the model did not write the mark."""
    right = problem.item["answer"].rpartition("####")[2]
    marked = answer.partition("####")[2].strip().partition("\n")[0]
    found = NUMBER.findall(marked or answer)
    return bool(found) and _number(found[0] if marked else found[-1]) == _number(right)


def _number(text: str) -> float:
    return float(re.sub(r"[$,\s]", "", text))


def _humaneval(folder: Path) -> list[Problem]:
    stop = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ", "\n```")
    return [Problem(item["prompt"], stop, 384, item) for item in _lines(folder / HUMANEVAL)]


def _solves(problem: Problem, answer: str) -> bool:
    item = problem.item
    program = f"{item['prompt']}{answer}\n{item['test']}\ncheck({item['entry_point']})\n"
    return sandbox.run(program) is sandbox.Verdict.PASSED
