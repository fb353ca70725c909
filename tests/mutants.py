"""One-line mutants of the code, each with the tests that kill it.

    python tests/mutants.py              # all of them: minutes per ten mutants
    python tests/mutants.py -k propose   # those whose name or file contains this
    python tests/mutants.py --write      # writes the table in docs/testing.md

Every mutant is applied in a copy of the tree, and its tests run there. It is dead if one of them fails. Before that,
all of these tests must pass without a mutant. `tests/test_mutants.py` checks that the list fits the code.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- mutants -->\n", "<!-- /mutants -->"
COPIED = ("jspec", "pallas_kernels", "tests", "pyproject.toml")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of one line: `old`, which occurs once in `file`, becomes `new`. `tests` are ids of pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Writes the mutated file; returns the text of the original."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return text


def _group(file: str, *mutants: tuple[str, str, str, str]) -> tuple[Mutant, ...]:
    """Mutants of one file: name, original, replacement, and the ids of the tests under `tests/`, joined by " & "."""
    return tuple(
        Mutant(name, file, old, new, tuple(f"tests/{test}" for test in tests.split(" & ")))
        for name, old, new, tests in mutants
    )


_STORM = "engine/test_storm.py::test_any_schedule_gives_the_same"
_FEW, _HYBRID, _RECURRENT, _SLIDING = (
    f"{_STORM}[hybrid_standalone-few_snapshots]",
    f"{_STORM}[hybrid_ngram-wide]",
    f"{_STORM}[recurrent_ngram-rows]",
    f"{_STORM}[sliding_ngram-wide]",
)
_PRODUCT = "mesh/test_mesh.py::test_all_on_eight_devices[product_on_eight_devices.py]"
_LIMIT = "core/test_decode.py::test_sequences_end_exactly_at_their_limit[Planted(depth=4)]"
_PLAIN = "core/test_decode.py::test_plain_decoding_is_the_argmax_of_one_forward_over_its_own_output"
_CHAINS = "core/test_exact.py::test_on_chains_the_code_decides_like_the_program[rejection-2-sampled]"
_BLOCK = _CHAINS.replace("rejection", "block")
_PERFECT = "drafters/test_perfect_drafts.py::test_every_draft_is_accepted_when_sampling"
_PERFECT_CHAIN, _PERFECT_EAGLE = f"{_PERFECT}[standalone_chain]", f"{_PERFECT}[eagle_tree]"
_PENALTIES = "core/test_sampling.py::test_penalties_and_bias_hold_at_every_node_along_its_own_path[0]"
_PATHS = "core/test_tree.py::test_the_path_of_a_node_has_the_tokens_from_the_root_to_it"
_SPARSE = "core/test_automaton.py::test_a_sparse_table_is_the_dense_one[70-0.2]"
_STOPS = "core/test_stopping.py::test_examples"
_SWA = "cache/test_swa.py::test_rounds_equal_dense_attention_over_each_nodes_window[8-1]"
_DRAFT_WINDOW = "cache/test_swa.py::test_a_drafts_window_equals_dense_attention_over_it_and_the_first_rows[8-3-4]"
_FIRST_OF_TREE = _DRAFT_WINDOW.replace("8-3-4", "1-1-3")
_BANDED = "drafters/test_windows.py::test_drafts_are_those_of_a_banded_forward"
_CACHES = "cache/test_caches.py::test_output_equals_plain_decoding"
_PAGED = "kernels/test_paged_attention.py::test_equals_a_softmax_in_float64[page_of_3-xla]"
_BITS = "kernels/test_same_bits.py::test_attention_of_a_token_has_the_same_bits_in_every_round[bfloat16-xla]"
_WINDOWS = "kernels/test_same_bits.py::test_attention_has_the_same_bits_in_every_round[short window-xla]"
_FORWARD = "models/test_exact_forward.py::test_a_token_has_the_same_bits_in_every_forward"
_MLA = "kernels/test_mla_attention.py::test_equals_a_softmax_in_float64[page_of_3-xla]"
_EAGLE = "drafters/test_eagle.py::test_sampled_drafts_report_the_distribution_after_their_own_path"
_DRAFTED = "drafters/test_block.py::test_proposals_are_those_of_the_oracle"
_MTP = "drafters/test_mtp.py::test_proposals_are_those_of_a_pass_over_the_whole_text[None]"
_MASKS = "train/test_masks.py::test_only_counted_tokens_teach"
_BLOCKS = "train/test_train_dspark.py::test_the_loss_is_that_of_a_loop_over_served_blocks"
_REPLY = "train/test_chats.py::test_what_counts_is_what_is_served"
_NGRAM = "drafters/test_drafters.py::test_ngram_by_example"
_ADAPTIVE = "drafters/test_adaptive.py::"
_POLICY = "drafters/test_adaptive.py::test_the_policy_equals_an_oracle"
_WATCHED = f"{_ADAPTIVE}test_watched_drafts_are_judged_by_every_round"
_SUFFIX = "drafters/test_suffix.py::test_the_tree_is_the_one_found_by_hand"
_COPIES = "drafters/test_suffix.py::test_chains_by_example"
_DEVICE = "engine/test_device.py::test_a_retracted_sequence_continues_its_stop_string_and_its_noise"
_SCHEDULE = "engine/test_schedule.py::test_storms"
_CHOICE = "engine/test_balance.py::test_a_group_that_knows_the_prompt_gets_it_unless_it_is_busier"

MUTANTS = (
    *_group(
        "jspec/core/decode.py",
        ("a token beyond the limit", "0, s.limit - s.length)", "0, s.limit - s.length + 1)", _LIMIT),
        (
            "held sequences take part",
            "finish_code=jnp.where(hold, stopping.HELD, s.finish_code)",
            "finish_code=jnp.where(hold, s.finish_code, s.finish_code)",
            f"{_STORM}[ngram-tiny_pool]",
        ),
        (
            "held sequences count for the choice",
            "drafter.choose(params, with_held(s)[1])",
            "drafter.choose(params, s)",
            f"{_ADAPTIVE}test_held_sequences_have_no_influence_on_the_choice",
        ),
        (
            "a drafter keeps the rounds that another one was chosen for",
            "(turn[0] == branch) & going(turn[1])",
            "going(turn[1])",
            f"{_ADAPTIVE}test_held_sequences_have_no_influence_on_the_choice",
        ),
        (
            "a choice out of range is another branch",
            "jnp.clip(branch, 0, len(drafter.branches) - 1)",
            "jnp.clip(branch, 0, 0)",
            f"{_ADAPTIVE}test_a_choice_out_of_range_is_the_last_branch_and_an_error_of_debug",
        ),
        (
            "every branch drafts from the state of the first",
            "drafter.states(s.draft)[branch]",
            "drafter.states(s.draft)[0]",
            f"{_ADAPTIVE}test_each_round_is_that_of_its_drafter_alone",
        ),
        (
            "finished sequences continue",
            "remaining = jnp.where(s.done, 0, s.limit - s.length)",
            "remaining = s.limit - s.length",
            "core/test_decode.py::test_a_sequence_that_the_host_finishes_stays_finished",
        ),
        (
            "the limit hides an EOS",
            "jnp.where((finish_code == stopping.RUNNING) & full,",
            "jnp.where(full,",
            "core/test_decode.py::test_an_eos_at_the_limit_is_an_eos_and_one_after_it_is_not_seen",
        ),
        ("never full", "full = s.length + length >= s.limit", "full = s.length + length > s.limit", _LIMIT),
        (
            "verify reads one row too many",
            "s.cache, s.length - 1, capture_layers=",
            "s.cache, s.length, capture_layers=",
            _PLAIN,
        ),
        (
            "rows committed one position late",
            "start, kept = s.length - 1, decision.kept",
            "start, kept = s.length, decision.kept",
            _PLAIN,
        ),
        (
            "hidden states of nodes, not of the path",
            "tree.take_path(out.hidden, kept.path), kept.length)",
            "None if out.hidden is None else out.hidden[:, : kept.tokens.shape[1]], kept.length)",
            "core/test_decode.py::test_hidden_states_and_tokens_of_the_drafter_match",
        ),
        (
            "the counters are off by one",
            "(slots == kept[:, None] - 1)",
            "(slots == kept[:, None])",
            _LIMIT,
        ),
        (
            "finished sequences count rounds",
            "jnp.where(s.done, s.stats.rounds, s.stats.rounds + 1)",
            "s.stats.rounds + 1",
            _LIMIT,
        ),
        (
            "prompts are written into zeros, by indices that may be empty",
            "tokens=jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, buffer_len - width))),",
            "tokens=jnp.zeros((batch, buffer_len), jnp.int32).at[:, :width].set(ids),",
            "mesh/test_mesh.py::test_on_eight_devices",
        ),
        (
            "the loop ends with its first sequence",
            "return ~jnp.all(s.done) &",
            "return ~jnp.any(s.done) &",
            _LIMIT,
        ),
        (
            "every chunk of a prompt ends it",
            "ends = (count > 0) & (begin + count == s.prompt_length)",
            "ends = count > 0",
            "core/test_decode.py::test_a_prompt_read_in_chunks_equals_the_prompt_read_at_once[plain-5]",
        ),
    ),
    *_group(
        "jspec/core/accept.py",
        (
            "a chain continues after a rejection",
            "accepted = jnp.cumprod(agrees, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)",
            "accepted = agrees.sum(1, dtype=jnp.int32)",
            "core/test_accept.py::test_a_chain_ends_at_its_first_rejection",
        ),
        (
            "a child of any parent",
            "child = (parents == node[:, None]) & (index > 0) & (tokens == wanted)",
            "child = (index > 0) & (tokens == wanted)",
            "core/test_accept.py::test_a_tree_is_walked_like_by_hand",
        ),
        (
            "the root is its own child",
            "& (index > 0) & (tokens == wanted)",
            "& (index >= 0) & (tokens == wanted)",
            "core/test_accept.py::test_a_tree_is_walked_like_by_hand",
        ),
        (
            "the noise of the root at every node",
            "tree.depths(draft_tree)[:, :, None], axis=1)",
            "0 * tree.depths(draft_tree)[:, :, None], axis=1)",
            "core/test_exact.py::test_coupled_acceptance_takes_each_choice_from_the_noise_of_its_position[tree]",
        ),
        ("rejection without q", "passes = coin * _at(q, drafts) <", "passes = coin <", _CHAINS),
        (
            "the residual is p",
            "_normalize(jnp.maximum(p[:, :-1] - q, 0.0), p[:, :-1])",
            "_normalize(p[:, :-1], p[:, :-1])",
            _CHAINS,
        ),
        (
            "block without its bound",
            "weight = jnp.minimum(weight * ratio[:, i], 1.0)",
            "weight = weight * ratio[:, i]",
            _BLOCK,
        ),
        (
            "siblings sampled with replacement",
            "return accepted, _normalize(without, without), rest",
            "return accepted, q, rest",
            "core/test_exact.py::test_in_trees_of_sampled_drafts_rejection_decides_like_the_program[siblings]",
        ),
        (
            "an imposed length beyond the tree",
            "drafts = jnp.minimum(drafts, depths.max(1))",
            "drafts = jnp.minimum(drafts, column.shape[1])",
            "core/test_accept.py::test_an_imposed_length_is_a_path_of_the_tree",
        ),
    ),
    *_group(
        "jspec/core/grow.py",
        (
            "the score of a node alone",
            "scores[:, :, None] + _ranked(_scores(children))",
            "0 * scores[:, :, None] + _ranked(_scores(children))",
            "core/test_grow.py::test_the_best_tree_is_the_one_found_by_hand[4-3-12]",
        ),
        (
            "ties in any order",
            "(other > this) | ((other == this) & _lower(scores.shape[1]))",
            "other > this",
            "core/test_grow.py::test_the_best_are_those_of_a_sort",
        ),
        (
            "the rows of another node's ancestors",
            "above = jnp.take_along_axis(mask, parent[:, :, None], axis=1) if exact else mask",
            "above = mask",
            "core/test_grow.py::test_a_node_sees_the_rows_of_its_ancestors[True]",
        ),
        (
            "the path of another node",
            "path = jnp.take_along_axis(frontier.path, parent[:, :, None], axis=1)",
            "path = frontier.path",
            "core/test_grow.py::test_the_best_tree_is_the_one_found_by_hand[4-3-12]",
        ),
        (
            "NaN ranks first",
            "jnp.where(jnp.isnan(scores), -jnp.inf, scores)",
            "jnp.where(jnp.isnan(scores), jnp.inf, scores)",
            "core/test_grow.py::test_drafts_without_a_score_come_last",
        ),
        (
            "the probabilities of the first node",
            "probs[node] = proposal.probs[:, slot]",
            "probs[node] = proposal.probs[:, 0]",
            "core/test_grow.py::test_a_tree_of_sampled_drafts_has_a_fixed_topology_and_the_probs_of_its_nodes[4-3-12]",
        ),
    ),
    *_group(
        "jspec/core/tree.py",
        (
            "distant ancestors are unknown",
            "in range(generations.bit_length()):",
            "in range(generations.bit_length() - 1):",
            "core/test_tree.py::test_every_static_depth_reaches_the_root[8]",
        ),
        (
            "the root has depth 1",
            "return mask.sum(-1, dtype=jnp.int32) - 1",
            "return mask.sum(-1, dtype=jnp.int32)",
            "core/test_tree.py::test_ancestors_and_depths_equal_a_walk_to_the_root",
        ),
        (
            "a path ends before its node",
            "on_path = (column[None] < node[:, None])[None]",
            "on_path = (column[None] + 1 < node[:, None])[None]",
            "core/test_tree.py::test_the_paths_of_a_chain_are_those_of_the_same_chain_with_parents",
        ),
        (
            "a path shifted by one",
            "at = jnp.take_along_axis(depth, node, axis=1) - 1",
            "at = jnp.take_along_axis(depth, node, axis=1)",
            _PATHS,
        ),
    ),
    *_group(
        "jspec/core/sampling.py",
        (
            "penalties count the prompt",
            "counted = (column >= first[:, None]) & (column < s.length[:, None])",
            "counted = column < s.length[:, None]",
            _PENALTIES,
        ),
        (
            "padding of paths is token 0",
            "at = jnp.where(path < 0, vocabulary, path)",
            "at = jnp.maximum(path, 0)",
            _PENALTIES,
        ),
        (
            "min_new_tokens is one longer",
            "early = new < options.min_new_tokens[:, None]",
            "early = new <= options.min_new_tokens[:, None]",
            "core/test_sampling.py::test_no_token_ends_the_text_before_its_time_even_by_completing_a_stop_string",
        ),
        (
            "no token is sure to stay",
            "== (None, None, None) else _best(logits)",
            "== (None, None, None) else jnp.zeros_like(logits, bool)",
            "core/test_argmax.py::test_the_most_probable_token_stays_where_no_logit_reaches_the_bound[min_p]",
        ),
        (
            "products overflow",
            "jnp.clip(changed, -most, most)",
            "changed",
            "core/test_argmax.py::test_finite_logits_stay_finite_or_are_forbidden[0]",
        ),
        (
            "every token may be forbidden",
            "jnp.where(left.any(-1, keepdims=True), jnp.where(forbidden, -jnp.inf, logits), otherwise)",
            "jnp.where(forbidden, -jnp.inf, logits)",
            "core/test_argmax.py::test_biases_in_arrays_that_forbid_every_token_are_not_applied",
        ),
        (
            "one noise for all positions",
            "steps = [stream(key, name, position + i) for i in range(count)]",
            "steps = [stream(key, name, position) for i in range(count)]",
            "core/test_sampling.py::test_no_two_streams_positions_or_sequences_share_noise",
        ),
    ),
    *_group(
        "jspec/core/propose.py",
        (
            "drafts with the noise of the next position",
            "position = s.length + generation",
            "position = s.length + generation + 1",
            _PERFECT_CHAIN,
        ),
        (
            "drafts with one noise for all generations",
            "position = s.length + generation",
            "position = s.length",
            _PERFECT_CHAIN,
        ),
        (
            "drafts without penalties and biases",
            "sampling.temper(options, sampling.adjust(s, logits, path))",
            "sampling.temper(options, logits)",
            _PERFECT_CHAIN,
        ),
        (
            "drafts without temperature, top-k, top-p and min-p",
            "sampling.temper(options, sampling.adjust(s, logits, path))",
            "sampling.adjust(s, logits, path)",
            _PERFECT_CHAIN,
        ),
        ("drafts without noise", "noisy = logits + jnp.where(", "noisy = logits + 0 * jnp.where(", _PERFECT_CHAIN),
        (
            "greedy drafts with noise",
            "jnp.where((options.temperature > 0).reshape(-1, 1, 1), noise, 0.0)",
            "noise",
            _PERFECT_CHAIN,
        ),
        (
            "logits of other tokens",
            "return everywhere.at[:, :, ids].set(logits)",
            "return everywhere.at[:, :, jnp.sort(ids)].set(logits)",
            _PERFECT_EAGLE,
        ),
        (
            "scores that are no probabilities",
            "return tokens, best - log_sum_exp[..., None]",
            "return tokens, best",
            "drafters/test_frozen_kv_mtp.py::test_a_tree_has_the_best_of_all_proposals[llama]",
        ),
        (
            "q after the noise",
            "jax.nn.softmax(logits, axis=-1) if sampled",
            "jax.nn.softmax(noisy, axis=-1) if sampled",
            "core/test_statistics.py::test_drafts_are_sampled_without_replacement_from_the_distribution_they_report",
        ),
    ),
    *_group(
        "jspec/core/stopping.py",
        (
            "an ended text reads on",
            "reads = (state >= 0) & (i < length)",
            "reads = i < length",
            "core/test_stopping.py::test_an_ended_sequence_reads_nothing_more",
        ),
        (
            "a failed match starts anew",
            "fallback[child] = int(table[fallback[node], byte]) if node else 0",
            "fallback[child] = 0",
            _STOPS,
        ),
        (
            "a string inside another is missed",
            "complete[child] |= complete[fallback[child]]",
            "complete[child] |= False",
            _STOPS,
        ),
        (
            "EOS only outside a stop string",
            "np.full(len(columns[0]), _END_OF_TEXT, np.int16)",
            "np.array([_END_OF_TEXT, *range(1, len(columns[0]))], np.int16)",
            "core/test_stopping.py::test_sequences_end_where_a_search_finds_the_end",
        ),
    ),
    *_group(
        "jspec/core/automaton.py",
        (
            "a class counts itself",
            "jax.lax.population_count(word & (bit - 1))",
            "jax.lax.population_count(word & (bit | (bit - 1)))",
            _SPARSE,
        ),
        (
            "words before that of a class are not counted",
            "np.cumsum(bits, 1, np.int16) - bits",
            "0 * bits",
            _SPARSE,
        ),
        (
            "all states have the first pattern",
            "pattern = _take(table.pattern, state).astype(jnp.int32)",
            "pattern = 0 * _take(table.pattern, state).astype(jnp.int32)",
            _SPARSE,
        ),
        (
            "every node in the state of the root",
            "for i in range(path.shape[2]):",
            "for i in range(0):",
            "core/test_grammar.py::test_every_node_of_a_tree_has_the_mask_of_its_path[0]",
        ),
        (
            "all grammars with one map of classes",
            "tokens = chosen * automaton.token_class.shape[-1] + tokens",
            "tokens = 0 * chosen + tokens",
            "core/test_grammar.py::test_every_node_of_a_tree_has_the_mask_of_its_path[0]",
        ),
    ),
    *_group(
        "jspec/core/grammar.py",
        (
            "no token is forbidden",
            "return jnp.where(allowed, jnp.maximum(logits, jnp.finfo(logits.dtype).min), -jnp.inf)",
            "return logits",
            "core/test_grammar.py::test_greedy_output_is_the_best_allowed_token_each_time",
        ),
        (
            "nothing left in a smaller vocabulary",
            "return jnp.where(allowed, jnp.where(left, logits, 0.0), others)",
            "return jnp.where(allowed, logits, others)",
            "core/test_grammar.py::test_every_node_of_a_tree_has_the_mask_of_its_path[0]",
        ),
        (
            "a text ends anywhere",
            "np.where(accepts, number, np.int16(FORBIDDEN))",
            "number",
            "text/test_grammar_compiler.py::test_the_table_is_a_walk_over_bytes[object]",
        ),
        (
            "dead ends",
            "np.where((table >= 0) & live[table], table, np.int16(FORBIDDEN))",
            "np.where(table >= 0, table, np.int16(FORBIDDEN))",
            "text/test_grammar_compiler.py::test_no_state_is_a_dead_end",
        ),
        (
            "tokens after the end of the accepted ones are read",
            "path = jnp.where(column < length[:, None], tokens, -1)",
            "path = tokens",
            "core/test_grammar.py::test_constrained_output_does_not_depend_on_the_drafter[ngram]",
        ),
        (
            "forbidden drafts stay",
            "mended = jnp.where(wrong, likely, drafts)",
            "mended = drafts",
            "core/test_grammar.py::test_a_copying_drafter_takes_keys_whole",
        ),
        (
            "the last generation of drafts is not mended",
            "for _ in range(generations):",
            "for _ in range(generations - 1):",
            "core/test_grammar.py::test_a_text_without_choices_replaces_every_draft[tree]",
        ),
    ),
    *_group(
        "jspec/core/commit.py",
        (
            "a commit that need not wait for the forward",
            "length = jnp.where(lax.bitcast_convert_type(value, jnp.int32) == _SIGNALING_NAN, 0, length)",
            "length = length + 0 * value.astype(jnp.int32).shape[0]",
            "core/test_program.py::test_each_pool_is_written_once_per_round_and_never_copied[eagle_tree]",
        ),
    ),
    *_group(
        "jspec/cache/narrow.py",
        (
            "a round's own rows are not rounded",
            "return narrowed(x, dtype).astype(x.dtype) if",
            "return x if",
            "cache/test_narrow.py::test_a_token_is_read_alike_in_its_own_round_and_later[llama]",
        ),
        (
            "values beyond the range become NaN",
            "return jnp.clip(x, -most, most).astype(kind)",
            "return x.astype(kind)",
            "cache/test_narrow.py::test_values_are_rounded_to_the_nearest_and_bounded[float32]",
        ),
    ),
    *_group(
        "jspec/cache/window.py",
        (
            "a window of one more",
            "jnp.maximum(positions - window.length + 1, 0)",
            "jnp.maximum(positions - window.length, 0)",
            f"{_SWA} & {_DRAFT_WINDOW}",
        ),
        (
            "a window of one less",
            "jnp.maximum(positions - window.length + 1, 0)",
            "jnp.maximum(positions - window.length + 2, 0)",
            f"{_SWA} & {_DRAFT_WINDOW}",
        ),
        (
            "a window of one less in a tree",
            "near = from_here <= window.length",
            "near = from_here < window.length",
            f"{_SWA} & {_DRAFT_WINDOW}",
        ),
        (
            "a window of one more in a chain",
            "near = row > own - window.length",
            "near = row >= own - window.length",
            f"{_SWA} & {_DRAFT_WINDOW}",
        ),
        (
            "one first position less in a tree",
            "near |= before + jnp.cumsum(mask, axis=2, dtype=jnp.int32) <= window.keep_first",
            "near |= before + jnp.cumsum(mask, axis=2, dtype=jnp.int32) < window.keep_first",
            _FIRST_OF_TREE,
        ),
        (
            "the first rows of a chain are those of the text",
            "before = 0 if start is None else start.reshape(-1, 1, 1)",
            "before = 0 if start is None else 0 * start.reshape(-1, 1, 1)",
            _DRAFT_WINDOW,
        ),
        (
            "nodes at the position after their own",
            "return mask.sum(axis=2, dtype=jnp.int32) - 1",
            "return mask.sum(axis=2, dtype=jnp.int32)",
            _DRAFT_WINDOW,
        ),
    ),
    *_group(
        "jspec/cache/swa.py",
        (
            "a snapshot of the ring of another slot",
            "return Ring(self.pool[:, :, self._ring(slot)])",
            "return Ring(self.pool[:, :, self._ring(0)])",
            _SLIDING,
        ),
        (
            "a layer's own window gives way to the draft's",
            "length = self.window if window is None else min(self.window, window.length)",
            "length = self.window if window is None else window.length",
            "cache/test_swa.py::test_a_layer_with_a_window_of_its_own_sees_the_shorter_one_and_no_first_rows[20]",
        ),
        (
            "a ring that is too short",
            "pages.pages_for(window, page_size))\n",
            "pages.pages_for(max(window - 1, 1), page_size))\n",
            "cache/test_swa.py::test_a_query_at_the_last_committed_position_finds_its_whole_window[1]",
        ),
        (
            "long commits at the wrong place",
            "start, length = start + omitted, length - omitted",
            "start, length = start, length - omitted",
            _SWA,
        ),
        (
            "a longer window in an exact forward",
            "partial(exact_attention, window=length)",
            "partial(exact_attention, window=length + 1)",
            "models/test_exact_forward.py::test_the_exact_forward_is_the_forward[sinks]",
        ),
    ),
    *_group(
        "jspec/cache/mla.py",
        (
            "attention reads unselected tokens",
            "prefix_mask=prefix_mask,",
            "prefix_mask=None,",
            f"{_CACHES}[dsa-tree-4-None]",
        ),
        (
            "exact attention of a prompt has another form",
            "        if exact:",
            "        if exact and start is not None:",
            f"{_FORWARD}[latent queries-float32]",
        ),
    ),
    *_group(
        "jspec/models/deepseek.py",
        (
            "experts of an exact forward by their number of tokens",
            "layer, self.experts, exact=self.exact)",
            "layer, self.experts)",
            f"{_FORWARD}[latent queries-float32]",
        ),
    ),
    *_group(
        "jspec/models/gpt_oss.py",
        (
            "the attention of an exact layer by its number of tokens",
            "here, own, only, exact=self.exact)",
            "here, own, only)",
            f"{_FORWARD}[sinks-float32]",
        ),
        (
            "every device adds the biases of experts",
            'mode="clip"), self.tensor)',
            'mode="clip"), 1)',
            _PRODUCT,
        ),
    ),
    *_group(
        "jspec/bench/measure.py",
        (
            "the floor of a device is that of all",
            "weights.round_bytes(on_one_device(setup.placement, setup.params)",
            "weights.round_bytes((setup.params)",
            "mesh/test_mesh.py::test_on_eight_devices",
        ),
        (
            "the floor of a group is that of all sequences",
            '"batch": own, "context"',
            '"batch": batch, "context"',
            "mesh/test_mesh.py::test_on_eight_devices",
        ),
    ),
    *_group(
        "jspec/cache/dsa.py",
        (
            "the indexer reads a free row",
            "dtype=start.dtype)[None] < start[:, None]",
            "dtype=start.dtype)[None] <= start[:, None]",
            f"{_CACHES}[dsa-tree-4-None]",
        ),
    ),
    *_group(
        "jspec/cache/select.py",
        (
            "ties are all selected",
            "missing = k - above.sum(-1, keepdims=True, dtype=jnp.int32)",
            "missing = k + 0 * above.sum(-1, keepdims=True, dtype=jnp.int32)",
            "cache/test_select.py",
        ),
    ),
    *_group(
        "jspec/cache/recurrent.py",
        (
            "the state of an empty sequence",
            "live = (start > 0) | (length == 0)",
            "live = start >= 0",
            f"{_CACHES}[recurrent-tree-16-5]",
        ),
        (
            "a window that does not move",
            "new.inputs, length))",
            "new.inputs, 0 * length))",
            f"{_CACHES}[recurrent-tree-16-5]",
        ),
        (
            "a snapshot with the window of another slot",
            "for x in self.layer_states), self.windows[:, slot]",
            "for x in self.layer_states), self.windows[:, 0]",
            _RECURRENT,
        ),
    ),
    *_group(
        "jspec/cache/hybrid.py",
        (
            "all layers of a group are its first",
            "places.append((group, sizes[group]))",
            "places.append((group, 0))",
            "cache/test_hybrid.py",
        ),
    ),
    *_group(
        "pallas_kernels/kv_compact/reference.py",
        (
            "rows beyond the last page",
            "keep = (step < length[:, None]) & (position < page_table.shape[1] * page_size)",
            "keep = step < length[:, None]",
            "kernels/test_kv_compact.py::test_rows_beyond_the_last_page_are_dropped[11-xla]",
        ),
        (
            "rejected rows are written",
            "keep = (step < length[:, None]) &",
            "keep = (step <= length[:, None]) &",
            "kernels/test_kv_compact.py::test_equals_a_loop_over_rows[page_of_3-xla]",
        ),
    ),
    *_group(
        "pallas_kernels/kv_compact/triton.py",
        (
            "rows in the order of the nodes",
            "node = step if path_ref is None else path_ref[b, step]",
            "node = step",
            "kernels/test_kv_compact.py::test_equals_a_loop_over_rows[nodes_17_tree-triton]",
        ),
    ),
    *_group(
        "pallas_kernels/mla_attention/mosaic_gpu.py",
        (
            "few query rows",
            "q_latent.shape[1] * q_latent.shape[2] >= platform",
            "q_latent.shape[1] * q_latent.shape[2] >= 0 * platform",
            "kernels/test_mla_attention_on_hopper.py::test_the_kernel_runs_where_it_is_worthwhile",
        ),
    ),
    *_group(
        "pallas_kernels/gated_matmul/mosaic_gpu.py",
        (
            "idle multiprocessors",
            "return use >= (tuning.limited_use",
            "return use >= 0 * (tuning.limited_use",
            "kernels/test_gated_matmul.py::test_the_kernel_runs_where_it_is_worthwhile",
        ),
    ),
    *_group(
        "pallas_kernels/paged_attention/reference.py",
        (
            "a row after the prefix is read",
            "committed = position < prefix_length[:, None, None]",
            "committed = position <= prefix_length[:, None, None]",
            _PAGED,
        ),
        (
            "NaN of free pages",
            "values = jnp.where(visible.any(1)[:, :, None, None], values, jnp.zeros((), values.dtype))",
            "values = values + jnp.zeros((), values.dtype)",
            _PAGED,
        ),
        (
            "a window starts late",
            "return committed & ((position >= prefix_start[:, :, None]) | (position < keep_first))",
            "return committed & ((position > prefix_start[:, :, None]) | (position < keep_first))",
            _PAGED.replace("page_of_3", "windows_tree"),
        ),
        (
            "one first position too many",
            "return committed & ((position >= prefix_start[:, :, None]) | (position < keep_first))",
            "return committed & ((position >= prefix_start[:, :, None]) | (position <= keep_first))",
            _PAGED.replace("page_of_3", "first_chain"),
        ),
    ),
    *_group(
        "pallas_kernels/paged_attention/triton.py",
        (
            "the blocks before the windows instead of the first ones",
            "return (i - jnp.where(i < first, first - kept, 0) if keep_first else i) * config.block_k",
            "return i * config.block_k",
            _PAGED.replace("page_of_3-xla", "first_tree-triton"),
        ),
    ),
    *_group(
        "pallas_kernels/paged_attention/mosaic_tpu.py",
        (
            "the pages before the windows instead of the first ones",
            "return i - jnp.where(i < first, first - kept, 0) if keep_first else i",
            "return i",
            "kernels/test_simulated.py::test_windows_copy_the_first_pages_and_their_own[1]",
        ),
    ),
    *_group(
        "pallas_kernels/mla_attention/reference.py",
        (
            "a latent row after the prefix is read",
            "[None] < prefix_length[:, None]",
            "[None] <= prefix_length[:, None]",
            _MLA,
        ),
    ),
    *_group(
        "pallas_kernels/attention.py",
        (
            "a chain sees its future",
            "return jnp.tril(jnp.ones((1, nodes, rows), bool), rows - nodes)",
            "return jnp.tril(jnp.ones((1, nodes, rows), bool), rows)",
            _PAGED.replace("page_of_3", "nodes_33_chain"),
        ),
    ),
    *_group(
        "pallas_kernels/exact_attention/reference.py",
        (
            "segments follow the end of the prefix",
            "whole = (block + 1) % (SEGMENT // BLOCK) == 0",
            "whole = (block + 1 - committed // BLOCK) % (SEGMENT // BLOCK) == 0",
            _BITS,
        ),
        (
            "a node's path in the order of nodes",
            "row = path[jnp.clip(position - committed, 0, rows - 1)]",
            "row = jnp.clip(position - committed, 0, rows - 1)",
            _BITS,
        ),
        (
            "an exact window of one more",
            "jnp.maximum(end - window, 0)",
            "jnp.maximum(end - window - 1, 0)",
            _WINDOWS,
        ),
        ("exact attention without its sinks", "if sinks is not None:", "if False:", _WINDOWS),
    ),
    *_group(
        "pallas_kernels/each.py",
        (
            "a loop of one turn",
            "if len(jax.tree.leaves(xs)[0]) > 1:",
            "if True:",
            "models/test_exact_as_shipped.py::test_a_token_alone_has_the_bits_of_a_token_among_others",
        ),
    ),
    *_group(
        "pallas_kernels/exact_matmul/reference.py",
        (
            "blocks of as many rows as there are",
            "blocks = -(-rows // ROWS)",
            "blocks, ROWS = 1, rows",
            "kernels/test_same_bits.py::test_a_row_of_a_product_has_the_same_bits_among_any_rows",
        ),
    ),
    *_group(
        "pallas_kernels/topk/reference.py",
        (
            "NaN is the highest logit",
            "jnp.where(jnp.isnan(x), -jnp.inf,",
            "jnp.where(jnp.isnan(x), jnp.inf,",
            "kernels/test_topk.py::test_strange_rows[some not a number-xla]",
        ),
    ),
    *_group(
        "pallas_kernels/group_rows/reference.py",
        (
            "rows of a group in reverse",
            "key = group * rows + slot",
            "key = group * rows - slot",
            "kernels/test_group_rows.py::test_equals_a_stable_sort[verify-xla]",
        ),
    ),
    *_group(
        "pallas_kernels/grouped_matmul/reference.py",
        (
            "the activation of the other half",
            "out = activation(gate) * other",
            "out = gate * activation(other)",
            "kernels/test_grouped_matmul.py::test_rows_are_chosen_and_gated[float32-silu-xla]",
        ),
        (
            "values of 4 bits that are twice as large",
            "factors(scale) * UNITS[codes]",
            "factors(scale)",
            "kernels/test_grouped_matmul.py::test_packed_matrices_are_taken_apart_and_scaled[e2m1-xla]",
        ),
    ),
    *_group(
        "pallas_kernels/packed_matmul/layout.py",
        (
            "the zero points of other rows",
            "jnp.repeat(zero, group or rows, axis=-2)[..., :rows, :]",
            "jnp.concatenate([zero] * (group or rows), axis=-2)[..., :rows, :]",
            "kernels/test_packed_matmul.py::test_equals_the_product_with_the_widened_matrix[zeros-xla]",
        ),
    ),
    *_group(
        "pallas_kernels/_triton_words.py",
        (
            "values of 4 bits without a sign",
            "sign = (codes & 8) << 28",
            "sign = (codes & 0) << 28",
            "kernels/test_grouped_matmul.py::test_packed_matrices_are_taken_apart_and_scaled[e2m1-triton]",
        ),
        (
            "PTX that takes apart the other half of a word",
            'return "0x5410" if place < 4 else "0x7632"',
            'return "0x7632" if place < 4 else "0x5410"',
            "kernels/test_ptx.py::test_ptx_takes_words_apart_like_the_interpreter[e2m1-bfloat16]",
        ),
        (
            "the scales of a whole block",
            "group, mask = block // self.blocks_per_group * self.sections + section, self.inside",
            "group, mask = block // self.blocks_per_group * self.sections, self.inside",
            "kernels/test_packed_matmul.py::test_equals_the_product_with_the_widened_matrix[a_short_section-triton]",
        ),
        (
            "elements of x after the last",
            "return k < self.inner if self.uneven or self.inner % BLOCK else None",
            "return None",
            "kernels/test_packed_matmul.py::test_equals_the_product_with_the_widened_matrix[a_short_section-triton]",
        ),
    ),
    *_group(
        "jspec/core/sharding.py",
        (
            "parts are joined in the layout of NumPy",
            "made = np.empty_like(parts[0], shape=",
            "made = np.empty(dtype=parts[0].dtype, shape=",
            "checkpoints/test_threads.py::test_weights_are_read_and_joined_in_blocks",
        ),
    ),
    *_group(
        "pallas_kernels/dispatch.py",
        (
            "a kernel is traced for each layer",
            "{name: jnp.asarray(options[name], jnp.int32) for name in self.indices if name in options}",
            "{}",
            "models/test_lowering.py::test_more_layers_have_no_more_kernels",
        ),
        (
            "a kernel is that of another device",
            "here = platform.platform(), platform.interpret(), platform.device()",
            "here = platform.platform(), platform.interpret()",
            "kernels/test_contract.py::test_a_kernel_is_traced_once_for_all_calls_that_differ_in_their_arrays",
        ),
    ),
    *_group(
        "jspec/checkpoints/files.py",
        (
            "NumPy transposes on the host",
            "jax.device_put(np.asarray(values))",
            'jax.device_put(np.asarray(values, order="C"))',
            "checkpoints/test_checkpoint.py::test_a_transposed_tensor_is_not_copied_on_the_host",
        ),
    ),
    *_group(
        "jspec/checkpoints/safetensors_file.py",
        (
            "a read that the system cuts short is the whole one",
            "while start < end:  # The system",
            "if start < end:  # The system",
            "checkpoints/test_threads.py::test_a_file_that_is_read_a_few_bytes_at_a_time",
        ),
    ),
    *_group(
        "jspec/checkpoints/tensors.py",
        (
            "only the first chunk of a block is checked",
            "(flat[at : min(at + _CHUNK, end)] for at in range(start, end, _CHUNK))",
            "(flat[at : min(at + _CHUNK, end)] for at in [start])",
            "checkpoints/test_threads.py::test_a_value_that_is_not_finite_is_found_in_every_block",
        ),
    ),
    *_group(
        "jspec/checkpoints/mxfp4.py",
        (
            "rows of experts are packed before they are split",
            "words = super().put(field, [part.words(pieces)",
            "words = super().put(field, [part.words(1)",
            "mesh/test_mesh.py::test_on_eight_devices",
        ),
    ),
    *_group(
        "jspec/checkpoints/scaled.py",
        (
            "packed zero points of whole columns",
            "least = np.minimum.reduceat(values, np.arange(0, rows, size), axis=-2)",
            "least = np.repeat(values.min(-2, keepdims=True), -(-rows // size), axis=-2)",
            "checkpoints/test_packed.py::test_weights_are_those_that_were_packed[llama-awq]",
        ),
    ),
    *_group(
        "jspec/checkpoints/qwen3_next.py",
        (
            "a device has the channels of other heads",
            "np.split(conv, [keys, 2 * keys], axis=-1)",
            "[conv]",
            "mesh/test_mesh.py::test_on_eight_devices",
        ),
    ),
    *_group(
        "pallas_kernels/split_heads/reference.py",
        (
            "keys that are not rotated",
            "rotate(k, cos, sin), v",
            "k, v",
            "kernels/test_split_heads.py::test_equals_the_equations[few heads-xla]",
        ),
    ),
    *_group(
        "pallas_kernels/residual_norm/reference.py",
        (
            "the norm of the branch alone",
            "wide_rms_norm(stream, following, eps)",
            "wide_rms_norm(branch, following, eps)",
            "kernels/test_residual_norm.py::test_equals_the_equations[xla-a few elements]",
        ),
        (
            "an exact sum of all tokens at once",
            "    if not exact:",
            "    if True:",
            f"{_FORWARD}[shared keys-float32]",
        ),
    ),
    *_group(
        "pallas_kernels/delta_rule/conv.py",
        (
            "a convolution over other ancestors",
            "index = jnp.where(seen & (steps == distance), column, 0)",
            "index = jnp.where(steps == distance, column, 0)",
            "kernels/test_delta_rule.py::test_the_convolution_reads_the_nearest_ancestors[True]",
        ),
    ),
    *_group(
        "jspec/drafters/standalone.py",
        (
            "committed tokens are read without the window",
            "positions, self._seen(state.cache), prefix, select=last)",
            "positions, state.cache, prefix, select=last)",
            f"{_BANDED}[standalone-shape1-2-1-1-4]",
        ),
        (
            "the draft reads at the next position",
            "(s.length + frontier.generation - 1)[:, None],",
            "(s.length + frontier.generation)[:, None],",
            _PERFECT_CHAIN,
        ),
        (
            "the draft reads from another row",
            "jnp.where(committed.length > 0, committed.start + committed.length + 1, start)",
            "jnp.where(committed.length > 0, committed.start + committed.length, start)",
            "drafters/test_drafters.py::test_the_drafts_cache_is_what_one_forward_over_the_tokens_makes[good_draft]",
        ),
        ("the row of the root has no page", "return 1\n", "return 0\n", f"{_STORM}[standalone-tiny_pool]"),
        (
            "a held sequence gets another proposal",
            "proposal = where_sequences(count > 0, proposal, state.proposal)",
            "proposal = proposal",
            f"{_STORM}[standalone-rows]",
        ),
    ),
    *_group(
        "jspec/drafters/block.py",
        (
            "a block without the first positions",
            "within(state.cache, self.window, self.keep_first)",
            "within(state.cache, self.window)",
            f"{_BANDED}[block-shape2-7-3-16-None]",
        ),
        (
            "a block one position late",
            "positions = start[:, None] + jnp.arange",
            "positions = s.length[:, None] + jnp.arange",
            f"{_DRAFTED}[7-3-long]",
        ),
        (
            "the row of the generation before",
            "row = slice(path.shape[2], path.shape[2] + 1)",
            "row = slice(max(path.shape[2] - 1, 0), max(path.shape[2], 1))",
            f"{_DRAFTED}[5-1-dspark]",
        ),
        (
            "fill-in rows predict the next token",
            "first = 0 if model.next_token else 1",
            "first = 0",
            f"{_DRAFTED}[2-3-fill-in]",
        ),
        (
            "the state of another path",
            "else take_parents(markov, frontier)",
            "else take_parents(markov[:, :1].repeat(markov.shape[1], 1), frontier)",
            "drafters/test_block.py::test_sampled_drafts_report_the_distribution_after_their_own_path",
        ),
    ),
    *_group(
        "jspec/models/block_head.py",
        (
            "blocks are causal",
            "mask = None if self.causal[index] else both_ways",
            "mask = None",
            f"{_DRAFTED}[2-3-fill-in]",
        ),
        (
            "the keys of features are not rotated",
            "return layers.rotate(layers.rms_norm(k, layer.k_norm, self.rms_norm_eps), *rotation), v",
            "return layers.rms_norm(k, layer.k_norm, self.rms_norm_eps), v",
            "drafters/test_block.py::test_the_cache_has_the_keys_and_values_of_the_committed_features[4-fill-in]",
        ),
    ),
    *_group(
        "jspec/drafters/eagle.py",
        (
            "a head without its window",
            "return within(cache, self.window, self.keep_first)",
            "return cache",
            f"{_BANDED}[eagle-shape0-5-2-4-None]",
        ),
        (
            "drafts from the rows of another window",
            'alike = ("target", "model", "sampled", "window", "keep_first")',
            'alike = ("target", "model", "sampled")',
            "drafters/test_windows.py::test_adaptive_drafters_share_the_cache_of_one_window",
        ),
        (
            "a head one position ahead",
            "(s.length + frontier.generation - 2)[:, None],",
            "(s.length + frontier.generation - 1)[:, None],",
            _EAGLE,
        ),
        (
            "the feature of another node",
            "take_parents(feature, frontier),",
            "feature[:, :1] * jnp.ones((1, frontier.tokens.shape[1], 1)),",
            _EAGLE,
        ),
        (
            "a held sequence gets another feature and proposal",
            "where_sequences(committed.length > 0, new",
            "where_sequences(committed.length >= 0, new",
            "core/test_decode.py::test_a_sequence_that_was_held_continues_as_if_it_was_not[eagle_tree]",
        ),
        ("rows that depend on another text are shared", "return 1\n", "return 0\n", f"{_STORM}[eagle_block-wide]"),
    ),
    *_group(
        "jspec/drafters/frozen_kv_mtp.py",
        (
            "an assistant at another position",
            "jnp.maximum(committed - 1, 0)\n",
            "jnp.maximum(committed - 2, 0)\n",
            "drafters/test_frozen_kv_mtp.py::test_sampled_drafts_report_their_distribution[llama]",
        ),
    ),
    *_group(
        "jspec/drafters/mtp.py",
        (
            "a head reads the wrong tokens",
            "tokens = _tokens(s, row + 1 + index, drafts[:, 0])",
            "tokens = _tokens(s, row + index, drafts[:, 0])",
            _MTP,
        ),
        ("rows of drafts are kept", "jnp.maximum(jnp.maximum(end - index, 0) - start, 0)", "end - start", _MTP),
    ),
    *_group(
        "jspec/drafters/ngram.py",
        (
            "the earliest match",
            "matched * tokens.shape[1] + column, -1)",
            "matched * tokens.shape[1] - column + tokens.shape[1], -1)",
            _NGRAM,
        ),
        ("a copy that runs out of text", "[None] % period", "[None]", _NGRAM),
    ),
    *_group(
        "jspec/drafters/policy.py",
        ("old rounds count as much as new ones", "keep = jnp.where(reached, 1.0 - rate, 1.0)", "keep = 1.0", _POLICY),
        ("sequences that ended vote", "jnp.where(live[:, None, None], x, 0.0).sum(0)", "x.sum(0)", _POLICY),
        ("a deeper draft is as unknown as the first", "+ WEIGHT * before)", "+ WEIGHT * prior)", _POLICY),
        ("the best choice changes at once", "best = jnp.where(stays, previous, best)", "best = best + 0", _POLICY),
        ("the draft that failed was not judged", "own & (drafts >= positions", "own & (drafts > positions", _POLICY),
        (
            "watched kinds are probed",
            "probed = jnp.where(jnp.asarray(choices.watched)[turn], best, probed)",
            "probed = probed + 0",
            f"{_ADAPTIVE}test_watched_drafters_need_no_probes",
        ),
        (
            "a watched kind is observed when it is taken, too",
            "np.where(np.append(choices.watched, True)[choices.kind], -1, choices.kind)",
            "np.where(choices.kind < 0, -1, choices.kind)",
            _WATCHED,
        ),
    ),
    *_group(
        "jspec/drafters/adaptive.py",
        (
            "a prompt counts as a round",
            "appended = jnp.where(state.taken > 0, committed.length, 0)",
            "appended = committed.length",
            _WATCHED,
        ),
        (
            "what is watched sees the tokens that it drafts",
            "jnp.where(column < length[:, None], s.tokens, 0), length=length)",
            "s.tokens, length=s.length)",
            _WATCHED,
        ),
        (
            "a probe counts as a round of the best choice",
            "self._choices, state.taken - 1, committed",
            "self._choices, state.best - 1, committed",
            f"{_ADAPTIVE}test_what_is_observed_belongs_to_the_drafter_that_was_taken",
        ),
        (
            "a probe is the best choice",
            "best, taken = jnp.where(live, best + 1, state.best)",
            "best, taken = jnp.where(live, index + 1, state.best)",
            f"{_ADAPTIVE}test_what_is_observed_belongs_to_the_drafter_that_was_taken",
        ),
    ),
    *_group(
        "jspec/drafters/suffix.py",
        ("a copy that leaves the text", "+ 1 + offset % period", "+ 1 + offset", _COPIES),
        ("the next text of a corpus is copied", "jnp.where(offset < end, continued, -1)", "continued", _COPIES),
        (
            "the end of a text is an occurrence",
            "found = _count_matched(corpus[None], tokens, last, n) * (after >= 0).astype(jnp.int32)",
            "found = _count_matched(corpus[None], tokens, last, n)",
            f"{_SUFFIX}[shape6]",
        ),
        (
            "a vote counts once for all matches",
            "jnp.left_shift(1, matched)",
            "jnp.minimum(1, matched)",
            f"{_SUFFIX}[shape1]",
        ),
        (
            "a long copy is worth as much as a short one",
            "DISCOUNT ** np.arange(depth)",
            "np.ones(depth)",
            f"{_SUFFIX}[shape1]",
        ),
        ("the first occurrences vote", "[:, ::-1]", "[:, ::1]", f"{_SUFFIX}[shape6]"),
        ("the shortest of the longest matches", "(matched == border)", "(matched == 1)", f"{_SUFFIX}[shape6]"),
        (
            "what agrees later has the same beginning",
            "jnp.where(equal, depth, generation[None]).min(3, keepdims=True)",
            "jnp.where(equal, generation[None] + 1, 0)",
            f"{_SUFFIX}[shape1]",
        ),
    ),
    *_group(
        "jspec/engine/device.py",
        (
            "the wrong snapshot is restored",
            "np.int32(admission.slot), np.int32(admission.restore)",
            "np.int32(admission.slot), np.int32(0)",
            _HYBRID,
        ),
        ("nothing is restored", "if admission.restore is not None:", "if False:", _FEW),
        (
            "the first of two snapshots in one place stays",
            "for slot, place in zip(plan.slots, plan.save, strict=True):",
            "for slot, place in list(zip(plan.slots, plan.save, strict=True))[::-1]:",
            _FEW,
        ),
    ),
    *_group(
        "jspec/engine/programs.py",
        (
            "a draft's state is shared",
            "if jax.tree.leaves(kept_states(state)):",
            "if False:",
            "engine/test_storm.py::test_a_draft_whose_state_is_further_than_the_targets_shares_nothing",
        ),
    ),
    *_group(
        "jspec/engine/balance.py",
        (
            "the least busy group gets every request",
            "(known[index], -loads[index], -given[index], -index)",
            "(-loads[index], known[index], -given[index], -index)",
            _CHOICE,
        ),
        (
            "a request waits for pages although a slot is free",
            "most = min(most, slots - 1)",
            "most = min(most, slots)",
            _CHOICE,
        ),
        (
            "requests of other salts count as known",
            "if last is not None and last.salt == request.salt:",
            "if last is not None:",
            "engine/test_balance.py::test_known_tokens_are_those_in_pages_and_of_the_last_request",
        ),
    ),
    *_group(
        "jspec/engine/group.py",
        (
            "requests that have ended keep a group busy",
            "self.load -= 1",
            "self.load -= 0",
            "engine/test_engine.py::test_leaving_a_stream_cancels_it",
        ),
    ),
    *_group(
        "jspec/models/assistant.py",
        (
            "a device has a part of an assistant's attention",
            "seen = sum_over_devices(seen, self.tensor)",
            "seen = sum_over_devices(seen, 1)",
            _PRODUCT,
        ),
    ),
    *_group(
        "jspec/engine/engine.py",
        (
            "an error of one group cancels the requests of the others",
            "group.stop(self._error)",
            "group.stop()",
            "mesh/test_mesh.py::test_on_eight_devices",
        ),
    ),
    *_group(
        "jspec/engine/sharing.py",
        (
            "a state is saved a token late",
            "whole, rest = divmod(request.read, pages.size)",
            "whole, rest = divmod(request.read - 1, pages.size)",
            _FEW,
        ),
    ),
    *_group(
        "jspec/engine/programs.py",
        (
            "no sequence is held",
            "return (part.finish_code == stopping.RUNNING) & (rows > ceiling)",
            "return (part.finish_code == stopping.RUNNING) & (rows > ceiling) & False",
            f"{_STORM}[ngram-tiny_pool]",
        ),
        (
            "a token is chosen again after a retract",
            "active = plan.ends & ~plan.known",
            "active = plan.ends",
            f"{_STORM}[standalone-tiny_pool]",
        ),
    ),
    *_group(
        "jspec/engine/device.py",
        (
            "stop strings begin anew after a retract",
            "self.stops.state_after(request.start_state, request.tokens)",
            "request.start_state",
            _DEVICE,
        ),
        ("noise depends on the slot", "seeds[row] = request.seed", "seeds[row] = admission.slot", _DEVICE),
    ),
    *_group(
        "jspec/engine/schedule.py",
        (
            "a hit covers all that is to be read",
            "request.reading - self.pages.reread, request.salt",
            "request.reading, request.salt",
            _SCHEDULE,
        ),
        (
            "a request returns while it is in the air",
            "if request.flights:",
            "if False:",
            _SCHEDULE,
        ),
        (
            "slots are not released",
            "            self._released.append(request.slot)\n",
            "",
            _SCHEDULE,
        ),
    ),
    *_group(
        "jspec/train/block.py",
        (
            "a block sees the feature of its anchor",
            "seen = column < self.anchors[:, :, None, None]",
            "seen = column <= self.anchors[:, :, None, None]",
            f"{_BLOCKS}[dspark]",
        ),
        (
            "a block continues after a token that does not count",
            "counted = jnp.cumprod(counted, axis=2)",
            "counted = counted * 1.0",
            f"{_BLOCKS}[dspark]",
        ),
        (
            "the target's distribution one token late",
            "wanted = out.logits.at[row, place].get",
            "wanted = out.logits.at[row, place + 1].get",
            f"{_BLOCKS}[dspark]",
        ),
    ),
    *_group(
        "jspec/train/learner.py",
        ("a mask one token late", "(0, 2)))[:, 2:]", "(0, 1)))[:, 1:]", f"{_MASKS}_a_draft[eagle3]"),
    ),
    *_group(
        "jspec/train/objective.py",
        ("masked tokens are learned", "jnp.sum(mask * loss)", "jnp.sum(loss)", f"{_MASKS}_a_language_model[alone]"),
    ),
    *_group(
        "jspec/train/chats.py",
        ("what follows the end of a reply counts", "if token in ends), len", "if token in ()), len", _REPLY),
        (
            "a reply goes on in another context",
            "if done and before[: len(done[-1][0])] == done[-1][0]:",
            "if done:",
            _REPLY,
        ),
    ),
)


def table() -> str:
    """The list as a table of the documentation."""
    lines = ["", "| mutant | in | killed by |", "|---|---|---|"]
    for mutant in MUTANTS:
        tests = ", ".join(f"`{test.removeprefix('tests/').replace('::', ' ')}`" for test in mutant.tests)
        lines.append(f"| {mutant.name} | `{mutant.file}` | {tests} |")
    return "\n".join(lines) + "\n\n"


def page_with_table(text: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def run(root: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """The exit status of pytest in a copy of the tree, and the end of its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--full", "-o", "addopts=", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(root)}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
    done = subprocess.run(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout[-3000:]


def main() -> int:
    """Runs the mutants; returns 1 if one survives."""
    parser = argparse.ArgumentParser(description="Applies one-line mutants and runs the tests that kill them.")
    parser.add_argument("-k", default="", help="only mutants whose name or file contains this")
    parser.add_argument("--write", action="store_true", help="write the table in docs/testing.md and run nothing")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    chosen = [mutant for mutant in MUTANTS if options.k in mutant.name or options.k in mutant.file]
    if not chosen:
        parser.error(f"-k {options.k!r}: no mutant has this in its name or file")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "tree"
        root.mkdir()
        for name in COPIED:
            source = ROOT / name
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, root / name, ignore=ignore) if source.is_dir() else shutil.copy(source, root / name)
        status, output = run(root, tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests)))
        if status:
            print(output + "\nthese tests must pass before a mutant is applied")
            return 2
        survivors = []
        for mutant in chosen:
            original = mutant.apply(root)
            status, output = run(root, mutant.tests)
            (root / mutant.file).write_text(original, encoding="utf-8")
            # 1: tests failed. Anything else, such as an error of collection, proves nothing.
            verdict = {0: "SURVIVES", 1: "dead"}.get(status, "BROKEN")
            print(f"{verdict:8} {mutant.file}: {mutant.name}", flush=True)
            if status != 1:
                survivors.append(mutant)
                print(textwrap.indent(output, "    "), flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} dead")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
