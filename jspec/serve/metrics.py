"""Metrics of an engine as Prometheus text, under the names of vLLM, which dashboards and load tests read."""

from collections.abc import Iterable, Mapping
from typing import Any

from jspec.engine.metrics import Histogram, Metrics

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METRICS = {
    "num_requests_running": ("gauge", "running", "Sequences in a slot."),
    "num_requests_waiting": ("gauge", "waiting", "Sequences that wait for a slot or for pages."),
    "jspec:num_requests_held": ("gauge", "held", "Sequences in a slot that wait for a page."),
    "kv_cache_usage_perc": ("gauge", "", "Share of the pages in use, from 0 to 1."),
    "prefix_cache_queries_total": ("counter", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits_total": ("counter", "prefix_hits", "Prompt tokens found in the prefix cache."),
    "prompt_tokens_total": ("counter", "prompt_tokens", "Prompt tokens of all sequences."),
    "generation_tokens_total": ("counter", "new_tokens", "New tokens of all sequences."),
    "num_preemptions_total": ("counter", "preemptions", "Sequences that gave back their pages and were read again."),
    "spec_decode_num_drafts_total": ("counter", "drafting_rounds", "Rounds with drafts, of all sequences."),
    "spec_decode_num_draft_tokens_total": ("counter", "drafted", "Draft tokens."),
    "spec_decode_num_accepted_tokens_total": ("counter", "accepted", "Accepted draft tokens."),
    "spec_decode_num_accepted_tokens_per_pos_total": (
        *("counter", "accepted_by_position"),
        "Accepted draft tokens at each position of the draft.",
    ),
    "request_success_total": ("counter", "requests_finished", "Sequences that ended, by reason."),
    "time_to_first_token_seconds": ("histogram", "time_to_first_token", "From a request to its first token."),
    "inter_token_latency_seconds": ("histogram", "inter_token", "Between two tokens of a sequence."),
    "request_queue_time_seconds": ("histogram", "queue_time", "From a request to its slot."),
    "e2e_request_latency_seconds": ("histogram", "end_to_end", "From a request to its last token."),
    "jspec:request_accept_length": ("histogram", "accept_length", "Tokens per round of a request."),
}
"""vLLM's name, or our own one with a prefix -> type, field of `Metrics` and what it is."""


def render(values: Metrics, model: str) -> str:
    """The metrics of an engine as text, with the model's name as a label."""
    lines: list[str] = []
    for name, (kind, field, text) in _METRICS.items():
        name = name if ":" in name else f"vllm:{name}"
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        value: Any = getattr(values, field) if field else values.pages_used / max(values.pages, 1)
        # Several samples, or one.
        if kind == "histogram":
            samples = _histogram(value)
        elif field == "accepted_by_position":
            samples = [("", {"position": i}, count) for i, count in enumerate(value)]
        elif field == "requests_finished":
            samples = [("", {"finished_reason": reason}, count) for reason, count in sorted(value.items())]
        else:
            samples = [("", {}, value)]
        for suffix, labels, sample in samples:
            lines.append(f"{name}{suffix}{_labels({'model_name': model, **labels})} {sample:.17g}")
    return "\n".join([*lines, ""])


def _histogram(values: Histogram) -> Iterable[tuple[str, Mapping[str, object], float]]:
    """Cumulative counts at each bound, the sum and the count."""
    total = 0
    for bound, count in zip([*values.bounds, "+Inf"], values.counts, strict=True):
        total += count
        yield "_bucket", {"le": bound}, total
    yield "_sum", {}, values.total
    yield "_count", {}, total


def _labels(labels: Mapping[str, object]) -> str:
    escaped = (str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in labels.values())
    return "{" + ",".join(f'{name}="{value}"' for name, value in zip(labels, escaped, strict=True)) + "}"
