"""Events come into the real prometheus_client and opentelemetry; neither is imported before its function is called."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.events import Event, opentelemetry_events, prometheus_events


def save_some(path: Path, on_event: Callable[[Event], object]) -> None:
    fails = [False, True, False]

    def filter_func(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        if fails.pop(0):
            raise ValueError("as planned")
        return blocks

    with asyncckpt.Saver(
        path=path,
        tensors={"w": torch.ones(1000)},
        keep=1,
        filter_func=filter_func,
        debug=asyncckpt.DebugOptions(on_event=on_event),
    ) as saver:
        for step in (1, 2, 3):
            saver.save_async(step).exception()


def test_prometheus_counts_saves(tmp_path: Path) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    save_some(tmp_path, prometheus_events(registry))
    path = {"path": str(tmp_path)}

    def value(metric: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(metric, {**path, **labels})
        return found

    assert value("asyncckpt_saves_total", what="save", outcome="committed") == 2
    assert value("asyncckpt_saves_total", what="save", outcome="failed") == 1
    assert value("asyncckpt_stall_seconds_count") == 2
    assert value("asyncckpt_span_seconds_count", name="filter") == 3
    assert value("asyncckpt_newest_step") == 3
    written = value("asyncckpt_written_bytes_total")
    assert written is not None
    assert written > 2 * 4000
    assert b"asyncckpt_stall_seconds_bucket" in prometheus.generate_latest(registry)


def test_opentelemetry_gets_metrics_and_spans(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, exporter, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    save_some(tmp_path, opentelemetry_events(MeterProvider([reader]), tracers))
    data = reader.get_metrics_data()
    assert data is not None
    metrics = {item.name: item.data for item in data.resource_metrics[0].scope_metrics[0].metrics}
    counts = {point.attributes["outcome"]: point.value for point in metrics["asyncckpt.saves"].data_points}
    assert counts == {"committed": 2, "failed": 1}
    assert [point.count for point in metrics["asyncckpt.stall"].data_points] == [2]
    spans = exporter.get_finished_spans()
    saves = [span for span in spans if span.name == "asyncckpt save"]
    assert [span.attributes["asyncckpt.step"] for span in saves] == [1, 2, 3]
    assert [span.status.is_ok for span in saves] == [True, False, True]
    for save in saves:
        own = [span for span in spans if span.parent is not None and span.parent.span_id == save.context.span_id]
        assert {"call", "capture", "filter", "write"} <= {span.name for span in own}
        assert all(save.start_time <= span.start_time <= span.end_time for span in own)


def test_events_import_neither_before_they_are_used() -> None:
    source = (
        "import sys, asyncckpt.events; "
        "print([name for name in ('torch', 'prometheus_client', 'opentelemetry') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
