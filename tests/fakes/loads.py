"""Load reports of the servers, page by page.

The pages follow vLLM 0.32, SGLang 0.5.23 and the server of llama-cpp-python 0.3.36, including unrelated lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from .wire import WireServer

# Body of each page by path, built when it is requested.
Pages = Mapping[str, Callable[[], bytes]]


def generating(server: WireServer) -> int:
    """Return the number of unfinished requests."""
    return sum(seen.done_at is None and seen.gone_at is None for seen in server.requests)


def vllm_metrics(*engines: tuple[int, int, float], cache_tokens: int | None = 54_272) -> bytes:
    """Return a metrics page; each of `engines` is (running, waiting, cache usage)."""
    lines = [
        "# HELP python_gc_objects_collected_total Objects collected during gc",
        "# TYPE python_gc_objects_collected_total counter",
        'python_gc_objects_collected_total{generation="0"} 9853.0',
    ]
    rows = (
        ("vllm:num_requests_running", "Number of requests in model execution batches.", "", 0),
        ("vllm:num_requests_waiting", "Number of requests waiting to be processed.", "", 1),
        ("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", ',reason="capacity"', 1),
        ("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "", 2),
    )
    for name, help_text, label, column in rows:
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        for number, engine in enumerate(engines):
            lines.append(f'{name}{{engine="{number}",model_name="tiny"{label}}} {float(engine[column])}')
    size = "" if cache_tokens is None else f',kv_cache_size_tokens="{cache_tokens}"'
    for number in range(len(engines)):
        lines.append(
            f'vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="{number}",'
            f'gpu_memory_utilization="0.92"{size},num_gpu_blocks="6784",prefix_caching_hash_algo="sha256"}} 1.0'
        )
    for bound in ("0.001", "0.005", "+Inf"):
        lines.append(
            f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="{bound}",model_name="a \\"b\\" {{c}}"}} 3.0'
        )
    return ("\n".join(lines) + "\n").encode()


def vllm_pages(server: WireServer) -> Pages:
    """Pages of a server without load tracking for `/load`."""
    return {
        "/metrics": lambda: vllm_metrics((generating(server), 0, 0.0)),
        "/load": lambda: b'{"server_load":0}',
    }


def sglang_metrics(*ranks: tuple[int, int, int, float], processes: int = 1) -> bytes:
    """Return a metrics page; each of `ranks` is (running, waiting, used tokens, usage).

    Each of the `processes` of a scheduler reports them.
    """
    lines = []
    for column, name in enumerate(("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage")):
        lines += [f"# HELP sglang:{name} The {name}.", f"# TYPE sglang:{name} gauge"]
        for number, rank in enumerate(ranks):
            for process in range(processes):
                labels = (
                    f'dp_rank="{number}",engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",'
                    f'tp_rank="{process}"'
                )
                lines.append(f"sglang:{name}{{{labels}}} {float(rank[column])}")
    lines += ['sglang:num_grammar_queue_reqs{model_name="tiny"} 9.0', 'sglang:gen_throughput{model_name="tiny"} 86.5']
    return ("\n".join(lines) + "\n").encode()


def sglang_loads(*ranks: tuple[int, int, int, float]) -> bytes:
    loads = [
        {
            "dp_rank": number,
            "timestamp": 1795198875.25,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_used_tokens": tokens,
            "num_total_tokens": tokens + 100 * waiting,
            "max_total_num_tokens": 100_000,
            "token_usage": usage,
            "gen_throughput": 86.5,
            "cache_hit_rate": 0.5,
            "max_running_requests": 2048,
        }
        for number, (running, waiting, tokens, usage) in enumerate(ranks)
    ]
    return json.dumps({"timestamp": "2026-11-20T18:00:00+00:00", "version": "0.5.23", "loads": loads}).encode()


def sglang_get_load(*ranks: tuple[int, int, int]) -> bytes:
    """Return a load page; each of `ranks` is (all requests, waiting requests, tokens)."""
    return json.dumps(
        [
            {"rid": None, "dp_rank": number, "num_reqs": held, "num_waiting_reqs": waiting, "num_tokens": tokens}
            for number, (held, waiting, tokens) in enumerate(ranks)
        ]
    ).encode()


def sglang_pages(server: WireServer) -> Pages:
    """Pages of a server without `--enable-metrics`."""
    return {"/v1/loads": lambda: sglang_loads((generating(server), 0, 0, 0.0))}


def llamacpp_metrics(running: int, waiting: int, *more: str) -> bytes:
    rows = (
        ("prompt_tokens_total", "counter", "Number of prompt tokens processed, excluding cached tokens", 42),
        ("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s", 120.5),
        ("requests_processing", "gauge", "Number of requests processing", running),
        ("requests_deferred", "gauge", "Number of requests deferred", waiting),
        ("n_busy_slots_per_decode", "gauge", "Average number of busy slots per llama_decode() call", 1.5),
    )
    lines = [
        line
        for name, kind, about, value in rows
        for line in (
            f"# HELP llamacpp:{name} {about}",
            f"# TYPE llamacpp:{name} {kind}",
            f"llamacpp:{name} {value}",
        )
    ]
    return "\n".join([*lines, *more, ""]).encode()


def llamacpp_slots(busy: Sequence[bool]) -> bytes:
    return json.dumps(
        [
            {"id": number, "n_ctx": 4096, "speculative": False, "is_processing": each, "id_task": 7}
            for number, each in enumerate(busy)
        ]
    ).encode()


def llamacpp_pages(server: WireServer, slots: int = 2) -> Pages:
    """Pages of a server without `--metrics`."""

    def busy() -> bytes:
        running = generating(server)
        return llamacpp_slots([number < running for number in range(slots)])

    return {"/slots": busy, "/health": lambda: b'{"status":"ok"}'}
