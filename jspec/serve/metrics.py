"""Metrics of an engine as Prometheus text, under the names of vLLM, which dashboards and load tests read."""

from collections.abc import Iterable, Mapping

from jspec.engine.metrics import Histogram, Metrics

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAUGES = {
    "num_requests_running": ("running", "Sequences in a slot."),
    "num_requests_waiting": ("waiting", "Sequences that wait for a slot or for pages."),
    "jspec:num_requests_held": ("held", "Sequences in a slot that wait for a page."),
}
_COUNTERS = {
    "prefix_cache_queries_total": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits_total": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "prompt_tokens_total": ("prompt_tokens", "Prompt tokens of all sequences."),
    "generation_tokens_total": ("new_tokens", "New tokens of all sequences."),
    "num_preemptions_total": ("preemptions", "Sequences that gave back their pages and were read again."),
    "spec_decode_num_drafts_total": ("drafting_rounds", "Rounds with drafts, of all sequences."),
    "spec_decode_num_draft_tokens_total": ("drafted", "Draft tokens."),
    "spec_decode_num_accepted_tokens_total": ("accepted", "Accepted draft tokens."),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token", "From a request to its first token."),
    "inter_token_latency_seconds": ("inter_token", "Between two tokens of a sequence."),
    "request_queue_time_seconds": ("queue_time", "From a request to its slot."),
    "e2e_request_latency_seconds": ("end_to_end", "From a request to its last token."),
    "jspec:request_accept_length": ("accept_length", "Tokens per round of a request."),
}
"""vLLM's name, or our own one with a prefix -> field of `Metrics` and what it is."""


def render(values: Metrics, model: str) -> str:
    """The metrics of an engine as text, with the model's name as a label."""
    lines: list[str] = []

    def add(name: str, kind: str, help_text: str, samples: Iterable[tuple[str, Mapping[str, object], float]]) -> None:
        name = name if ":" in name else f"vllm:{name}"
        lines.append(f"# HELP {name} {help_text}")
        lines.append(f"# TYPE {name} {kind}")
        for suffix, labels, value in samples:
            lines.append(f"{name}{suffix}{_labels({'model_name': model, **labels})} {value:.17g}")

    # Gauges.
    for name, (field, text) in _GAUGES.items():
        add(name, "gauge", text, [("", {}, getattr(values, field))])
    used = values.pages_used / max(values.pages, 1)
    add("kv_cache_usage_perc", "gauge", "Share of the pages in use, from 0 to 1.", [("", {}, used)])
    # Counters.
    for name, (field, text) in _COUNTERS.items():
        add(name, "counter", text, [("", {}, getattr(values, field))])
    add(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Accepted draft tokens at each position of the draft.",
        [("", {"position": i}, count) for i, count in enumerate(values.accepted_by_position)],
    )
    add(
        "request_success_total",
        "counter",
        "Sequences that ended, by reason.",
        [("", {"finished_reason": reason}, n) for reason, n in sorted(values.requests_finished.items())],
    )
    # Histograms.
    for name, (field, text) in _HISTOGRAMS.items():
        add(name, "histogram", text, _histogram(getattr(values, field)))
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
