"""Real models are read as `transformers` reads their files: tensors, tokens, logits and greedy texts."""

import gguf
import numpy as np
import pytest
from parity import read, torch

import jspec
from jspec.checkpoints.gguf_model import GgufModel

AS_SHIPPED = True
NEW_TOKENS = 40
TEXTS = (
    "",
    "   three spaces before, two after  ",
    "Hello, world! I'll can't WE'RE",
    "def f(x):\n    return x**2\n\n\n\nclass A:\n\t\tpass\r\n",
    "naïve café – 東京 😀👍🏽 \U0001f9d1\u200d\U0001f680 A\u030a Å",
    "a\u00a0b\u200bc \x00\x01 ▁▁",
    "<|im_start|>user\nhi<|im_end|><start_of_turn><s></s><unk><bos>",
    "\t\t\tfoo <table><td>x</td>",
    "مرحبا بالعالم नमस्ते",
)


def test_every_tensor(real):
    model = GgufModel(real.path)
    expected = real.oracle.state_dict()
    for name in model.names():
        np.testing.assert_array_equal(model.get(name), expected[name].numpy(), err_msg=name)
    seen = {tensor.tensor_type.name for tensor in gguf.GGUFReader(real.path).tensors}
    assert seen in ({"F32", "Q4_1", "Q8_0"}, {"F32", "Q5_0", "Q8_0", "Q4_K", "Q6_K"})
    assert expected.keys() - model.names() <= {"lm_head.weight"}


def test_tokens_of_odd_texts(real):
    tokenizer = real.model.tokenizer
    for line in TEXTS:
        ids = tokenizer.encode(line, special=False)
        assert ids == real.tokenizer(line, add_special_tokens=False).input_ids, line
        assert tokenizer.decode(ids) == real.tokenizer.decode(ids, skip_special_tokens=True)
    adds_bos = not tokenizer.templates  # as the metadata of these two files states
    assert tokenizer.encode("hi")[0] == (tokenizer.vocabulary()["<bos>"] if adds_bos else tokenizer.encode("hi")[-1])


def test_digits_are_tokens_of_their_own(chat_model):
    # `transformers` reads `tokenizer.ggml.pre` as that of GPT-2, and joins digits of other scripts to spaces.
    ids = chat_model.model.tokenizer.encode("in 1984, ½")
    assert [chat_model.model.tokenizer.decode([i]) for i in ids[:7]] == ["in", " ", "1", "9", "8", "4", ","]


def test_chat_template(chat_model):
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    for count in (2, 4):
        text = chat_model.model.tokenizer.apply_chat_template(messages[:count])
        assert text == chat_model.tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=True
        )


def test_logits(real):
    batch = np.array([(ids * 16)[:64] for ids in real.ids[:2]], np.int32)
    with torch.no_grad():
        expected = real.oracle(torch.tensor(batch.astype(np.int64))).logits.numpy()
    logits = np.asarray(read(real.model.target, real.model.params.target, batch).logits)
    np.testing.assert_allclose(logits, expected, atol=real.noise, rtol=0)


@pytest.fixture(scope="module")
def texts(real):
    """The oracle's greedy continuations."""
    return [continuation(real, ids, NEW_TOKENS) for ids in real.ids]


def continuation(real, ids, count):
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": list(real.model.eos), "pad_token_id": 0}
    prompt = torch.tensor([ids])
    with torch.no_grad():
        out = real.oracle.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return out[0, len(ids) :].tolist()


def test_greedy_texts(real, texts):
    out = jspec.generate(real.model, real.ids, max_new_tokens=NEW_TOKENS, drafter="plain")
    assert out.tokens == texts


def test_a_turn_ends_at_its_token(chat_model):
    out = jspec.generate(chat_model.model, chat_model.ids[0], max_new_tokens=NEW_TOKENS)
    assert (out.text, out.finish_reason) == ("The capital of France is Paris.", "eos")
    assert out.tokens[-1] in chat_model.model.eos == (2,)


@pytest.mark.slow
def test_contexts_beyond_the_window(windowed):
    window = 512
    assert {layer.window for layer in windowed.model.target.attention} == {window, None}
    ids = windowed.model.tokenizer.encode("".join(f"Item {i} costs {i * 7 % 50} dollars. " for i in range(65)))
    assert len(ids) > window + 100
    expected = continuation(windowed, ids, 24)
    for drafter in ("plain", jspec.Ngram(depth=4), jspec.Suffix(depth=6), "auto"):
        out = jspec.generate(windowed.model, ids, max_new_tokens=24, drafter=drafter, ignore_eos=True)
        assert out.tokens == expected
    with jspec.Engine(
        windowed.model, drafter=jspec.Ngram(depth=4), slots=2, context=1024, prefill_tokens=128
    ) as engine:
        (out,) = engine.generate([ids], max_new_tokens=24, ignore_eos=True)
        assert out.tokens == expected
