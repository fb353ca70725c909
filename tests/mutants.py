"""Mutants of the code on which losslessness depends, kept by hand: each is one wrong expression, and a test fails.

    python tests/mutants.py            # all of them: half an hour
    python tests/mutants.py -k accept  # those whose name or function contains this

A mutant names a function and an expression or a statement within it, which is found by its syntax tree: lines,
formatting and the rest of the file may change. Every mutant is applied in a copy of the tree, and its test runs there;
it is dead if the test fails. Before that, all of these tests must pass. `tests/test_mutants.py` checks that each is
found.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("jspec", "pallas_kernels", "tests", "pyproject.toml")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old`, an expression or a simple statement that occurs once in `function`, becomes `new`.

    function: "module:name" or "folder:name"; the name has those of the classes and functions around it.
    test: id of pytest, without "tests/".
    """

    name: str
    function: str
    old: str
    new: str
    test: str

    def apply(self, root: Path = ROOT) -> tuple[Path, str]:
        """The path of the file and its text with the mutant.

        Raises:
          LookupError: the expression is not in the function, or more than once.
        """
        where, _, name = self.function.partition(":")
        path = root / where.replace(".", "/")
        files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        wanted = ast.parse(self.old).body[0]
        wanted = ast.dump(wanted.value if isinstance(wanted, ast.Expr) else wanted)
        places = [
            (file, node)
            for file in files
            for function in functions(file).get(name, [])
            for node in ast.walk(function)
            if ast.dump(node) == wanted
        ]
        if len(places) != 1:
            raise LookupError(f"{self.name}: {self.old} is {len(places)} times in {self.function}: must be there once")
        file, node = places[0]
        new = self.new if isinstance(node, ast.stmt) else f"({self.new})"
        return file, replaced(file.read_text(encoding="utf-8"), node, new)


def functions(file: Path) -> dict[str, list[ast.AST]]:
    """The functions of a file, by their names with those of the classes and functions around them."""
    return _functions(file.read_text(encoding="utf-8"))


@functools.cache
def _functions(text: str) -> dict[str, list[ast.AST]]:
    named: dict[str, list[ast.AST]] = {}

    def visit(node: ast.AST, around: str) -> None:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef)
            name = f"{around}.{child.name}".lstrip(".") if is_function or isinstance(child, ast.ClassDef) else around
            if is_function:
                named.setdefault(name, []).append(child)
            visit(child, name)

    visit(ast.parse(text), "")
    return named


def replaced(text: str, node: ast.AST, new: str) -> str:
    """The text with `new` in place of a node of its syntax tree, whose columns count bytes."""
    lines = text.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return (text.encode()[:begin] + new.encode() + text.encode()[end:]).decode()


_LIMIT = "core/test_decode.py::test_sequences_end_exactly_at_their_limit[Planted(depth=4)]"
_PLAIN = "core/test_decode.py::test_plain_decoding_is_the_argmax_of_one_forward_over_its_own_output"
_CHAINS = "core/test_exact.py::test_on_chains_the_code_decides_like_the_program"
_PENALTIES = "core/test_sampling.py::test_penalties_and_bias_hold_at_every_node_along_its_own_path[0]"
_GRAMMAR = "core/test_grammar.py::"
_CACHES = "cache/test_caches.py::test_output_equals_plain_decoding"
_WINDOWS = "cache/test_swa.py::test_rounds_equal_dense_attention_over_each_nodes_window[8-1]"
_PAGED = "kernels/test_paged_attention.py::test_equals_a_softmax_in_float64"
_BITS = "kernels/test_same_bits.py::test_attention_of_a_token_has_the_same_bits_in_every_round[bfloat16-xla]"
_STORM = "engine/test_storm.py::test_any_schedule_gives_the_same"
_RETRACTED = "runner/test_device.py::test_a_retracted_sequence_continues_its_stop_string_and_its_noise"
_SCHEDULE = "engine/test_schedule.py::test_every_event_of_a_schedule_leaves_all_rows_right"

MUTANTS = tuple(
    Mutant(*fields)
    for fields in (
        # The loop
        (
            "a token beyond the limit",
            "jspec.core:truncate_at_stop",
            "jnp.where(s.done, 0, s.limit - s.length)",
            "jnp.where(s.done, 0, s.limit - s.length + 1)",
            _LIMIT,
        ),
        (
            "an ended text reads on",
            "jspec.core.stopping:run",
            "state >= 0",
            "state >= -9",
            "core/test_stopping.py::test_an_ended_sequence_reads_nothing_more",
        ),
        ("verify reads one row too many", "jspec.core:verify", "s.length - 1", "s.length", _PLAIN),
        ("rows committed one position late", "jspec.core:commit_round", "s.length - 1", "s.length", _PLAIN),
        (
            "hidden states of nodes, not of the path",
            "jspec.core:commit_round",
            "tree.take_path(out.hidden, path)",
            "None if out.hidden is None else out.hidden[:, : decision.appended.tokens.shape[1]]",
            "core/test_decode.py::test_hidden_states_and_tokens_of_the_drafter_match",
        ),
        (
            "every chunk of a prompt ends it",
            "jspec.core:prefill.read",
            "begin + count == s.prompt_length",
            "begin >= 0",
            "core/test_decode.py::test_a_prompt_read_in_chunks_equals_the_prompt_read_at_once[plain-5]",
        ),
        (
            "held sequences take part",
            "jspec.core:run_while.hold",
            "stopping.HELD",
            "s.finish_code",
            f"{_STORM}[ngram-tiny_pool]",
        ),
        # Acceptance rules
        (
            "a chain continues after a rejection",
            "jspec.core.accept:follow",
            "jnp.cumprod(agrees, axis=1, dtype=jnp.int32)",
            "agrees.astype(jnp.int32)",
            "core/test_accept.py::test_a_chain_ends_at_its_first_rejection",
        ),
        (
            "a child of any parent",
            "jspec.core.accept:follow",
            "parents == node[:, None]",
            "parents == parents",
            "core/test_accept.py::test_a_tree_is_walked_like_by_hand",
        ),
        (
            "the noise of the root at every node",
            "jspec.core.accept:coupled",
            "tree.depths(draft_tree)",
            "0 * tree.depths(draft_tree)",
            "core/test_exact.py::test_coupled_acceptance_takes_each_choice_from_the_noise_of_its_position[tree]",
        ),
        (
            "one noise for all positions",
            "jspec.core.sampling:gumbel",
            "position + i",
            "position",
            "core/test_sampling.py::test_no_two_streams_positions_or_sequences_share_noise",
        ),
        (
            "rejection without q",
            "jspec.core.accept:rejection",
            "coin * _at(q, drafts)",
            "coin",
            f"{_CHAINS}[rejection-2-sampled]",
        ),
        (
            "the residual is p",
            "jspec.core.accept:rejection",
            "p[:, :-1] - q",
            "p[:, :-1]",
            f"{_CHAINS}[rejection-2-sampled]",
        ),
        (
            "block without its bound",
            "jspec.core.accept:block",
            "jnp.minimum(weight * ratio[:, i], 1.0)",
            "weight * ratio[:, i]",
            f"{_CHAINS}[block-2-sampled]",
        ),
        (
            "siblings sampled with replacement",
            "jspec.core.accept:_reject_in_tree.judge",
            "_normalize(without, without)",
            "q",
            "core/test_exact.py::test_in_trees_of_sampled_drafts_rejection_decides_like_the_program[siblings]",
        ),
        # Draft trees and proposals
        (
            "distant ancestors are unknown",
            "jspec.core.tree:ancestor_mask",
            "generations.bit_length()",
            "generations.bit_length() - 1",
            "core/test_tree.py::test_every_static_depth_reaches_the_root[8]",
        ),
        (
            "a path shifted by one",
            "jspec.core.tree:paths",
            "jnp.take_along_axis(depth, node, axis=1) - 1",
            "jnp.take_along_axis(depth, node, axis=1)",
            "core/test_tree.py::test_the_path_of_a_node_has_the_tokens_from_the_root_to_it",
        ),
        (
            "the rows of another node's ancestors",
            "jspec.core.grow:_grow_best",
            "jnp.take_along_axis(mask, parent[:, :, None], axis=1)",
            "mask",
            "core/test_grow.py::test_a_node_sees_the_rows_of_its_ancestors[True]",
        ),
        (
            "q after the noise",
            "jspec.core.propose:propose",
            "jax.nn.softmax(logits, axis=-1)",
            "jax.nn.softmax(noisy, axis=-1)",
            "core/test_statistics.py::test_drafts_are_sampled_without_replacement_from_the_distribution_they_report",
        ),
        # Penalties and grammars along paths
        (
            "penalties count the prompt",
            "jspec.core.sampling:_count",
            "column >= first[:, None]",
            "column >= 0",
            _PENALTIES,
        ),
        (
            "every node in the state of the root",
            "jspec.core.automaton:after_path",
            "range(path.shape[2])",
            "range(0)",
            f"{_GRAMMAR}test_every_node_of_a_tree_has_the_mask_of_its_path[0]",
        ),
        (
            "rejected tokens move the grammar",
            "jspec.core.grammar:advance",
            "jnp.where(column < length[:, None], tokens, -1)",
            "tokens",
            f"{_GRAMMAR}test_constrained_output_does_not_depend_on_the_drafter[ngram]",
        ),
        # Caches
        (
            "rejected rows are written",
            "pallas_kernels.kv_compact.reference:kv_compact",
            "step < length[:, None]",
            "step <= length[:, None]",
            "kernels/test_kv_compact.py::test_equals_a_loop_over_rows[page_of_3-xla]",
        ),
        (
            "a window of one more in a chain",
            "jspec.cache.window:window_mask",
            "node - window.length",
            "node - window.length - 1",
            _WINDOWS,
        ),
        (
            "a round's rows are not rounded",
            "jspec.cache.narrow:as_stored",
            "narrowed(x, dtype).astype(x.dtype)",
            "x",
            "cache/test_narrow.py::test_a_token_is_read_alike_in_its_own_round_and_later[llama]",
        ),
        (
            "ties are all selected",
            "jspec.cache.select:largest",
            "above.sum(-1, keepdims=True, dtype=jnp.int32)",
            "0 * above.sum(-1, keepdims=True, dtype=jnp.int32)",
            "cache/test_select.py",
        ),
        (
            "a window of inputs that does not move",
            "jspec.cache.recurrent:RecurrentCache.commit",
            "delta_rule.slide(jnp.where(live[:, None, None], window, 0), new.inputs, length)",
            "delta_rule.slide(jnp.where(live[:, None, None], window, 0), new.inputs, 0 * length)",
            f"{_CACHES}[recurrent-tree-16-5]",
        ),
        (
            "a held sequence gets another feature and proposal",
            "jspec.drafters.eagle:Eagle.extend",
            "committed.length > 0",
            "committed.length >= 0",
            "core/test_decode.py::test_a_sequence_that_was_held_continues_as_if_it_was_not[eagle_tree]",
        ),
        # Attention, and bits that do not depend on the round
        (
            "a row after the prefix is read",
            "pallas_kernels.paged_attention.reference:_prefix_mask",
            "position < prefix_length[:, None, None]",
            "position <= prefix_length[:, None, None]",
            f"{_PAGED}[page_of_3-xla]",
        ),
        (
            "NaN of free pages",
            "pallas_kernels.paged_attention.reference:paged_attention",
            "jnp.where(visible.any(1)[:, :, None, None], values, jnp.zeros((), values.dtype))",
            "values",
            f"{_PAGED}[page_of_3-xla]",
        ),
        (
            "segments follow the end of the prefix",
            "pallas_kernels.exact_attention.reference:exact_attention.attend.absorb",
            "(block + 1) % (SEGMENT // BLOCK)",
            "(block + 1 - committed // BLOCK) % (SEGMENT // BLOCK)",
            _BITS,
        ),
        (
            "blocks of as many rows as there are",
            "pallas_kernels.exact_matmul.reference:exact_matmul",
            "blocks = -(-rows // ROWS)",
            "blocks, ROWS = 1, rows",
            "kernels/test_same_bits.py::test_a_row_of_a_product_has_the_same_bits_among_any_rows[plain-float32-xla]",
        ),
        # Shared pages, preemptions and snapshots
        (
            "a draft's state is shared",
            "jspec.runner:_lookahead",
            "jax.tree.leaves(slot_states(state))",
            "False",
            "engine/test_storm.py::test_a_draft_whose_state_is_further_than_the_targets_shares_nothing",
        ),
        (
            "a token is chosen again after a preemption",
            "jspec.runner:read",
            "plan.ends & ~plan.resumed",
            "plan.ends",
            f"{_STORM}[standalone-tiny_pool]",
        ),
        ("noise depends on the slot", "jspec.runner:Device.admit", "request.seed", "(admission.slot, 0)", _RETRACTED),
        (
            "stop strings begin anew after a preemption",
            "jspec.runner:Device.admit",
            "self.stops.state_after(request.start_state, request.tokens)",
            "request.start_state",
            _RETRACTED,
        ),
        (
            "salts share pages",
            "jspec.engine:Pages.register",
            "pages[registered - 1] if registered else salt",
            "pages[registered - 1] if registered else ''",
            _SCHEDULE,
        ),
        (
            "old rows are registered",
            "jspec.engine:Scheduler.forget",
            "request.registered = None",
            "pass",
            _SCHEDULE,
        ),
        (
            "a hit covers all that is to be read",
            "jspec.engine:Scheduler._admit",
            "request.prefill_length - self.pages.min_prefill",
            "request.prefill_length",
            _SCHEDULE,
        ),
        (
            "a request returns while it is in flight",
            "jspec.engine:Scheduler._preempt",
            "request.in_flight",
            "False",
            _SCHEDULE,
        ),
        (
            "a burst writes beyond its pages",
            "jspec.engine:Scheduler._plan_burst",
            "self._row_limit(request)",
            "10**6",
            _SCHEDULE,
        ),
        ("a snapshot within a page", "jspec.engine.sharing:snapshot", "rest", "False", _SCHEDULE),
    )
)


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the code and the tests in a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "tree"
        root.mkdir()
        for name in COPIED:
            source = ROOT / name
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, root / name, ignore=ignore) if source.is_dir() else shutil.copy(source, root / name)
        yield root


def run(root: Path, tests: Iterable[str]) -> tuple[int, str]:
    """The exit status of pytest in a copy of the tree, and the end of its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--full", "-o", "addopts=", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
    paths = [f"tests/{test}" for test in tests]
    done = subprocess.run(
        [*command, *paths], cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout[-3000:]


def main() -> int:
    """Runs the mutants; returns 1 if one survives."""
    parser = argparse.ArgumentParser(description="Applies mutants and runs the tests that kill them.")
    parser.add_argument("-k", default="", help="only mutants whose name or function contains this")
    options = parser.parse_args()
    selected = [mutant for mutant in MUTANTS if options.k in mutant.name or options.k in mutant.function]
    if not selected:
        parser.error(f"-k {options.k!r}: no mutant has this in its name or function")
    with copied_tree() as root:
        status, output = run(root, dict.fromkeys(mutant.test for mutant in selected))
        if status:
            print(output + "\nthese tests must pass before a mutant is applied")
            return 2
        alive = 0
        for mutant in selected:
            file, text = mutant.apply(root)
            original = file.read_text(encoding="utf-8")
            file.write_text(text, encoding="utf-8")
            status, output = run(root, [mutant.test])
            file.write_text(original, encoding="utf-8")
            # 1: tests failed. Anything else, such as an error of collection, proves nothing.
            verdict = {0: "SURVIVES", 1: "dead"}.get(status, "BROKEN")
            print(f"{verdict:8} {mutant.function}: {mutant.name}", flush=True)
            if status != 1:
                alive += 1
                print(textwrap.indent(output, "    "), flush=True)
    print(f"{len(selected) - alive} of {len(selected)} dead")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
