"""What the server counts: Prometheus series in the schema that vLLM and llama.cpp share, and figures of one request."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nextn.decoding.records import SequenceRound
from nextn.serve.request import EngineStats, GenerationChunk
from nextn.stats.acceptance import length_of_drafts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_DURATIONS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_PER_POSITION = "nextn:spec_decode_num_accepted_tokens_per_pos"
_COPIES_PER_POSITION = "nextn:copy_num_accepted_tokens_per_pos"


class ServerMetrics:
    """The series of one server, in a registry of their own, with the served name as their label `model_name`.

    `stats` returns the engine's snapshot; called when the metrics are read.
    """

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._registry, self._model = CollectorRegistry(), model
        self.num_drafts = self._counter("nextn:spec_decode_num_drafts", "Rounds that drafted.")
        self.draft_tokens = self._counter("nextn:spec_decode_num_draft_tokens", "Draft tokens.")
        self.accepted = self._counter("nextn:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self.num_copies = self._counter("nextn:copy_num_drafts", "Rounds that copied drafts from the text.")
        self.copied = self._counter("nextn:copy_num_draft_tokens", "Draft tokens copied from the text.")
        self.accepted_copies = self._counter("nextn:copy_num_accepted_tokens", "Copied tokens that were accepted.")
        self.prompt_tokens = self._counter("nextn:prompt_tokens", "Prompt tokens of requests that began.")
        self.generation_tokens = self._counter("nextn:generation_tokens", "Tokens that were generated.")
        self.first_token = self._histogram("nextn:time_to_first_token_seconds", "To a sequence's first token.")
        self.inter_token = self._histogram(
            "nextn:inter_token_latency_seconds", "Between two chunks of a sequence; a chunk has the tokens of a round."
        )
        self.request_latency = self._histogram("nextn:e2e_request_latency_seconds", "Of a whole sequence.", _DURATIONS)
        self._positions = self._labelled(_PER_POSITION, "Accepted, by position.", "position")
        self._copy_positions = self._labelled(_COPIES_PER_POSITION, "Copied and accepted, by position.", "position")
        self._finished = self._labelled("nextn:request_success", "Sequences that ended.", "finished_reason")
        self._errors = self._labelled("nextn:http_errors", "Answers with an error.", "status")
        self._registry.register(_EngineCollector(model, stats))

    def observe(self, chunk: GenerationChunk, *, since_submitted: float, since_chunk: float | None) -> None:
        """Count a chunk, by the seconds since the request and since the last tokens; None: these are the first."""
        num_tokens = 0
        for one in chunk.rounds:
            num_tokens += len(one.emitted)
            if one.drafts:
                self._observe_drafts(one)
        if num_tokens:
            self.generation_tokens.inc(num_tokens)
            if since_chunk is None:
                self.first_token.observe(since_submitted)
            else:
                self.inter_token.observe(since_chunk)
        if chunk.finish is not None:
            self.request_latency.observe(since_submitted)
            self._finished.labels(self._model, chunk.finish).inc()

    def _observe_drafts(self, one: SequenceRound) -> None:
        of_head = self.num_drafts, self.draft_tokens, self.accepted
        counters = (self.num_copies, self.copied, self.accepted_copies) if one.copied else of_head
        for counter, count in zip(counters, (1, len(one.drafts), one.num_accepted), strict=True):
            counter.inc(count)
        positions = self._copy_positions if one.copied else self._positions
        for position in range(one.num_accepted):
            positions.labels(self._model, str(position)).inc()

    def count_error(self, status: int) -> None:
        self._errors.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        """Return the series as Prometheus text."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self._registry).labels(self._model)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, ("model_name", label), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _LATENCIES) -> Histogram:
        labels = ("model_name",)
        return Histogram(name, text, labels, registry=self._registry, buckets=buckets).labels(self._model)


class _EngineCollector(Collector):
    """Gauges and counters that the engine holds; read at each scrape."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._model, self._stats = model, stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        gauges = {
            "nextn:num_requests_running": (stats.num_running, "Sequences that are decoded."),
            "nextn:num_requests_waiting": (stats.num_waiting, "Sequences in the queue."),
            "nextn:kv_cache_usage_perc": (
                stats.cache_positions / max(1, stats.max_cache_positions),
                "Share of the KV cache in use; 1 is all of it.",
            ),
            "nextn:prefix_cache_usage_perc": (
                stats.prefix_positions / max(1, stats.max_prefix_positions),
                "Share of the prefix cache in use; 1 is all of it.",
            ),
        }
        counters = {
            "nextn:prefix_cache_queries": (stats.prefix_queries, "Prompt tokens looked up in the prefix cache."),
            "nextn:prefix_cache_hits": (stats.prefix_hits, "Prompt tokens found in the prefix cache."),
        }
        for name, (value, text) in gauges.items():
            yield self._with_model(GaugeMetricFamily(name, text, labels=("model_name",)), value)
        for name, (value, text) in counters.items():
            yield self._with_model(CounterMetricFamily(name, text, labels=("model_name",)), value)

    def _with_model(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric((self._model,), value)
        return family


def request_metrics(rounds: Sequence[SequenceRound]) -> dict[str, object]:
    """Return a request's acceptance, as `metrics` of its answer.

    `spec_decode` has the names of the Prometheus series, with the copied drafts under `copies`; `speculative_decoding`,
    of all drafts, is what vLLM writes with --per-request-spec-decode-metrics, for tools that read it: 1, 0 and [0] of a
    request without drafts.
    """
    drafted = [one for one in rounds if one.drafts]
    own, copies = (_own_metrics([one for one in drafted if one.copied == copied]) for copied in (False, True))
    own |= {"copies": copies} if copies["num_drafts"] else {}
    undrafted = {"mean_acceptance_length": 1.0, "draft_acceptance_rate": 0.0, "acceptance_histogram": [0]}
    vllm = {
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": sum(one.num_accepted for one in drafted),
        "num_spec_tokens": max((len(one.drafts) for one in drafted), default=0),
    }
    return {
        "spec_decode": own,
        "speculative_decoding": _shared_metrics(drafted) | vllm | ({} if drafted else undrafted),
    }


def _shared_metrics(drafted: Sequence[SequenceRound]) -> dict[str, object]:
    """What vLLM and nextn call alike, of rounds with drafts."""
    depth = max((len(one.drafts) for one in drafted), default=0)
    num_draft_tokens = sum(len(one.drafts) for one in drafted)
    num_accepted = sum(one.num_accepted for one in drafted)
    counts = range(depth + 1) if drafted else ()
    return {
        "mean_acceptance_length": length_of_drafts(num_accepted, len(drafted)) if drafted else None,
        "draft_acceptance_rate": num_accepted / num_draft_tokens if drafted else None,
        "acceptance_histogram": [sum(one.num_accepted == count for one in drafted) for count in counts],
        "num_draft_tokens": num_draft_tokens,
    }


def _own_metrics(drafted: Sequence[SequenceRound]) -> dict[str, object]:
    depths = range(max((len(one.drafts) for one in drafted), default=0))
    return _shared_metrics(drafted) | {
        "num_drafts": len(drafted),
        "num_accepted_tokens": sum(one.num_accepted for one in drafted),
        "num_accepted_tokens_per_pos": [sum(one.num_accepted > at for one in drafted) for at in depths],
    }
