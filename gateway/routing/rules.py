"""The first router: explicit cues, English and Chinese, each with a weight.

The score is a noisy-or, 1 - product(1 - weight) over the cues that were found: it stays in [0, 1), no cue ever lowers
it, and two middling cues add up to a strong one. Only the last user turn is read for cues (an earlier hard question
does not make "thanks" hard); length, tools and the depth of the conversation count the whole call.
"""

import re
from dataclasses import dataclass

from gateway.call import Call
from gateway.routing.router import Decision

SCANNED_CHARACTERS = 20_000
"""Cues are looked for in so many first characters of the turn: routing costs the same however long the prompt is."""


@dataclass(frozen=True, slots=True)
class Cue:
    name: str
    weight: float
    pattern: re.Pattern[str]


def _cue(name: str, weight: float, *alternatives: str) -> Cue:
    return Cue(name, weight, re.compile("|".join(alternatives), re.IGNORECASE | re.MULTILINE))


CUES = (
    _cue(
        "code",
        0.5,
        r"```",
        r"(?-i:^[ \t]*(async def |(def|fn|func) \w+\(|class \w+[:({]|import \w+|from [\w.]+ import|#include))",
        r"\bTraceback \(most recent call last\)",
        r"\b(Syntax|Type|Value|Key|Index|Attribute|Runtime)Error\b",
        r"(?-i:\b(SELECT|INSERT|UPDATE)\b.{1,200}\b(FROM|INTO|SET)\b)",
        r"\b(refactor|debug|unit tests?|regex|stack ?trace|compil\w+|segfault|race condition|deadlock)\b",
        r"\b(write|implement|fix|create|build|review)\b.{0,60}\b(code|function|script|class|program|query|api|parser|app|algorithm)s?\b",
        "重构|调试|报错|单元测试|正则|死锁|编译",
        "(写|实现|修复|编写|审查).{0,30}(代码|函数|脚本|程序|算法|接口|类|解析器)",
    ),
    _cue(
        "maths",
        0.5,
        r"\\(frac|int|sum|sqrt|lim|begin)(?![a-z])",
        r"[∫∑√∂≤≥≠∞∀∃]",
        r"\b(prove|proof|theorem|integral|derivative|eigenvalues?|probability|equations?|combinatorics|modulo)\b",
        r"\bsolve\b.{0,40}=",
        "证明|求解|方程|积分|导数|概率|特征值|定理|不等式|数列",
    ),
    _cue(
        "multi-step",
        0.35,
        r"\bstep[- ]by[- ]step\b",
        r"\bfirst\b[\s\S]{1,300}\bthen\b",
        r"^[ \t]*1[.)] .{1,300}\n[ \t]*2[.)] ",
        r"\b(plan|roadmap|design|architecture|strategy|itinerary)\b",
        r"逐步|分步|一步一步|首先[\s\S]{1,200}(然后|其次|接着|最后)",
        "设计|规划|方案|步骤|架构|路线图",
    ),
    _cue(
        "reasoning",
        0.35,
        r"\bwhy\b",
        r"\bexplain (how|why|in detail)\b",
        r"\b(compare|contrast|analy[sz]e|evaluate|trade-?offs?|pros and cons)\b",
        r"\b(justify|deduce|infer|root cause|critique)\b",
        r"\bwhat (would|could) happen if\b",
        "为什么|为何|分析|比较|对比|评估|推理|推断|优缺点|权衡|利弊|根本原因|论证",
    ),
)
TOOLS_WEIGHT = 0.4
LENGTH_STEPS = ((400, 0.2), (1500, 0.4), (6000, 0.6))
"""(tokens about, weight): the last step reached counts."""
DEEP_CONVERSATION = 8
DEEP_WEIGHT = 0.2


class RulesRouter:
    """Routes by explicit cues. `threshold` in [0, 1]: a score at or above it means the large model."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def route(self, call: Call) -> Decision:
        found = self._found(call)
        rest = 1.0
        for _, weight in found:
            rest *= 1.0 - weight
        score = 1.0 - rest
        ordered = sorted(found, key=lambda item: -item[1])
        reasons = tuple(name for name, _ in ordered) or ("no cue",)
        return Decision("large" if score >= self._threshold else "small", score, reasons)

    def _found(self, call: Call) -> list[tuple[str, float]]:
        texts = list(call.texts())
        last_user = next((text for role, text in reversed(texts) if role == "user"), "")
        turn = last_user[:SCANNED_CHARACTERS]
        found = [(cue.name, cue.weight) for cue in CUES if cue.pattern.search(turn)]
        tokens = sum(about_tokens(text) for _, text in texts)
        step = max((weight for size, weight in LENGTH_STEPS if tokens >= size), default=0.0)
        if step:
            found.append((f"length about {tokens} tokens", step))
        if call.has_tools:
            found.append(("tools", TOOLS_WEIGHT))
        if len(call.messages) >= DEEP_CONVERSATION:
            found.append((f"{len(call.messages)} messages", DEEP_WEIGHT))
        return found


def about_tokens(text: str) -> int:
    """Rough token count without a tokenizer: four ASCII characters a token, one and a half of any other."""
    if text.isascii():
        return len(text) // 4
    ascii_characters = len(text.encode("ascii", "ignore"))
    return ascii_characters // 4 + (len(text) - ascii_characters) * 2 // 3
