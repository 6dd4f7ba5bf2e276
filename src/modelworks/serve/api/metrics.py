"""Figures for Prometheus under vLLM's names and buckets, so that its dashboards show this server too.

Gauges are set with everything that the engine says, also when it says that nothing runs, and counters only ever grow,
over restarts of the engine as well. Every request that ends is counted, however it ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from modelworks.serve.messages import News
from modelworks.serve.request import Delta, Request
from modelworks.serve.served_model import ServedModel
from modelworks.serve.stats import EngineStats

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_GAUGES = {
    "num_requests_running": "Sequences that run.",
    "num_requests_waiting": "Requests that wait to be run.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks in use; 1 is all.",
}
_COUNTERS = {  # name: (field of EngineStats, meaning)
    "num_preemptions": ("n_preempted", "Sequences that gave their blocks back and were computed again."),
    "prompt_tokens": ("n_prompt_tokens", "Tokens of prompts."),
    "generation_tokens": ("n_generated_tokens", "Tokens generated."),
    "prefix_cache_queries": ("n_prefix_queries", "Tokens of prompts looked up in the prefix cache."),
    "prefix_cache_hits": ("n_prefix_hits", "Tokens of prompts found in the prefix cache."),
}
_LATENCIES = {
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "From a request's arrival until its prompt was begun.",
    "request_inference_time_seconds": "From a prompt's beginning to the request's end.",
    "request_prefill_time_seconds": "From a prompt's beginning to its first token.",
    "request_decode_time_seconds": "From a request's first token to its last.",
}


class Metrics:
    """All figures of one server."""

    def __init__(self, model: ServedModel) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model.name, "engine": "0"}
        self._gauges = {name: self._gauge(name, meaning) for name, meaning in _GAUGES.items()}
        self._counters = {name: self._counter(name, meaning) for name, (_, meaning) in _COUNTERS.items()}
        self._latencies = {name: self._histogram(name, meaning, _LATENCY) for name, meaning in _LATENCIES.items()}
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN)
        between = "Between two tokens of a completion."
        self._between = [
            self._histogram("inter_token_latency_seconds", between, _PER_TOKEN),
            self._histogram("time_per_output_token_seconds", between + " (its older name)", _PER_TOKEN),
        ]
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time between tokens.", _PER_TOKEN
        )
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS)
        counts = _one_two_five(model.max_model_len)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a request's prompt.", counts)
        self._generated = self._histogram("request_generation_tokens", "Tokens generated for a request.", counts)
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest completion.", counts
        )
        self._asked = self._histogram("request_params_max_tokens", "A request's max_tokens.", counts)
        self._n = self._histogram("request_params_n", "A request's n.", (1, 2, 5, 10, 20))
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended, by how they did.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "deadline", "error"):
            self._ended.labels(**self._labels, finished_reason=reason)
        self._before = EngineStats()

    def news(self, news: News) -> None:
        """What the engine said."""
        if news.stats is None:
            return
        now, before = news.stats, self._before
        if now.n_steps < before.n_steps:  # another engine, which counts from nothing
            before = EngineStats()
        self._before = now
        self._gauges["num_requests_running"].set(now.n_running)
        self._gauges["num_requests_waiting"].set(now.n_waiting)
        used = now.n_blocks - now.n_free_blocks
        self._gauges["kv_cache_usage_perc"].set(used / now.n_blocks if now.n_blocks else 0.0)
        for name, (field, _) in _COUNTERS.items():
            self._counters[name].inc(max(0, getattr(now, field) - getattr(before, field)))
        if now.n_steps > before.n_steps:
            self._step_tokens.observe(now.step_tokens)

    def engine_ended(self) -> None:
        """Nothing runs and nothing waits where there is no engine."""
        for gauge in self._gauges.values():
            gauge.set(0)

    def follow(self, request: Request) -> Followed:
        return Followed(self, request)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(f"vllm:{name}", meaning, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(f"vllm:{name}", meaning, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(f"vllm:{name}", meaning, list(self._labels), buckets=buckets, registry=self.registry)
        return made.labels(**self._labels)


class Followed:
    """One request's times and counts, from its arrival to its end."""

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics, self._request = metrics, request
        self.arrived = time.monotonic()
        self._first: float | None = None
        self._queued = 0.0  # seconds until its prompt was begun
        self._last: dict[int, float] = {}  # of each completion, when its last token came
        self.n_tokens: dict[int, int] = {}
        self._reason = "abort"  # unless it is told otherwise
        self._closed = False

    def news(self, delta: Delta) -> None:
        now, metrics = time.monotonic(), self._metrics
        if delta.token_ids:
            if self._first is None:
                self._first, self._queued = now, delta.queued_s
                metrics._first_token.observe(now - self.arrived)
            if (before := self._last.get(delta.index)) is not None:
                for histogram in metrics._between:
                    histogram.observe((now - before) / len(delta.token_ids))
            self._last[delta.index] = now
            self.n_tokens[delta.index] = self.n_tokens.get(delta.index, 0) + len(delta.token_ids)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason

    def fail(self) -> None:
        self._reason = "error"

    def line(self, request_id: str, user: str | None) -> str:
        """For the log: whose it was, how much it was, how it ended and how long it took. One line, whatever the user is
        called."""
        if user is not None and not user.isprintable():
            user = repr(user)
        tokens = f"{len(self._request.prompt)} prompt tokens, {sum(self.n_tokens.values())} generated"
        seconds = time.monotonic() - self.arrived
        return f"{request_id} user={user or '-'} {tokens}, {self._reason}, {seconds:.2f} s"

    def close(self) -> bool:
        """It has ended. Closing twice is closing once; False the second time."""
        if self._closed:
            return False
        self._closed = True
        metrics, params, now = self._metrics, self._request.params, time.monotonic()
        metrics._ended.labels(**metrics._labels, finished_reason=self._reason).inc()
        metrics._prompt.observe(len(self._request.prompt))
        generated = list(self.n_tokens.values())
        metrics._generated.observe(sum(generated))
        metrics._longest.observe(max(generated, default=0))
        metrics._n.observe(params.n)
        if params.max_tokens is not None:
            metrics._asked.observe(params.max_tokens)
        metrics._latencies["e2e_request_latency_seconds"].observe(now - self.arrived)
        if self._first is not None:
            decoding = max(self._last.values()) - self._first
            begun = min(self.arrived + self._queued, self._first)
            metrics._latencies["request_queue_time_seconds"].observe(begun - self.arrived)
            metrics._latencies["request_prefill_time_seconds"].observe(self._first - begun)
            metrics._latencies["request_inference_time_seconds"].observe(now - begun)
            metrics._latencies["request_decode_time_seconds"].observe(decoding)
            if max(generated) > 1:
                metrics._per_token.observe(decoding / (max(generated) - 1))
        return True


def _one_two_five(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … up to `largest`."""
    sizes = [mantissa * 10**power for power in range(len(str(largest))) for mantissa in (1, 2, 5)]
    return [float(size) for size in sizes if size <= largest]
