"""Metrics of a run, exposed over HTTP and read back with Prometheus's own parser."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

import daop
from daop.runtime.metrics import DOCUMENTATION, Histogram, Metrics

DEMO = Path(daop.__file__).parent / "assets" / "demo"


def test_a_server_exposes_what_the_statistics_say() -> None:
    client = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    metrics = Metrics()
    registry = client.CollectorRegistry()
    metrics.register(registry)
    server, thread = client.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with daop.load(DEMO, policy="speculative", ecr=0.3, watchers=[metrics]) as runtime:
            runtime.generate([[5, 6, 7]], 9)
            figures = runtime.statistics()
            address = f"http://127.0.0.1:{server.server_port}/metrics"
            text = urllib.request.urlopen(address).read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert {name.removesuffix("_total") for name in DOCUMENTATION} == set(families)
    for name, family in families.items():
        assert family.documentation
        assert family.type == ("counter" if f"{name}_total" in DOCUMENTATION else family.type)
    hits = [samples["daop_expert_hits_total", phase] for phase in ("prefill", "decode")]
    assert sum(hits) == figures["requests"]["hits"]
    misses = [samples["daop_expert_misses_total", phase] for phase in ("prefill", "decode")]
    assert sum(misses) == figures["requests"]["misses"] > 0
    for fate, count in figures["prefetches"].items():
        assert samples["daop_prefetches_total", fate] == count
    assert samples["daop_moved_bytes_total", "demand"] == figures["bytes"]["demand"]
    for cause, ms in figures["stall_ms"].items():
        assert samples["daop_stall_seconds_total", cause] == pytest.approx(ms / 1e3)
    assert samples["daop_tokens_total", "prefill"] == 3
    assert samples["daop_tokens_total", "decode"] == 8
    assert samples["daop_forward_seconds_count", "decode"] == 8
    assert samples["daop_forward_seconds_bucket", "+Inf", "decode"] == 8
    assert 0 < samples["daop_forward_seconds_sum", "decode"] < 60
    assert samples["daop_resident_experts",] <= samples["daop_slots",] == figures["slots"]
    assert metrics.text() == text


def test_buckets_are_cumulated_and_hold_their_upper_end() -> None:
    histogram = Histogram()
    for seconds in (0.0001, 0.0002, 0.3, 99.0):
        histogram.observe(seconds)
    buckets = dict(histogram.buckets())
    assert buckets["0.0001"] == 1
    assert buckets["0.0005"] == 2
    assert buckets["0.25"] == 2
    assert buckets["0.5"] == 3
    assert buckets["10.0"] == 3
    assert buckets["+Inf"] == 4


def test_nothing_is_told_before_a_run() -> None:
    pytest.importorskip("prometheus_client")
    assert Metrics().text() == ""
