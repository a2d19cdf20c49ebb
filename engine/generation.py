"""One answer in progress: its sequence, how its tokens are chosen, and how they become text."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from engine.detokenizer import Detokenizer
from engine.logits import Grammar, TokenRules
from engine.logprobs import TokenScore
from engine.pooling import Pooling
from engine.protocol import Account
from engine.reasoning import ThinkingMeter
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence


class Event(NamedTuple):
    """News of one generation, made by the step loop."""

    generation: "Generation"
    text: str
    delivered: int
    """Output tokens whose text has been handed over, this event included."""
    finish: FinishReason | None = None
    account: Account | None = None
    """Set when `finish` is."""
    error: str | None = None
    scores: tuple[TokenScore, ...] = ()
    """Of the tokens whose text this event hands over, where logprobs are asked for."""
    vector: Tensor | None = None
    """[hidden] what an embedding has come to, with its last event."""


@dataclass(slots=True, eq=False)
class Generation:
    """Owned by the step loop from `HostedModel.start` on."""

    sequence: Sequence
    params: SamplingParams
    detokenizer: Detokenizer
    streaming: bool
    """Whether text is reported as it comes, or only with the last event."""
    seed: int
    index: int = 0
    """Its place among the choices of its request, over all prompts."""
    grammar: Grammar | None = None
    meter: ThinkingMeter | None = None
    """Counts what the model thinks before it answers."""
    pooling: Pooling | None = None
    """Set where the request wants a vector and not an answer."""
    is_first: bool = True
    """Of those that share its prompt: it counts the prompt, and scores it where that is wanted."""
    rules: TokenRules | None = None
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Of the prompt's tokens from the second on. Complete before the first event."""
    failure: str | None = None
    """Why it ended with an error, where that is its own."""
    held_text: list[str] = field(default_factory=list)
    held_scores: list[TokenScore] = field(default_factory=list)
    """Of the tokens that no event has handed over yet."""

    @property
    def scores_prompt(self) -> bool:
        """Whether tokens of the prompt still wait for their scores."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_scores) < self.sequence.prompt_len - 1

    @property
    def only_reads(self) -> bool:
        """Whether it ends with its prompt."""
        return self.pooling is not None or self.params.max_tokens == 0

    def push(self, token: int, score: TokenScore | None, ends: frozenset[int]) -> tuple[str, FinishReason | None]:
        """Append a sampled token; returns the text that may be shown now, and why it was the last one, if it was."""
        sequence, detokenizer, params = self.sequence, self.detokenizer, self.params
        sequence.tokens.append(token)
        if score is not None:
            self.held_scores.append(score)
        if self.rules is not None:
            self.rules.push(token)
        if self.meter is not None:
            self.meter.push(token)
            sequence.thought = self.meter.count
        if self.grammar is not None and not self.grammar.accept(token):
            self.failure = self.grammar.failure
            return "", "error"
        may_end = sequence.generated >= params.min_tokens
        if (token in ends and not params.ignore_eos) or token in params.stop_token_ids:
            sequence.delivered = sequence.generated - 1
            return detokenizer.finish(), "stop"
        text = detokenizer.push(token, may_stop=may_end)
        if text:
            sequence.delivered = sequence.generated
        if detokenizer.stopped:
            return text, "stop"
        if len(sequence.tokens) >= sequence.max_len:
            sequence.delivered = sequence.generated
            return text + detokenizer.finish(cut=True), "length"
        if not self.streaming:
            self.held_text.append(text)
        return text, None

    def event(
        self, text: str, finish: FinishReason | None = None, account: Account | None = None, error: str | None = None
    ) -> Event:
        """Report the text, with the scores of the tokens it delivers."""
        sent = self.sequence.generated - len(self.held_scores)
        count = max(0, self.sequence.delivered - sent)
        scores, self.held_scores = tuple(self.held_scores[:count]), self.held_scores[count:]
        vector = self.pooling.vector if self.pooling is not None and finish == "stop" else None
        return Event(self, text, self.sequence.delivered, finish, account, error, scores, vector)
