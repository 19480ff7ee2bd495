"""A histogram that is cheap enough to feed with every token, collected by the Prometheus registry.

The OpenTelemetry histogram costs about 10 us a record, more than making the token's event. Here a record is one
bisection and two additions; the price is that only ``/metrics`` shows it, not OTLP.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from suimon.gateway.semconv import REQUEST_MODEL, Metric

if TYPE_CHECKING:
    from prometheus_client.metrics_core import HistogramMetricFamily


class Intervals:
    """Counts of one model's intervals: ``counts[i]`` of those in bucket i, the last of those above every bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # seconds

    def add(self, seconds: float, tokens: int = 1) -> None:
        """``tokens`` tokens arrived together, ``seconds`` after the ones before: that many equal intervals."""
        self.counts[bisect_left(self._bounds, seconds / tokens)] += tokens
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus counts: (upper bound, intervals up to it)."""
        pairs: list[tuple[str, float]] = []
        count = 0
        for bound, inside in zip([*map(str, self._bounds), "+Inf"], self.counts, strict=True):
            count += inside
            pairs.append((bound, count))
        return pairs


class TokenLatency(Collector):
    """One Intervals per model, rendered as one Prometheus histogram."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._models: dict[str, Intervals] = {}

    def of(self, model: str) -> Intervals:
        """The counts of ``model``, made at first use."""
        if model not in self._models:
            self._models[model] = Intervals(self._metric.buckets)
        return self._models[model]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Called by the registry at every scrape."""
        from prometheus_client.metrics_core import HistogramMetricFamily

        name = self._metric.name.replace(".", "_")
        label = REQUEST_MODEL.replace(".", "_")
        family = HistogramMetricFamily(name, self._metric.description, labels=[label], unit="seconds")
        for model, intervals in list(self._models.items()):  # the event loop adds models meanwhile
            family.add_metric([model], intervals.cumulative(), intervals.total)
        yield family
