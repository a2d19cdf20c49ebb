"""Frameworks that wrap the SDKs, and `llm`, each pointed at Farthing in the way its documentation says.

Run by test_elsewhere.py, in an environment of their own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import instructor
import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY, SMALL, LARGE = (os.environ[name] for name in ("FARTHING_URL", "FARTHING_KEY", "SMALL", "LARGE"))
V1 = f"{URL}/v1"
QUESTION = "Name three colours."
WIDTH = 768


class Person(BaseModel):
    """Somebody who is spoken of."""

    name: str
    age: int


def weather(city: Literal["Paris", "Oslo"]) -> str:
    """What the weather is in a city."""
    return f"Sunny in {city}, 21 degrees."


class TestLangChain:
    def model(self, name: str, **more: Any) -> ChatOpenAI:
        return ChatOpenAI(base_url=V1, api_key=KEY, model=name, temperature=0, max_tokens=40, **more)

    def test_whole_and_streamed(self) -> None:
        whole = self.model(SMALL).invoke(QUESTION)
        parts = list(self.model(SMALL, stream_usage=True).stream(QUESTION))
        assert whole.content and "".join(part.content for part in parts) == whole.content
        [usage] = [part.usage_metadata for part in parts if part.usage_metadata]
        assert usage["output_tokens"] == whole.usage_metadata["output_tokens"] > 0

    def test_tools(self) -> None:
        model = self.model(LARGE).bind_tools([weather], tool_choice="any")
        call = model.invoke("What is the weather in Paris?").tool_calls[0]
        assert call["name"] == "weather" and call["args"].keys() == {"city"}

    def test_structured_output(self) -> None:
        assert isinstance(self.model(LARGE).with_structured_output(Person).invoke("Ada is 36."), Person)

    def test_the_responses_api(self) -> None:
        assert self.model(SMALL, use_responses_api=True).invoke(QUESTION).text

    def test_embeddings(self) -> None:
        embeddings = OpenAIEmbeddings(base_url=V1, api_key=KEY, model="scripted", check_embedding_ctx_length=False)
        assert [len(one) for one in embeddings.embed_documents(["one", "two"])] == [WIDTH, WIDTH]


class TestLlamaIndex:
    def model(self, name: str, **more: Any) -> OpenAILike:
        return OpenAILike(api_base=V1, api_key=KEY, model=name, temperature=0, max_tokens=40, **more)

    def test_chat_whole_and_streamed(self) -> None:
        chat = self.model(SMALL, is_chat_model=True)
        whole = chat.complete(QUESTION).text
        assert whole and "".join(part.delta or "" for part in chat.stream_complete(QUESTION)) == whole

    def test_text_completions(self) -> None:
        assert self.model(SMALL, is_chat_model=False).complete("One, two, three,").text

    def test_tools(self) -> None:
        chat = self.model(LARGE, is_chat_model=True, is_function_calling_model=True)
        tool = FunctionTool.from_defaults(weather)
        answer = chat.chat_with_tools([tool], user_msg="What is the weather in Paris?", tool_required=True)
        call = chat.get_tool_calls_from_response(answer)[0]
        assert call.tool_name == "weather" and call.tool_kwargs.keys() == {"city"}

    def test_embeddings(self) -> None:
        embedding = OpenAILikeEmbedding(api_base=V1, api_key=KEY, model_name="scripted")
        assert len(embedding.get_text_embedding("one")) == WIDTH


class TestPydanticAi:
    openai = OpenAIProvider(base_url=V1, api_key=KEY)

    @pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
    def test_text(self, kind: Any) -> None:
        agent = Agent(kind(SMALL, provider=self.openai), model_settings={"max_tokens": 16, "temperature": 0})
        assert agent.run_sync(QUESTION).output

    def test_an_output_type_is_a_tool_that_must_be_called(self) -> None:
        settings: Any = {"max_tokens": 60, "temperature": 0}
        agent = Agent(OpenAIChatModel(LARGE, provider=self.openai), output_type=Person, model_settings=settings)
        assert isinstance(agent.run_sync("Ada is 36 years old.").output, Person)

    def test_a_stream(self) -> None:
        agent = Agent(OpenAIChatModel(SMALL, provider=self.openai), model_settings={"max_tokens": 16, "temperature": 0})
        result = agent.run_stream_sync(QUESTION)
        assert "".join(result.stream_text(delta=True))


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_gives_back_a_class(mode: str) -> None:
    client = instructor.from_openai(OpenAI(base_url=V1, api_key=KEY), mode=instructor.Mode[mode])
    messages: Any = [{"role": "user", "content": "Ada is 36 years old."}]
    options: Any = {"model": LARGE, "max_tokens": 60, "temperature": 0}
    found = client.chat.completions.create(response_model=Person, messages=messages, **options)
    assert isinstance(found, Person)


@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_llm_answers_on_the_command_line(tmp_path: Path, more: list[str]) -> None:
    entry = f"- model_id: farthing\n  model_name: {SMALL}\n  api_base: {V1}\n  api_key_name: farthing\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    (tmp_path / "keys.json").write_text(json.dumps({"farthing": KEY}))
    options = ["-o", "max_tokens", "16", "-o", "temperature", "0", "--usage"]
    command = [str(Path(sys.executable).with_name("llm")), "-m", "farthing", *options, *more]
    env = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    done = subprocess.run([*command, QUESTION], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert re.search(r"input, [1-9]\d* output", done.stderr)
