"""Writes one request's answer, whole or as server-sent events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from engine.api_logprobs import (
    PromptLogprobs,
    TextLogprobs,
    TextOffsets,
    chat_logprobs,
    prompt_logprobs,
    text_logprobs,
)
from engine.api_reply import (
    ChatChoice,
    Choice,
    ChunkChoice,
    Delta,
    Function,
    Message,
    Reply,
    ReplyKind,
    TextChoice,
    ToolCall,
    event,
)
from engine.generation import Event
from engine.logprobs import TokenScore
from engine.pieces import CallDelta, Piece, PlainText, Splitter
from engine.protocol import Account, Usage
from engine.tokenizer import Tokenizer

ShownUsage = Usage | UnsetType | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """What the caller wants to see."""

    logprobs: int | None = None
    """Alternatives beside each token's own log-probability; None shows none of it."""
    prompt_logprobs: int | None = None
    echo: Sequence[str] | None = None
    """Each prompt's text, where it is to stand before its answers."""
    choices: int = 1
    """Of each prompt."""
    splitter: Callable[[], Splitter] = PlainText
    """Takes one choice of a chat apart."""


class ReplyWriter:
    """As chat or as text completion. `prompts` and `prompt_scores`, one for each, belong to the running request. A
    choice's index counts over all prompts."""

    def __init__(
        self,
        kind: ReplyKind,
        request_id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        prompt_scores: Sequence[Sequence[TokenScore]],
        options: ReplyOptions,
    ) -> None:
        self.chat = kind == "chat"
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{request_id}"
        self.model, self.created = model, created
        self.options = options
        self._tokenizer = tokenizer
        self._prompts, self._prompt_scores = prompts, prompt_scores
        count = options.choices * len(prompts)
        self._splitters = [options.splitter() for _ in range(count)]
        self._offsets = [TextOffsets(tokenizer) for _ in range(count)]
        self._last_call: dict[int, list[str]] = {}
        """The parts of the arguments of each choice's last call."""

    def whole(self, answers: Sequence[Event], account: Account) -> bytes:
        """The answer to a request that does not stream, as JSON; `answers` are its choices' last events."""
        write = self._chat_choice if self.chat else self._text_choice
        choices = [write(index, answer) for index, answer in enumerate(answers)]
        reply = self._reply("chat.completion" if self.chat else "text_completion", choices, Usage.of(account), account)
        if self.chat and self.options.prompt_logprobs is not None:
            reply = msgspec.structs.replace(reply, prompt_logprobs=self._prompt_logprobs(0))
        return msgspec.json.encode(reply)

    def opening(self, index: int, usage: ShownUsage) -> bytes:
        """The chunk that opens a choice's stream; empty when there is nothing to say."""
        if self.chat:
            return self._chunk(ChunkChoice(index, Delta(role="assistant", content="")), usage)
        if self.options.echo is None:
            return b""
        return self._chunk(TextChoice(index, self._echo(index), None, self._echo_logprobs(index)), usage)

    def text(self, index: int, news: Event, usage: ShownUsage) -> list[bytes]:
        """The chunks of a piece of news that has text or ends a choice, without that end."""
        if not self.chat:
            logprobs = self._text_logprobs(index, news.scores) if news.scores else None
            return [self._chunk(TextChoice(index, news.text, None, logprobs), usage)] if news.text or logprobs else []
        pieces = self._split(index, news.text, last=news.finish is not None)
        shown = chat_logprobs(self._tokenizer, news.scores) if self._shows(news.scores) else None
        if shown is not None and not pieces:
            pieces = [Piece()]
        chunks = []
        for piece in pieces:
            chunks.append(self._chunk(ChunkChoice(index, _delta(piece), None, shown), usage))
            shown = None
        return chunks

    def finish(self, index: int, finish_reason: str, usage: ShownUsage) -> bytes:
        """The last chunk of a choice; it carries no text."""
        if self.chat:
            return self._chunk(ChunkChoice(index, Delta(), self._finish_reason(index, finish_reason)), usage)
        return self._chunk(TextChoice(index, "", finish_reason), usage)

    def usage(self, account: Account) -> bytes:
        """The extra chunk that `include_usage` asks for."""
        return event(self._reply(self._chunk_name, [], Usage.of(account), account))

    def _chat_choice(self, index: int, answer: Event) -> Choice:
        pieces = self._split(index, answer.text, last=True)
        content = "".join(piece.content for piece in pieces)
        reasoning = "".join(piece.reasoning for piece in pieces)
        calls = _whole_calls([piece.call for piece in pieces if piece.call is not None])
        message = Message(
            content=None if calls and not content else content,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        assert answer.finish is not None
        shown = chat_logprobs(self._tokenizer, answer.scores) if self.options.logprobs is not None else None
        return ChatChoice(index, message, self._finish_reason(index, answer.finish), shown)

    def _text_choice(self, index: int, answer: Event) -> Choice:
        logprobs = None
        if self.options.logprobs is not None:
            echoed = self._echo_logprobs(index)
            logprobs = self._text_logprobs(index, answer.scores)
            logprobs = logprobs if echoed is None else _joined(echoed, logprobs)
        prompt = UNSET if self.options.prompt_logprobs is None else self._prompt_logprobs(index)
        return TextChoice(index, self._echo(index) + answer.text, answer.finish, logprobs, prompt)

    def prompt_of(self, index: int) -> int:
        """Which prompt a choice answers."""
        return index // self.options.choices

    def _echo(self, index: int) -> str:
        return "" if self.options.echo is None else self.options.echo[self.prompt_of(index)]

    def _split(self, index: int, text: str, *, last: bool) -> list[Piece]:
        splitter = self._splitters[index]
        pieces = splitter.push(text) + (splitter.finish() if last else [])
        for call in (piece.call for piece in pieces if piece.call is not None):
            parts = self._last_call.setdefault(index, [])
            if call.id is not None:
                parts.clear()
            parts.append(call.arguments)
        return pieces

    def _finish_reason(self, index: int, reason: str) -> str:
        """Calls are to be made only if they are whole: a stop string may have cut the last one."""
        whole = index in self._last_call and _is_json("".join(self._last_call[index]))
        return "tool_calls" if reason == "stop" and whole else reason

    def _shows(self, scores: Sequence[TokenScore]) -> bool:
        return bool(scores) and self.options.logprobs is not None

    def _text_logprobs(self, index: int, scores: Sequence[TokenScore]) -> TextLogprobs | None:
        if self.options.logprobs is None:
            return None
        return text_logprobs(self._tokenizer, self._offsets[index], scores, self.options.logprobs)

    def _echo_logprobs(self, index: int) -> TextLogprobs | None:
        if self.options.logprobs is None or self.options.echo is None:
            return None
        at = self.prompt_of(index)
        scores = [score._replace(top=score.top[: self.options.logprobs]) for score in self._prompt_scores[at]]
        return text_logprobs(
            self._tokenizer,
            self._offsets[index],
            scores,
            self.options.logprobs,
            first=self._prompts[at][0],
            echo=self.options.echo[at],
        )

    def _prompt_logprobs(self, index: int) -> PromptLogprobs:
        scores = self._prompt_scores[self.prompt_of(index)]
        return prompt_logprobs(self._tokenizer, scores, self.options.prompt_logprobs or 0)

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, choice: Choice, usage: ShownUsage) -> bytes:
        return event(self._reply(self._chunk_name, [choice], usage, UNSET))

    def _reply(self, name: str, choices: list[Choice], usage: ShownUsage, account: Account | UnsetType) -> Reply:
        return Reply(
            id=self.id,
            object=name,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            farthing=account,
        )


def _joined(echoed: TextLogprobs, answer: TextLogprobs | None) -> TextLogprobs:
    if answer is None:
        return echoed
    tops = None if echoed.top_logprobs is None else echoed.top_logprobs + (answer.top_logprobs or [])
    return TextLogprobs(
        echoed.text_offset + answer.text_offset,
        echoed.token_logprobs + answer.token_logprobs,
        echoed.tokens + answer.tokens,
        tops,
    )


def _delta(piece: Piece) -> Delta:
    if piece.call is None:
        return Delta(reasoning_content=piece.reasoning) if piece.reasoning else Delta(content=piece.content)
    call = piece.call
    first = call.id is not None
    function = Function(call.arguments, UNSET if call.name is None else call.name)
    return Delta(
        tool_calls=[
            ToolCall(
                index=call.number,
                id=UNSET if call.id is None else call.id,
                type="function" if first else UNSET,
                function=function,
            )
        ]
    )


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _whole_calls(deltas: Sequence[CallDelta]) -> list[ToolCall]:
    parts: dict[int, list[CallDelta]] = {}
    for delta in deltas:
        parts.setdefault(delta.number, []).append(delta)
    return [
        ToolCall(
            id=call[0].id or "",
            type="function",
            function=Function("".join(part.arguments for part in call), call[0].name or ""),
        )
        for _, call in sorted(parts.items())
    ]
