"""What /metrics shows, in Prometheus' text format. Counters are read from where the engine keeps them anyway."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine.accounting import Intervals
from engine.core import EngineCore
from engine.protocol import Account

PREFIX = "farthing_engine_"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Latencies:
    """Histograms over finished requests, observed on the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._queue, self._first_token, self._total = (
            Histogram(PREFIX + name, text, ["model"], buckets=SECONDS, registry=self.registry)
            for name, text in (
                ("queue_seconds", "Arrival to first admission"),
                ("ttft_seconds", "Arrival to first sampled token"),
                ("request_seconds", "Arrival to end"),
            )
        )

    def observe(self, model: str, account: Account) -> None:
        self._queue.labels(model).observe(account.queue_seconds)
        if account.ttft_seconds is not None:
            self._first_token.labels(model).observe(account.ttft_seconds)
        self._total.labels(model).observe(account.total_seconds)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=["model", *labels])


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=["model", *labels])


class CoreCollector:
    """Reads one step loop's counters at each scrape."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        yield from self._clock()
        yield from self._models()

    def _clock(self) -> Iterator[Metric]:
        account = self._core.clock.account()
        wall, idle = account.wall_seconds, account.idle_seconds
        # device_seconds over all models and kinds + idle_seconds == wall_seconds
        yield CounterMetricFamily(PREFIX + "wall_seconds", "Wall time accounted for since start", value=wall)
        yield CounterMetricFamily(PREFIX + "idle_seconds", "Part of it in which no step ran", value=idle)

    def _models(self) -> Iterator[Metric]:
        device = _counter("device_seconds", "Time of steps, shared out over the tokens they computed", "kind")
        computed = _counter("computed_tokens", "Tokens computed, recomputes included", "kind")
        steps = _counter("steps", "Steps run")
        requests = _counter("requests", "Requests ended", "finish_reason")
        tokens = _counter("request_tokens", "Tokens of ended requests, named as in their accounts", "kind")
        preemptions = _counter("preemptions", "Times a request was put back to wait for memory")
        queued = _gauge("sequences", "Requests in progress", "state")
        blocks = _gauge("kv_blocks", "KV blocks of 16 tokens", "state")
        promised = _gauge("kv_blocks_promised", "Free or cached KV blocks that running requests can count on")
        cost = _gauge(
            "cost_seconds", "What a step takes, measured at start: the weights that device_seconds go by", "of"
        )
        intervals = HistogramMetricFamily(
            PREFIX + "inter_token_seconds", "From one token of an answer to the next", labels=["model"]
        )
        for name, model in self._core.models.items():
            device.add_metric([name, "prefill"], model.device.prefill_seconds)
            device.add_metric([name, "decode"], model.device.decode_seconds)
            computed.add_metric([name, "prefill"], model.device.prefill_tokens)
            computed.add_metric([name, "decode"], model.device.decode_tokens)
            steps.add_metric([name], model.device.steps)
            for reason, count in model.finished.copy().items():
                requests.add_metric([name, reason], count)
            for kind, count in model.tokens.copy().items():
                tokens.add_metric([name, kind], count)
            preemptions.add_metric([name], model.scheduler.preemptions)
            queued.add_metric([name, "running"], len(model.scheduler.running))
            queued.add_metric([name, "waiting"], len(model.scheduler.waiting))
            free, cached = model.blocks.free, model.blocks.cached
            blocks.add_metric([name, "free"], free)
            blocks.add_metric([name, "cached"], cached)
            blocks.add_metric([name, "held"], model.blocks.num_blocks - free - cached)
            promised.add_metric([name], model.scheduler.reserved)
            for part in ("step", "prefill_row", "prefill_context", "decode_row", "decode_context"):
                cost.add_metric([name, part], getattr(model.cost, part))
            intervals.add_metric([name], _buckets(model.token_intervals), model.token_intervals.total)
        yield from (device, computed, steps, requests, tokens, preemptions, queued, blocks, promised, cost, intervals)


def _buckets(intervals: Intervals) -> list[tuple[str, float]]:
    bounds = [*map(str, intervals.BOUNDS), "+Inf"]
    return list(zip(bounds, accumulate(intervals.counts), strict=True))
