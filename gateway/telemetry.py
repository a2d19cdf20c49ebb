"""Logs, traces and metrics. None of them ever carries a key, a prompt or an answer."""

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar
from uuid import UUID

import structlog
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from billing.ledger import Ledger
from billing.payloads import Payloads
from billing.records import TOKEN_CLASSES, OperationRecord


def configure_logs() -> None:
    """Readable lines on a terminal, one JSON object a line elsewhere."""
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        # plain tracebacks: the pretty ones print local variables, keys and prompts among them
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


class Tracing:
    """Spans go out when OTEL_EXPORTER_OTLP_ENDPOINT is set; without it nothing is made of them.

    In any case an incoming traceparent goes on to the upstream; where there is none the operation's id is the trace.
    """

    def __init__(self) -> None:
        self._tracer: trace.Tracer | None = None
        self._provider: TracerProvider | None = None
        if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            self._provider = TracerProvider(resource=Resource.create({"service.name": "farthing-gateway"}))
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            self._tracer = self._provider.get_tracer("farthing.gateway")

    def operation(self, identifier: UUID, headers: Mapping[str, str]) -> contextlib.AbstractContextManager[Span | None]:
        """The operation's own span, a child of the caller's."""
        if self._tracer is None:
            return _OFF
        attributes = {"farthing.operation_id": str(identifier)}
        return self._start(self._tracer, "operation", propagate.extract(headers), attributes)

    def span(self, name: str) -> contextlib.AbstractContextManager[Span | None]:
        return _OFF if self._tracer is None else self._start(self._tracer, name)

    @staticmethod
    def _start(
        tracer: trace.Tracer, name: str, context: Context | None = None, attributes: Mapping[str, str] | None = None
    ) -> contextlib.AbstractContextManager[Span]:
        """A span without the words of what fails in it: an upstream's error may quote the prompt."""
        return tracer.start_as_current_span(
            name, context, attributes=attributes, record_exception=False, set_status_on_exception=False
        )

    def outgoing(self, trace_id: str, headers: Mapping[str, str]) -> dict[str, str]:
        """W3C headers for the upstream. `trace_id`: the operation's id."""
        out: dict[str, str] = {}
        if self._tracer is not None:
            propagate.inject(out)
        elif _TRACEPARENT.fullmatch(parent := headers.get("traceparent", "")):
            out["traceparent"] = parent
            if "tracestate" in headers:
                out["tracestate"] = headers["tracestate"]
        else:
            number = trace_id.replace("-", "")
            out["traceparent"] = f"00-{number}-{number[16:]}-00"
        return out

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()


_OFF: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
_TRACEPARENT = re.compile("(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Metrics:
    """What `GET /metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.in_flight = Gauge("farthing_requests_in_flight", "Requests being served", registry=self.registry)
        self.cache_bytes = Gauge(
            "farthing_response_cache_bytes", "What answers in the response cache take", registry=self.registry
        )
        self._lookups = Counter(
            "farthing_response_cache_lookups",
            "Requests of models with a response cache: hit, miss or bypass",
            ["outcome"],
            registry=self.registry,
        )
        self._operations = Counter(
            "farthing_operations", "Operations recorded", ["status", "model"], registry=self.registry
        )
        self._tokens = Counter("farthing_tokens", "Tokens by class", ["token_class", "model"], registry=self.registry)
        self._seconds = Histogram(
            "farthing_operation_seconds", "Duration of operations", ["model"], registry=self.registry
        )
        self._first = Histogram("farthing_ttft_seconds", "Time to the first token", ["model"], registry=self.registry)
        # What `labels` finds, kept: it looks names up anew each time, which costs more than the counting.
        self._count_operation = _kept(self._operations)
        self._count_tokens = _kept(self._tokens)
        self._observe_seconds = _kept(self._seconds)
        self._observe_first = _kept(self._first)

    def watch(self, ledger: Ledger, payloads: Payloads) -> None:
        """Show what waits on its way into the database, and how much more can."""
        for name, text, value in (
            (
                "farthing_spooled_operations",
                "Operations that PostgreSQL does not have yet",
                lambda: ledger.health().spooled,
            ),
            ("farthing_spool_free_bytes", "Room left on the disk under the spool", lambda: ledger.health().free_bytes),
            ("farthing_payloads_dropped", "Payloads that found no room", lambda: payloads.dropped),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)

    def looked_up(self, outcome: str) -> None:
        """A request was looked for in the response cache."""
        self._lookups.labels(outcome).inc()

    def observe(self, record: OperationRecord) -> None:
        model = record.model or ""
        self._count_operation(record.status, model).inc()
        self._observe_seconds(model).observe(record.total_seconds)
        if record.ttft_seconds is not None:
            self._observe_first(model).observe(record.ttft_seconds)
        for attempt in record.attempts:
            for name in TOKEN_CLASSES:
                if count := getattr(attempt.tokens, name):
                    self._count_tokens(name, attempt.model).inc(count)


Metric = TypeVar("Metric", Counter, Histogram)


def _kept(metric: Metric) -> Callable[..., Metric]:
    """`metric.labels`, remembered. Models and statuses are few, and callers cannot make new ones."""
    return functools.cache(metric.labels)
