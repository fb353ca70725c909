"""The endpoints beside completions: the tokenizer's and the metrics."""

import re

from jspec.serve import metrics


def test_tokenize_and_back(shared):
    out = shared.post("/tokenize", {"prompt": "def f(x):", "return_token_strs": True}).json()
    assert out["tokens"] == shared.service.tokenizer.encode("def f(x):")
    assert out["count"] == len(out["tokens"]) and out["max_model_len"] == 256
    assert "".join(out["token_strs"]) == "def f(x):"
    assert shared.post("/detokenize", {"tokens": out["tokens"]}).json() == {"prompt": "def f(x):"}
    assert shared.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_a_chat_is_tokenized_by_its_template(shared):
    out = shared.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert shared.service.tokenizer.decode(out["tokens"]) == "<user>hi<assistant>" and out["token_strs"] is None
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "hi"}]}):
        assert shared.post("/tokenize", body).json()["error"]["param"] == "prompt"


def test_tokenizer_info_has_the_special_tokens(shared):
    info = shared.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and info["bos_token"] is None and "assistant" in info["chat_template"]


def test_metrics_are_in_the_format_of_prometheus(shared):
    answer = shared.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    samples = {}
    types = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE ")}
    for line in lines:
        if line.startswith("#"):
            assert re.fullmatch(
                r"# (HELP (vllm|jspec):\w+ .+|TYPE (vllm|jspec):\w+ (gauge|counter|histogram))", line
            ), line
            continue
        sample = re.fullmatch(r'((?:vllm|jspec):\w+)\{model_name="fake"(?:,(\w+="[^"]*"))?\} ([\d.e+-]+)', line)
        assert sample, line
        samples[sample[1], sample[2]] = float(sample[3])
        part = re.fullmatch(r"(.*)_(bucket|sum|count)", sample[1])
        assert types[sample[1]] in ("gauge", "counter") if sample[1] in types else types[part[1]] == "histogram"
    assert samples["vllm:kv_cache_usage_perc", None] == 0.5
    assert samples["vllm:generation_tokens_total", None] == 2
    assert samples["vllm:request_success_total", 'finished_reason="eos"'] == 2
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", 'position="0"'] == 3
    assert samples["jspec:request_accept_length_bucket", 'le="1.25"'] == 3
    buckets = [value for (name, _), value in samples.items() if name == "vllm:e2e_request_latency_seconds_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == samples["vllm:e2e_request_latency_seconds_count", None]


def test_labels_are_escaped():
    assert metrics._labels({"model_name": 'a"b\\c\nd'}) == '{model_name="a\\"b\\\\c\\nd"}'
