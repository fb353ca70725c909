"""Prompts of embeddings over HTTP."""

import base64
import io
import json
import struct

import jax
import numpy as np
import pytest
from grammars import byte_model
from safetensors.numpy import save

import jspec
from jspec.engine.engine import Engine


def encoded(rows, **tensors):
    return base64.b64encode(save({"embeds": np.ascontiguousarray(rows), **tensors})).decode()


@pytest.fixture(scope="module")
def running():
    import http_server

    with Engine(byte_model(), drafter="standalone", slots=2, context=64, page_size=4) as engine:
        server = http_server.Running(engine)
        yield server
        server.end()
        server.join()


def text_of(running, **body):
    answer = running.post("/v1/completions", {"max_tokens": 12, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.mark.slow
def test_rows_of_the_table_are_the_tokens(running):
    """Different embeddings are no cached beginning of each other."""
    model = byte_model()
    prompts = [[5, 9, 40, 200, 31, 7, 66, 12, 90], [77, 3, 250, 8, 1, 2, 99, 54, 21]]
    rows = [np.array(jax.jit(model.target.embed)(model.params.target, np.array([ids])))[0] for ids in prompts]
    expected = [text_of(running, prompt=ids)[0] for ids in prompts]
    assert expected[0] != expected[1]
    assert text_of(running, prompt_embeds=[encoded(x) for x in rows]) == expected
    assert [text_of(running, prompt_embeds=encoded(x))[0] for x in rows] == expected
    answer = running.post(
        "/v1/completions", {"prompt_embeds": encoded(rows[0]), "max_tokens": 1, "return_token_ids": True}
    )
    assert answer.json()["choices"][0]["prompt_token_ids"] == [0] * 9


@pytest.mark.slow
def test_hostile_embeddings_are_refused(running):
    """Before any work: nothing is submitted, and no code of a file runs."""
    rows, nan = np.zeros((3, 32), np.float32), np.full((1, 32), np.nan, np.float32)
    npy = io.BytesIO()
    np.save(npy, rows)
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40, 32], "data_offsets": [0, 2**47]}}).encode()
    bomb = base64.b64encode(struct.pack("<Q", len(header)) + header).decode()
    for value, message in [
        ("%%%", "must be base64 of a safetensors file"),
        (7, "prompt_embeds"),
        ([], "must be from 1 to"),
        (base64.b64encode(npy.getvalue()).decode(), "files of torch.save are not read"),
        (bomb, "must be base64 of a safetensors file"),
        (encoded(rows, other=rows), "holds 2 tensors"),
        (encoded(rows[0]), r"holds F32 of shape [32]"),
        (encoded(rows.astype(np.int32)), "holds I32 of shape"),
        (encoded(rows[:0]), "holds F32 of shape [0, 32]"),
        (encoded(nan), "prompt_embeds: has infinite values or NaN"),
        (encoded(rows[:, :8]), "must be [n, 32], as wide as the model"),
        (encoded(np.zeros((65, 32), np.float32)), "has 65 rows; must have at most 64"),
        (encoded(np.zeros((64, 32), np.float32)), "must be at most 63"),
    ]:
        answer = running.post("/v1/completions", {"prompt_embeds": value, "max_tokens": 2})
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], (message, answer.text)
    for name, value in {"prompt": "x", "echo": True, "prompt_logprobs": 1, "truncate_prompt_tokens": 2}.items():
        answer = running.post("/v1/completions", {"prompt_embeds": encoded(rows), name: value})
        assert answer.json()["error"]["message"] == f"{name}: must be omitted beside prompt_embeds"
    assert running.post("/v1/completions", {}).json()["error"]["message"] == "prompt: is required"
    assert jspec.PromptEmbeds(rows).tokens == [0, 0, 0]
