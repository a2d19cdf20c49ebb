"""One OpenTelemetry trace for each operation, sent only when a collector is configured."""

import logging
from typing import Any

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.telemetry import configure_logs
from tests.gateway.collector import collector
from tests.gateway.running import CHAT, Gateway, running_gateway
from tests.gateway.scripted import Scripted


async def test_a_trace_with_its_steps(
    settings: dict[str, Any], upstream: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collector() as (port, exports):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        async with running_gateway(settings) as gateway:
            context = {"traceparent": parent, "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"}
            answer = await gateway.http.post("/v1/chat/completions", json=CHAT, headers=context)
        found = [resource for body in exports for resource in ExportTraceServiceRequest.FromString(body).resource_spans]
        spans = [span for resource in found for scope in resource.scope_spans for span in scope.spans]
        names = {span.name for span in spans} - {"flush"}  # where the row waits for a thread
        assert names == {"operation", "route", "admit", "dispatch", "settle", "record"}
        assert {span.trace_id.hex() for span in spans} == {parent.split("-")[1]}
        (root,) = [span for span in spans if span.name == "operation"]
        assert root.parent_span_id.hex() == parent.split("-")[2]
        (dispatch,) = [span for span in spans if span.name == "dispatch"]
        assert dispatch.parent_span_id == root.span_id
        sent = upstream.chats[0].headers
        assert sent["traceparent"] == f"00-{parent.split('-')[1]}-{dispatch.span_id.hex()}-01"
        assert sent["tracestate"] == context["tracestate"]
        attributes = {a.key: a.value.string_value for a in root.attributes}
        assert attributes == {
            "farthing.operation_id": answer.headers["x-farthing-trace-id"],
            "farthing.status": "ok",
        }
        assert "hi" not in str([a.value for span in spans for a in span.attributes])


@pytest.mark.parametrize("parent", [None, "00-zz-1-01", f"00-{'0' * 32}-b7ad6b7169203331-01"])
async def test_a_trace_begins_with_the_operation_where_the_caller_has_none(
    gateway: Gateway, upstream: Scripted, parent: str | None
) -> None:
    headers = {} if parent is None else {"traceparent": parent, "tracestate": "a=b"}
    answer = await gateway.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    sent = upstream.chats[0].headers
    version, trace, span, flags = sent["traceparent"].split("-")
    assert trace == answer.headers["x-farthing-trace-id"].replace("-", "")
    assert (version, flags, len(span)) == ("00", "00", 16) and "tracestate" not in sent


@pytest.mark.parametrize("terminal", [True, False])
def test_a_logged_failure_shows_no_local_variable(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    before, handlers = structlog.get_config(), logging.getLogger().handlers[:]
    configure_logs()
    try:
        prompt = "the-" + "secret"
        try:
            int(f"not a number{len(prompt)}")
        except ValueError:
            structlog.get_logger().exception("failed")
    finally:
        structlog.configure(**before)
        logging.getLogger().handlers[:] = handlers
    said = capsys.readouterr().err
    assert "ValueError" in said
    assert "the-secret" not in said
