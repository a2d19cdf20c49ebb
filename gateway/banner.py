"""What `farthing up` prints once everything answers. Each snippet works as printed."""

import json

from gateway.upfile import UpFile

QUESTION = "In one sentence: what is a farthing?"


def curl_line(up: UpFile) -> str:
    body = json.dumps({"model": "auto", "max_tokens": 60, "messages": [{"role": "user", "content": QUESTION}]})
    return (
        f"curl {up.base_url}/chat/completions -H 'Authorization: Bearer {up.api_key}'"
        f" -H 'Content-Type: application/json' -d '{body}'"
    )


def python_example(up: UpFile) -> str:
    """Six lines for the unmodified OpenAI SDK (`pip install openai`)."""
    return f"""\
from openai import OpenAI
client = OpenAI(base_url="{up.base_url}", api_key="{up.api_key}")
messages = [{{"role": "user", "content": "{QUESTION}"}}]
stream = client.chat.completions.create(model="auto", messages=messages, max_tokens=60, stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)"""


def banner(up: UpFile, small: str, large: str) -> str:
    return f"""
Farthing is up.

  Base URL    {up.base_url}
  API key     {up.api_key}
  Dashboard   {up.dashboard_url}
  Admin key   {up.admin_key}
  Models      auto, small ({small}), large ({large})

Try it:

{curl_line(up)}

Or from Python (pip install openai):

{python_example(up)}

Ctrl-C stops everything.
"""
