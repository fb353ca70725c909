"""A text that begins with the BOS token's text gets no second one."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

import jspec
from jspec.text.tokenizer import Tokenizer


@pytest.fixture
def tokenizer():
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "x": 1, "y": 2}, unk_token="y"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("text", "special", "ids"),
    [
        ("x", True, [0, 1]),
        ("<s>x", True, [0, 1]),
        ("<s><s>x", True, [0, 0, 1]),
        ("x <s>", True, [0, 1, 0]),
        ("<s>", True, [0]),
        ("", True, [0]),
        ("<s>x", False, [0, 1]),
        ("x x", False, [1, 1]),
    ],
)
def test_bos_is_added_unless_the_text_begins_with_it(tokenizer, text, special, ids):
    assert tokenizer.encode(text, special=special) == ids


def test_without_an_added_token_equal_ones_are_those_of_the_text(tokenizer):
    tokenizer._backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert tokenizer.encode("<s><s>x") == [0, 0, 1] and tokenizer.encode("x x") == [1, 1]


@pytest.mark.parametrize(
    ("text", "ids"),
    [("x", [0, 2, 1, 0]), ("<s>y x", [0, 2, 1, 0]), ("<s>x", [0, 2, 0, 1, 0]), ("<s>y<s>y x", [0, 2, 0, 2, 1, 0])],
)
def test_a_text_may_begin_with_several_tokens_before_and_one_after(tokenizer, text, ids):
    """As in GLM, whose texts begin with [gMASK]<sop>."""
    special = [("<s>", 0), ("y", 2)]
    tokenizer._backend.post_processor = processors.TemplateProcessing(single="<s> y $A <s>", special_tokens=special)
    assert tokenizer.encode(text) == ids


@pytest.mark.slow
def test_prompts_and_scores_have_one_bos(tokenizer):
    model = jspec.load("bundled:python-tiny")
    model = jspec.Model(model.name, model.target, model.params, tokenizer, ())
    assert jspec.generate(model, "<s>x", drafter=None, max_new_tokens=1).prompt == [0, 1]
    assert jspec.score(model, ["<s>x"])[0].tokens == [0, 1]
