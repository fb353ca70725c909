"""Texts of a grammar, found by walking its automaton over bytes; and a model with a tokenizer of bytes."""

import dataclasses
import functools

import numpy as np
import tokenizers
import toy

from jspec.core.types import Params
from jspec.loading.model import Model
from jspec.text.grammar.byte_dfa import ByteDfa
from jspec.text.tokenizer import Tokenizer

VOCAB = 300
EOS = 0
TOKENS = [
    *(b"", *(bytes([byte]) for byte in b'abcdefghijklmnopqrstuvwxyz0123456789{}":, []-.')),
    *(b'{"', b'":', b'": ', b'"}', b"ab", b"name", b"12", b"true", b', "', b"null", b"kind", b'"xy', b"", b"\n"),
]
SIZE = toy.TARGET.vocab_size
assert len(TOKENS) == SIZE


def compiled(given):
    return [None if one is None else one.compile(TOKENS, SIZE, [EOS]) for one in given]


def spelled(tokens):
    return b"".join(TOKENS[token] for token in tokens)


def walk(dfa, state, text):
    for byte in text:
        state = int(dfa.table[state, byte]) if state >= 0 else -1
    return state


@functools.cache
def byte_model() -> Model:
    """A random target and a similar draft, over a byte-level vocabulary with a few merges, whose EOS token is 0."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["for i in range(10): print(i) return x def f(x): é 漢字 🙂"] * 4, trainer)
    target = dataclasses.replace(toy.TARGET, vocab_size=VOCAB, num_layers=1)
    weights = toy.random_params(target)
    draft = toy.near(weights, toy.random_params(target, seed=1))
    return Model("toy", target, Params(weights, draft), Tokenizer(bpe), (0,), target)


@functools.lru_cache(maxsize=8)
def distance(dfa: ByteDfa) -> np.ndarray:
    """Bytes of the shortest end of a text from each state."""
    away = np.where(dfa.accepts, 0, len(dfa.accepts))
    for _ in range(len(away)):
        nearer = 1 + np.where(dfa.table >= 0, away[dfa.table], len(away)).min(1)
        if (nearer >= away).all():
            break
        away = np.minimum(away, nearer)
    return away


def sample_text(dfa: ByteDfa, rng: np.random.Generator, most: int = 60) -> str:
    """A random text of the language; after `most` bytes it ends as soon as it can."""
    away = distance(dfa)
    state, text = 0, bytearray()
    while not (dfa.accepts[state] and (len(text) >= most or rng.random() < 0.1 or not (dfa.table[state] >= 0).any())):
        choices = np.flatnonzero(dfa.table[state] >= 0)
        if len(text) >= most:
            choices = [byte for byte in choices if away[dfa.table[state, byte]] < away[state]]
        byte = int(rng.choice(choices))
        text.append(byte)
        state = int(dfa.table[state, byte])
    return text.decode()
