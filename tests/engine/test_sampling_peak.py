"""Every sampler feature at the largest batch stays within the memory that the start has measured."""

import subprocess
import sys

from engine.sampling_params import SamplingParams
from engine.sampling_peak import EVERYTHING

# In a process of its own: memory that was given back to malloc before would hide the peak.
CHECK = """
import sys, torch
from dataclasses import replace
from engine.draw import Row, draw_rows
from engine.logits import TokenRules
from engine.memory import peak_memory_since
from engine.sampling_peak import EVERYTHING, sampling_peak
vocabulary, rows = 49152, 256
profiled = sampling_peak(vocabulary, rows)

def ruled(params):
    rule = TokenRules(params, range(5000), [0])
    for token in range(500):
        rule.push(token)
    return rule

def draw(params, wanted):
    logits = torch.empty(rows, vocabulary).normal_().mul_(8)
    with torch.inference_mode():
        draw_rows(logits, [Row(params, row, 500, rule) for row, rule in enumerate(wanted)])

for top_k, top_p, temperature in ((0, 0.9, 0.5), (50, 1.0, 1.0), (0, 1.0, 2.0), (40000, 0.99, 2.0)):
    params = replace(EVERYTHING, top_k=top_k, top_p=top_p, temperature=temperature)
    if top_k == 40000:
        rows = 8  # each is sorted as a whole
    wanted = [ruled(params) for _ in range(rows)]
    print(profiled, peak_memory_since(lambda: draw(params, wanted)))
"""


def test_every_feature_at_the_largest_batch_stays_within_the_profiled_peak() -> None:
    result = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True)
    found = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len(found) == 4
    for profiled, peak in found:
        assert 256 * 49152 * 4 < profiled < 1 << 30
        assert peak <= profiled + (32 << 20)


def test_the_profile_asks_for_everything_there_is() -> None:
    default = SamplingParams()
    not_about_memory = {"top_k", "seed", "stop", "include_stop", "stop_token_ids", "max_tokens", "ignore_eos"}
    same = {name for name in SamplingParams.__slots__ if getattr(default, name) == getattr(EVERYTHING, name)}
    assert same - not_about_memory <= {"temperature", "prompt_logprobs"}
