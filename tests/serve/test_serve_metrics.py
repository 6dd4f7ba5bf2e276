"""The metrics against the names, labels and buckets that vLLM documents, and against what was really asked."""

from __future__ import annotations

from collections.abc import Iterator

import fake_engine
import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Serving, serving

from modelworks.serve.api.metrics import Metrics
from modelworks.serve.messages import News
from modelworks.serve.stats import EngineStats

# What Grafana's dashboards for vLLM ask for.
DASHBOARD = {
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:request_success": "counter",
}

BUCKETS = {  # of vLLM 0.32, vllm/v1/metrics/buckets.py
    "first token": [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
    ],
    "token": [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80],
    "request": [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680],
    "step": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
    "n": [1, 2, 5, 10, 20],
}
FAMILY = {
    "vllm:time_to_first_token_seconds": "first token",
    "vllm:inter_token_latency_seconds": "token",
    "vllm:time_per_output_token_seconds": "token",
    "vllm:request_time_per_output_token_seconds": "token",
    "vllm:e2e_request_latency_seconds": "request",
    "vllm:request_queue_time_seconds": "request",
    "vllm:request_prefill_time_seconds": "request",
    "vllm:request_decode_time_seconds": "request",
    "vllm:request_inference_time_seconds": "request",
    "vllm:iteration_tokens_total": "step",
    "vllm:request_params_n": "n",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(fake_engine.build_fake) as running:
        yield running


def figures(server: Serving) -> dict[tuple[str, str], float]:
    """Each sample by its name and by what tells it from others of that name (a bucket's bound, a reason)."""
    text = httpx2.get(f"{server.url}/metrics").text
    return {
        (sample.name, sample.labels.get("le") or sample.labels.get("finished_reason") or ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_labels_and_buckets_are_vllms(server: Serving) -> None:
    text = httpx2.get(f"{server.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: families[name].type for name in DASHBOARD} == DASHBOARD
    for name in DASHBOARD:
        for sample in families[name].samples:
            assert sample.labels["model_name"] == "fake"
            assert sample.labels["engine"] == "0"
    bounds = {
        name: [float(sample.labels["le"]) for sample in families[name].samples if "le" in sample.labels]
        for name in DASHBOARD
    }
    for name, family in FAMILY.items():
        assert bounds[name] == [*BUCKETS[family], float("inf")], name
    assert bounds["vllm:request_prompt_tokens"] == [1, 2, 5, 10, 20, 50, 100, 200, float("inf")], "to the context's 256"


def test_what_is_counted_is_what_was_asked(server: Serving) -> None:
    before = figures(server)
    with httpx2.Client(base_url=server.url, timeout=20) as http:
        http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "n": 2})
        http.post("/v1/completions", json={"prompt": "!stop", "max_tokens": 50})
        http.post("/v1/completions", json={"prompt": "!error"})
        http.post("/v1/completions", json={"prompt": "a", "temperature": 9})  # never reaches the engine
        with http.stream("POST", "/v1/completions", json={"prompt": "!slow", "max_tokens": 250, "stream": True}):
            pass
    server.wait_for(lambda: server.service.engine.n_requests == 0)
    server.wait_for(lambda: server.service.engine.stats.n_running == 0)
    after = figures(server)

    def grown(name: str, what: str = "") -> float:
        return after[(name, what)] - before[(name, what)]

    ends = {reason: grown("vllm:request_success_total", reason) for reason in ("length", "stop", "error", "abort")}
    assert ends == {"length": 1, "stop": 1, "error": 1, "abort": 1}
    assert grown("vllm:prompt_tokens_total") == 3 + 5 + 6 + 5
    assert grown("vllm:generation_tokens_total") >= 10 + 3 + 2
    assert grown("vllm:e2e_request_latency_seconds_count") == 4
    assert grown("vllm:request_queue_time_seconds_count") >= 3
    waited, counted = grown("vllm:request_queue_time_seconds_sum"), grown("vllm:request_queue_time_seconds_count")
    assert waited == pytest.approx(1e-6 * counted, rel=1e-3), "what the engine said"
    assert grown("vllm:request_prefill_time_seconds_count") == grown("vllm:request_queue_time_seconds_count")
    assert grown("vllm:request_params_n_sum") == 2 + 1 + 1 + 1
    assert grown("vllm:request_prompt_tokens_sum") == 3 + 5 + 6 + 5
    assert grown("vllm:inter_token_latency_seconds_count") >= 2 * 4 + 2 + 1
    assert after[("vllm:num_requests_running", "")] == 0, "nothing runs for ever"


def test_counters_only_grow_and_gauges_follow() -> None:
    metrics = Metrics(fake_engine.served_model())

    def value(name: str) -> float:
        found = metrics.registry.get_sample_value(name, {"model_name": "fake", "engine": "0"})
        assert found is not None
        return found

    metrics.news(News(stats=EngineStats(n_running=3, n_blocks=10, n_free_blocks=4, n_generated_tokens=70, n_steps=9)))
    assert value("vllm:num_requests_running") == 3
    assert value("vllm:kv_cache_usage_perc") == 0.6
    metrics.news(News(stats=EngineStats(n_running=0, n_blocks=10, n_free_blocks=10, n_generated_tokens=70, n_steps=9)))
    assert value("vllm:num_requests_running") == 0
    metrics.news(News(stats=EngineStats(n_running=1, n_generated_tokens=5, n_steps=1)))  # after a restart
    assert value("vllm:generation_tokens_total") == 75
    metrics.engine_ended()
    assert value("vllm:num_requests_running") == 0
