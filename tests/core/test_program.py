"""The loop as a program: its state, its compiled text, and the checks that `debug` adds."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import planted
import pytest
import toy
from hlo import check_in_place, computations, loop_body, made, opcode, pool_writes
from products import products

from jspec.core import tree
from jspec.core.loop import decode, one_round, run_rounds
from jspec.core.prefill import prefill
from jspec.core.types import Prompts
from jspec.drafters import Standalone

TEXT_AS_SHIPPED = True

# The state and the program


def kinds(x):
    return jax.tree.structure(x), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(x)]


@pytest.mark.slow
@planted.one_name_of_each
def test_the_state_keeps_its_structure_and_types(name):
    drafter = toy.bound_drafters()[name]
    weights = planted.weights_of(drafter)
    s = jax.eval_shape(functools.partial(toy.start, drafter), weights)
    draft_tree, draft_state = jax.eval_shape(drafter.draft, weights, s)
    assert kinds(draft_state) == kinds(s.draft)
    assert kinds(jax.eval_shape(functools.partial(one_round, method=planted.greedy(drafter)), weights, s)) == kinds(s)


@planted.each_name
def test_without_captured_layers_there_are_no_hidden_states_anywhere(name):
    drafter, seen = toy.bound_drafters()[name], []
    if drafter.capture_layers:
        return

    class Spy(type(drafter)):
        def extend(self, params, s, committed):
            seen.append(committed.hidden)
            return super().extend(params, s, committed)

    weights = planted.weights_of(drafter)
    spy = Spy(**{field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)})
    s = jax.eval_shape(functools.partial(toy.start, spy, weights))
    s = jax.eval_shape(functools.partial(one_round, method=planted.greedy(spy)), weights, s)
    assert seen == [None, None], "prefill and a round"
    # A draft with masks keeps hidden states of its own.
    state = dataclasses.replace(s, draft=None) if getattr(getattr(drafter, "model", None), "at_once", False) else s
    assert not any(toy.TARGET.hidden_size in leaf.shape for leaf in jax.tree.leaves(state))
    floats = [leaf for leaf in jax.tree.leaves(s.draft) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert isinstance(drafter, Standalone) or not floats


def lone_pool(name):
    """A drafter and the state after prefill. With pages of 5 rows, only a pool has the shape of a pool."""
    drafter = toy.bound_drafters().get(name, planted.RandomTree())
    weights = planted.weights_of(drafter)
    if isinstance(drafter, Standalone):
        # With a draft of another shape than the target, the two pools have different shapes.
        drafter, weights = drafter.bind(toy.TARGET, toy.DRAFT), toy.params(toy.DRAFT)
    return drafter, weights, toy.start(drafter, weights, page_size=5)


@functools.cache
def program(name):
    """The compiled text of `decode`, and the types of its pools in that text."""
    drafter, weights, s = lone_pool(name)
    types = [f"f32[{','.join(map(str, pool.shape))}]" for pool in planted.pools(s)]
    return decode.lower(weights, s, jnp.int32(9), method=planted.greedy(drafter)).compile().as_text(), types


def inner_loops(name):
    """Rounds of several drafters are in loops of their own, inside of one over these."""
    return len(lone_pool(name)[0].branches) if name == "adaptive" else 0


@pytest.mark.slow(unless="eagle_tree")
@planted.each_name
def test_the_program_is_one_loop_that_never_leaves_the_device(name):
    text, _ = program(name)
    opcodes = [opcode(line) for line in text.splitlines()]
    assert opcodes.count("dot") > 4, "the program text was not parsed"
    assert not set(opcodes) & {"infeed", "outfeed", "send", "send-done", "recv", "recv-done"}
    assert (opcodes.count("while"), opcodes.count("conditional")) == (1 + inner_loops(name), 0)
    assert "callback" not in text


@pytest.mark.slow(unless="eagle_tree")
@pytest.mark.parametrize(
    ("name", "multiplying", "writing"),
    [
        ("eagle_tree", {"draft", "verify", "extend"}, {"commit", "extend"}),
        ("frozen_kv_mtp_tree", {"draft", "verify"}, {"commit"}),
        ("plain", {"verify"}, {"commit"}),
    ],
)
def test_operations_have_the_name_of_their_phase(name, multiplying, writing):
    """For a profile: all matrix products, the writes of the pools, and at least one operation of each phase."""
    text, types = program(name)
    body = [(line, re.search(r'op_name="[^"]*/while/body/(\w+)', line)) for line in loop_body(text)]
    named = [(line, found[1]) for line, found in body if found]
    phases = {"draft", "verify", "accept", "commit", "extend"}
    assert {phase for _, phase in named} & phases == phases - ({"extend"} if name == "plain" else set())
    assert {phase for line, phase in named if opcode(line) == "dot"} == multiplying
    assert {phase for line, phase in named if any(pool_writes([line], pool) for pool in types)} == writing


@pytest.mark.slow(unless=("plain", "ngram"))
@planted.each_name
def test_a_chain_needs_no_sort(name):
    """Unless a selector chooses among the best tokens of each row."""
    drafter = toy.bound_drafters()[name]
    if getattr(drafter, "width", 1) > 1 or getattr(getattr(drafter, "model", None), "selector_rank", 0):
        return
    text, _ = program(name)
    assert not {opcode(line) for line in text.splitlines()} & {"sort", "topk"}
    assert not re.search("topk|top_k", text, re.IGNORECASE)


@pytest.mark.slow(unless="random_tree")
@planted.each_name_and_trees
def test_each_pool_is_written_once_per_round_and_never_copied(name):
    """In a round only the commit creates an array of a pool's shape, by writing in place."""
    text, types = program(name)
    for shape in types:
        check_in_place(loop_body(text), shape, writes=max(inner_loops(name), 1))


@pytest.mark.slow(unless="True")
@pytest.mark.parametrize("select", (False, True))
def test_the_last_layer_continues_with_the_selected_tokens_only(select):
    """Its MLP and the LM head read the selected tokens; keys and values are those of all tokens."""
    batch, width = toy.IDS.shape
    weights = toy.params().target
    cache = toy.TARGET.init_cache(weights, batch, width, 4)
    ids, last = tree.chain(jnp.asarray(toy.IDS)), jnp.asarray(toy.LENGTHS) - 1 if select else None
    run = jax.jit(lambda last: toy.TARGET.forward(weights, ids, cache, None, select=last))
    # The projections to heads are as wide as gate and up together.
    wide = 2 * toy.TARGET.intermediate_size
    shapes = [shape for shape in products(jax.make_jaxpr(run)(last).jaxpr) if shape[-1] == wide]
    rest = [(batch, width, wide)] * (2 * toy.TARGET.num_layers - 1)
    assert shapes == [*rest, (batch, 1 if select else width, wide)]
    assert all(part.shape[:2] == (batch, width) for pair in run(last).rows for part in pair)


@pytest.mark.slow(unless="plain")
@planted.one_name_of_each
def test_a_prompt_read_in_chunks_is_written_into_the_pools_in_place(name):
    drafter, weights, s = lone_pool(name)
    shape = dict(capacity=40, page_size=5, chunk=4)
    read = functools.partial(prefill, method=planted.greedy(drafter), **shape)
    lowered = jax.jit(read).lower(weights, Prompts(jnp.asarray(toy.IDS), s.length, s.limit, s.key, s.stop))
    body = loop_body(lowered.compile().as_text())
    for shape in [f"f32[{','.join(map(str, pool.shape))}]" for pool in planted.pools(s)]:
        check_in_place(body, shape)


@pytest.mark.slow(unless="eagle_tree")
@planted.one_name_of_each
def test_the_donated_pools_are_the_result(name):
    text, types = program(name)
    for shape in types:
        (line,) = [line for line in computations(text)["ENTRY"] if made([line], shape) == ["parameter"]]
        (number,) = re.findall(r"parameter\((\d+)\)", line)
        assert re.search(rf"input_output_alias={{.*\({number}, {{}}", text.splitlines()[0])
    drafter, weights, s = lone_pool(name)
    addresses = [pool.unsafe_buffer_pointer() for pool in planted.pools(s)]
    s = toy.run(drafter, weights, s)
    assert [pool.unsafe_buffer_pointer() for pool in planted.pools(s)] == addresses


@pytest.mark.slow
def test_without_debug_no_check_is_in_the_program():
    rounds = functools.partial(run_rounds, method=planted.greedy(planted.RandomTree()))
    args = planted.planted_params(), toy.start(planted.RandomTree(), planted.planted_params()), jnp.int32(1)
    assert " check[" not in str(jax.make_jaxpr(rounds)(*args))
    assert " check[" in str(jax.make_jaxpr(functools.partial(rounds, debug=True))(*args))
