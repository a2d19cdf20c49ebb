"""What README says under "Point your client here", run as it stands but for the address and the key."""

import re
from pathlib import Path

import pytest

from tests.clients.serving import Farthing
from tests.clients.test_elsewhere import run

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]  # a first run installs the clients
README = Path(__file__).parent.parent.parent / "README.md"
ADDRESS, KEY = "http://127.0.0.1:8000", "fk-…"
FENCE = re.compile(r"^```(sh|python|js)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENVIRONMENT = "export OPENAI_BASE_URL"
PROOF = """
python -c 'import anthropic, openai
question = [{"role": "user", "content": "Say hello."}]
print(openai.OpenAI().chat.completions.create(model="auto", max_tokens=4, messages=question))
print(anthropic.Anthropic().messages.create(model="auto", max_tokens=4, messages=question))'
"""


def examples() -> list[tuple[str, str]]:
    """(language, text) of each example."""
    section = README.read_text(encoding="utf-8").split("## Point your client here")[1].split("\n## ")[0]
    return FENCE.findall(section)


@pytest.mark.parametrize(("language", "text"), examples())
def test_an_example_works(
    language: str, text: str, client_python: Path, node_modules: Path, farthing: Farthing, tmp_path: Path
) -> None:
    assert ADDRESS in text and KEY in text
    text = text.replace(ADDRESS, farthing.url).replace(KEY, farthing.key)
    if ENVIRONMENT in text:
        text += PROOF
    (tmp_path / "llm").mkdir()
    (tmp_path / "node_modules").symlink_to(node_modules)
    (tmp_path / "example.mjs").write_text(text)
    commands = {"python": [client_python, "-c", text], "sh": ["bash", "-euc", text], "js": ["node", "example.mjs"]}
    command = commands[language]
    tries = range(3)  # what the models say is sampled: it may be nothing, but not each time
    assert any(run(command, tmp_path, farthing, client_python.parent) for _ in tries), "it prints nothing"


def test_every_client_has_one() -> None:
    languages = [language for language, _ in examples()]
    assert (languages.count("python"), languages.count("js"), languages.count("sh")) == (6, 3, 3)
