"""One request inside the engine: its tokens, its blocks, and what it has used so far."""

from dataclasses import dataclass, field
from typing import Literal

from engine.block_manager import Space
from engine.protocol import Account

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of a prompt and its answer. The step loop's own from `Scheduler.add` on; times are monotonic seconds."""

    id: str
    salt: bytes
    tokens: list[int]
    prompt_len: int
    max_len: int
    """Prompt and output tokens together may not exceed this."""
    arrived: float
    adapter: bytes = b""
    """What its KV depends on besides the model; empty for the bare model."""
    priority: int = 0
    """Lower goes first."""
    reserves_all: bool = False
    """Whether it starts only when all blocks that `max_len` takes are sure to be there."""
    reuse: bool = True
    """Whether leading tokens may be taken from the cache; not where something is wanted of each of them."""

    space: Space = field(init=False)
    order: int = 0
    """Its number in order of arrival, given by the scheduler."""
    last_step: int = 0
    """The last step in which it decoded while tenants competed."""

    # Where its KV is.
    computed: int = 0
    """Leading tokens whose KV is in the pool."""
    blocks: list[int] = field(default_factory=list)
    row: int | None = None
    """Its row of the scheduler's block table; None while it waits."""
    hashes: list[bytes] = field(default_factory=list)
    """Block hashes of its leading full blocks, as far as anyone asked."""
    reused: int = 0
    """Leading blocks that it found in the cache when it was last started."""
    promised: int = 0
    """Blocks that it can count on in all."""
    registered: int = 0
    """Leading blocks that the block manager can find by hash."""
    collided: bool = False
    """A block hash collided: no further block of this sequence is registered while it runs."""

    # What it used.
    cached_tokens: int | None = None
    """Prompt tokens found in the cache at first admission; frozen from then on."""
    peak_computed: int = 0
    """Most tokens it ever had in the pool: what it computes below this is a recompute."""
    recomputed_tokens: int = 0
    preemptions: int = 0
    admitted: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    longest_gap: float = 0.0
    """Between two tokens, in seconds."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    block_seconds: float = 0.0
    blocks_since: float = 0.0
    delivered: int = 0
    """Output tokens whose text was handed to the caller."""
    thought: int = 0
    """Leading output tokens that are thinking."""

    def __post_init__(self) -> None:
        self.space = Space(self.salt, self.adapter)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def own_blocks(self) -> int:
        """Blocks it took or was promised, those it found in the cache not counted."""
        return max(self.promised, len(self.blocks)) - self.reused

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    def sampled(self, now: float) -> float | None:
        """Note that a token was sampled; returns the seconds since the one before it."""
        if self.first_token is None:
            self.first_token = self.last_token = now
            return None
        gap, self.last_token = now - self.last_token, now
        if gap > self.longest_gap:
            self.longest_gap = gap
        return gap

    def settle_blocks(self, now: float) -> None:
        """Charge the blocks held since the last call. Must precede every change of `blocks`."""
        self.block_seconds += len(self.blocks) * (now - self.blocks_since)
        self.blocks_since = now

    def account(self, now: float) -> Account:
        """The bill as of `now`. A request that was never admitted computed nothing: its whole prompt is fresh."""
        cached = self.cached_tokens or 0
        gaps = self.generated - 1 if self.first_token is not None else 0
        return Account(
            input_fresh=self.prompt_len - cached,
            input_cached=cached,
            output_text=max(0, self.delivered - self.thought),
            output_reasoning=min(self.thought, self.delivered),
            generated_tokens=self.generated,
            recomputed_tokens=self.recomputed_tokens,
            prefill_device_seconds=self.prefill_seconds,
            decode_device_seconds=self.decode_seconds,
            kv_block_seconds=self.block_seconds,
            queue_seconds=(now if self.admitted is None else self.admitted) - self.arrived,
            ttft_seconds=None if self.first_token is None else self.first_token - self.arrived,
            mean_inter_token_seconds=(self.last_token - (self.first_token or 0.0)) / gaps if gaps > 0 else None,
            max_inter_token_seconds=self.longest_gap if gaps > 0 else None,
            total_seconds=now - self.arrived,
            preemptions=self.preemptions,
        )
