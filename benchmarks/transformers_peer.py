"""Hugging Face transformers `generate` as a peer: the same GGUF, bf16, the same token ids, in its own process.

Run as `python -m benchmarks.transformers_peer PATH.gguf`; reads one JSON request a line ({"prompts", "tokens"}),
answers one JSON line a request ({"seconds"}). The prompts of one request are one static batch and have equal lengths.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO


class Peer:
    """The parent's end of the pipe."""

    def __init__(self, child: "subprocess.Popen[str]", requests: IO[str], replies: IO[str]) -> None:
        self._child, self._requests, self._replies = child, requests, replies

    def generate(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds that one `generate` call took for a static batch, `tokens` new tokens each, greedy."""
        self._requests.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._requests.flush()
        line = self._replies.readline()
        if not line:
            raise RuntimeError(f"transformers stopped with exit code {self._child.wait()}")
        return float(json.loads(line)["seconds"])


@contextlib.contextmanager
def transformers(path: Path) -> Iterator[Peer]:
    """Load the model in a child process; it is ready when this yields."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transformers_peer", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        if not child.stdout.readline():
            raise RuntimeError(f"transformers did not load {path}")
        yield Peer(child, child.stdin, child.stdout)
    finally:
        child.stdin.close()
        child.wait(30)


def _serve(path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor(request["prompts"])
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request["tokens"],
                min_new_tokens=request["tokens"],
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - began
        assert out.shape[1] == ids.shape[1] + request["tokens"]
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
