"""Prometheus metrics: native ``pyserve_*`` names, and the ``vllm:*`` names that dashboards know as aliases.

Gauges and counters of the engine are pulled from its ``statistics()`` at each scrape; histograms of
requests are observed as requests end. An alias is the same numbers under another name, made at scrape time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True, slots=True)
class RequestObservation:
    """One generation that ended well; times in seconds, None where unknown."""

    prompt_tokens: int
    output_tokens: int
    n: int
    max_tokens: int
    queue_s: float | None
    prefill_s: float | None
    ttft_s: float | None
    total_s: float | None
    finish_reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine value for the scrape. ``kind`` is gauge, counter or info; names carry no suffix."""

    kind: str
    name: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    alias: str | None = None


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """One engine histogram for the scrape: ``counts`` by upper bound, the last infinite; not cumulative."""

    name: str
    help: str
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    alias: str

    def metric(self, name: str, labels: dict[str, str]) -> Metric:
        """In Prometheus's form."""
        upper = (*map(floatToGoString, self.bounds[:-1]), "+Inf")
        buckets = list(zip(upper, accumulate(self.counts), strict=True))
        family = HistogramMetricFamily(name, self.help, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self.total)
        return family


Source = Callable[[], Iterable[Sample | HistogramSample]]


class Metrics:
    """The registry of one server. ``model`` labels the ``vllm:*`` aliases, as vLLM does."""

    def __init__(self, model: str, *, vllm_aliases: bool = True) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._sources: list[Source] = []
        self._aliases: dict[str, str] = {}
        self._native = CollectorRegistry(auto_describe=False)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", _SECONDS
        )
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens", _SECONDS)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token after the first",
            _SECONDS,
        )
        self._total = self._histogram("e2e_request_latency_seconds", "Arrival to the end", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "In the waiting line", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "In prefill", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "In decode", _SECONDS)
        self._inference = self._histogram(
            "request_inference_time_seconds", "In prefill and decode", _SECONDS
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens", _TOKENS)
        self._output = self._histogram("request_generation_tokens", "Output tokens", _TOKENS)
        self._n = self._histogram("request_params_n", "The n parameter", _CHOICES)
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens", _TOKENS)
        self._success = Counter(
            "pyserve_request_success",
            "Choices that ended well",
            ["finished_reason"],
            registry=self._native,
        )
        self._aliases["pyserve_request_success"] = "vllm:request_success"
        self._finished = {
            reason: self._success.labels(reason) for reason in ("stop", "length", "abort", "error")
        }
        self._http = Counter(
            "pyserve_http_requests", "HTTP answers", ["method", "status"], registry=self._native
        )
        self._http_children: dict[tuple[str, int], Counter] = {}
        self.registry.register(
            _Collector(self._native, self._sources, self._aliases if vllm_aliases else {}, model)
        )

    def add_source(self, source: Source) -> None:
        """Asks ``source`` for its values at every scrape."""
        self._sources.append(source)

    def render(self) -> bytes:
        """The exposition text of one scrape."""
        return generate_latest(self.registry)

    def request_ended(self, seen: RequestObservation) -> None:
        """Observes a generation that ended well."""
        self._prompt.observe(seen.prompt_tokens)
        self._output.observe(seen.output_tokens)
        self._n.observe(seen.n)
        self._max_tokens.observe(seen.max_tokens)
        for reason in seen.finish_reasons:
            self._finished[reason].inc()
        _observe(self._queue, seen.queue_s)
        _observe(self._prefill, seen.prefill_s)
        _observe(self._ttft, seen.ttft_s)
        _observe(self._total, seen.total_s)
        if seen.total_s is None or seen.ttft_s is None or seen.queue_s is None:
            return
        decode_s = max(0.0, seen.total_s - seen.ttft_s)
        self._decode.observe(decode_s)
        self._inference.observe(max(0.0, seen.total_s - seen.queue_s))
        if seen.output_tokens > seen.n:
            self._tpot.observe(decode_s * seen.n / (seen.output_tokens - seen.n))

    def request_broken(self, reason: str) -> None:
        """Counts a request that ended as "abort" (its client left) or "error"."""
        self._finished[reason].inc()

    def token_gap(self, seconds: float) -> None:
        """Observes the time between two tokens of one choice."""
        self._gap.observe(seconds)

    def http_request(self, method: str, status: int) -> None:
        """Counts one HTTP answer (499: the client had gone); unusual methods count together."""
        method = (
            method if method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT") else "other"
        )
        child = self._http_children.get((method, status))
        if child is None:
            child = self._http_children[method, status] = self._http.labels(method, str(status))
        child.inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        self._aliases[f"pyserve_{name}"] = f"vllm:{name}"
        return Histogram(f"pyserve_{name}", text, buckets=buckets, registry=self._native)


def _observe(histogram: Histogram, value: float | None) -> None:
    if value is not None:
        histogram.observe(max(0.0, value))


class _Collector(Collector):
    """Everything of one scrape: native metrics, pulled samples, and the aliases of both."""

    def __init__(
        self,
        native: CollectorRegistry,
        sources: Sequence[Source],
        aliases: dict[str, str],
        model: str,
    ) -> None:
        self._native = native
        self._sources = sources
        self._aliases = aliases
        self._aliased = bool(aliases)
        self._labels = {"model_name": model}

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        for metric in self._native.collect():
            yield _renamed(metric, metric.name, {})
            if alias := self._aliases.get(metric.name):
                yield _renamed(metric, alias, self._labels)
        families: dict[str, Metric] = {}
        for sample in chain.from_iterable(source() for source in self._sources):
            if isinstance(sample, HistogramSample):
                yield sample.metric(sample.name, {})
                if self._aliased:
                    yield sample.metric(sample.alias, self._labels)
                continue
            self._add(families, sample.name, sample, dict(sample.labels))
            if sample.alias and self._aliased:
                self._add(families, sample.alias, sample, {**self._labels, **dict(sample.labels)})
        yield from families.values()

    @staticmethod
    def _add(
        families: dict[str, Metric], name: str, sample: Sample, labels: dict[str, str]
    ) -> None:
        suffix = {"counter": "_total", "info": "_info"}.get(sample.kind, "")
        family = families.get(name)
        if family is None:
            family = families[name] = Metric(name, sample.help, sample.kind)
        family.add_sample(name + suffix, labels, sample.value)


def _renamed(metric: Metric, name: str, labels: dict[str, str]) -> Metric:
    """A copy under another name, without the ``_created`` series that nobody asks for."""
    copy = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        if not sample.name.endswith("_created"):
            renamed = name + sample.name.removeprefix(metric.name)
            copy.add_sample(renamed, {**labels, **sample.labels}, sample.value)
    return copy
