"""Logs, traces and metrics. None of them ever carries a key, a prompt or an answer."""

import logging
import os
import sys
from collections.abc import Mapping

import structlog
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
    """Spans go out when OTEL_EXPORTER_OTLP_ENDPOINT is set; an incoming traceparent is passed on in any case."""

    def __init__(self) -> None:
        self._provider: TracerProvider | None = None
        if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            self._provider = TracerProvider(resource=Resource.create({"service.name": "farthing-gateway"}))
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        source: trace.TracerProvider = self._provider or trace.NoOpTracerProvider()
        self.tracer = source.get_tracer("farthing.gateway")

    def incoming(self, headers: Mapping[str, str]) -> Context:
        return propagate.extract(headers)

    def outgoing(self) -> dict[str, str]:
        """W3C headers of the current span, for the upstream."""
        headers: dict[str, str] = {}
        propagate.inject(headers)
        return headers

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()


class Metrics:
    """What `GET /metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.in_flight = Gauge("farthing_requests_in_flight", "Requests being served", registry=self.registry)
        self._operations = Counter(
            "farthing_operations", "Operations recorded", ["status", "model"], registry=self.registry
        )
        self._tokens = Counter("farthing_tokens", "Tokens by class", ["token_class", "model"], registry=self.registry)
        self._seconds = Histogram(
            "farthing_operation_seconds", "Duration of operations", ["model"], registry=self.registry
        )
        self._first = Histogram("farthing_ttft_seconds", "Time to the first token", ["model"], registry=self.registry)

    def observe(self, record: OperationRecord) -> None:
        model = record.model or ""
        self._operations.labels(record.status, model).inc()
        self._seconds.labels(model).observe(record.total_seconds)
        if record.ttft_seconds is not None:
            self._first.labels(model).observe(record.ttft_seconds)
        for attempt in record.attempts:
            for name in TOKEN_CLASSES:
                self._tokens.labels(name, attempt.model).inc(getattr(attempt.tokens, name))
