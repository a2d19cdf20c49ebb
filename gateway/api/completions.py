"""The text completions surface: a prompt in place of a conversation, otherwise as chat completions."""

from gateway.api.chat import ChatWriter, without_account
from gateway.api.fields import (
    Fields,
    answers,
    choices,
    invalid,
    is_streamed,
    model_name,
    optional,
    read_fields,
    user_tags,
)
from gateway.api.openai import error_body, max_output, stream_options
from gateway.api.prompt import Prompt, as_messages, read_prompt
from gateway.call import Call
from gateway.errors import ApiError
from gateway.upstreams.frames import Frame


class CompletionsSurface:
    api = "completions"

    def decode(self, body: bytes) -> Call:
        fields = read_fields(body)
        prompt = read_prompt(fields, "prompt")
        options = stream_options(fields)
        return Call(
            api=self.api,
            requested_model=model_name(fields),
            messages=as_messages(prompt),
            stream=is_streamed(fields),
            include_usage=options.include_usage or False,
            continuous_usage=options.continuous_usage_stats or False,
            max_output=max_output(fields),
            choices=_answers(fields, prompt),
            has_tools=False,
            tags=user_tags(optional(fields, "user", str, "a string")),
            fields=fields,
            kind="completion",
        )

    def error(self, error: ApiError) -> bytes:
        return error_body(error)

    def whole(self, call: Call, reply: Frame) -> bytes:
        return without_account(reply)

    def writer(self, call: Call) -> ChatWriter:
        return ChatWriter(call)


def _answers(fields: Fields, prompt: Prompt) -> int:
    """How many answers are written, and paid: for each prompt `n`, or `best_of` of which `n` are given."""
    shown, written = choices(fields), choices(fields, "best_of")
    if fields.get("best_of") is not None and written < shown:
        raise invalid("best_of", f"must be at least `n`, which is {shown}")
    return answers(fields) * len(prompt)
