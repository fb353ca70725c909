"""The mutants of `mutants.py`, by the part that they change."""

_WITHIN = "core/test_draft_limits.py::test_the_tokens_are_those_of_plain_decoding_at_all_limits"
_AS_IF = "core/test_draft_limits.py::test_a_rule_decides_as_for_a_tree_without_the_nodes_beyond_the_limit"
_LIMIT = "core/test_decode.py::test_sequences_end_exactly_at_their_limit[Planted(depth=4)]"
_PLAIN = "core/test_decode.py::test_plain_decoding_is_the_argmax_of_one_forward_over_its_own_output"
_CHAINS = "core/test_exact.py::test_on_chains_the_code_decides_like_the_program"
_PENALTIES = "core/test_sampling.py::test_penalties_and_bias_hold_at_every_node_along_its_own_path[0]"
_GRAMMAR = "core/test_grammar.py::"
_CACHES = "cache/test_caches.py::test_output_equals_plain_decoding"
_WINDOWS = "cache/test_swa.py::test_rounds_equal_dense_attention_over_each_nodes_window[8-1]"
_PAGED = "kernels/test_attention.py::test_equals_a_softmax_in_float64"
_BITS = "kernels/test_same_bits.py::test_attention_of_a_token_has_the_same_bits_in_every_round[bfloat16-plain-xla]"
_STORM = "engine/test_storm.py::test_any_schedule_gives_the_same"
_RETRACTED = "runner/test_device.py::test_a_retracted_sequence_continues_its_stop_string_and_its_noise"
_BLOCKS = "checkpoints/test_block_checkpoint.py::test_a_block_equals_the_oracle[dflash2]"
_SCHEDULE = "engine/test_schedule.py::test_every_event_of_a_schedule_leaves_all_rows_right"

_LATENT = "checkpoints/test_eagle_checkpoint.py::test_forward_equals_the_oracle[latent yarn]"
_RAGGED = "core/test_ragged.py::test_a_forward_equals_the_padded_one"
_PAYS = "drafters/test_pruned.py::test_the_size_has_the_most_expected_tokens_for_its_cost"

FIELDS = (
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
    # Limits of drafts
    (
        "drafts beyond the limit are kept",
        "jspec.core.round:_cut",
        "draft_tree.limit + 1",
        "draft_tree.limit + 2",
        f"{_WITHIN}[standalone_tree]",
    ),
    (
        "the limit of the neighbor",
        "jspec.core.branches:limited",
        "s.draft_limits[:, branch or 0]",
        "jnp.roll(s.draft_limits, 1, axis=0)[:, branch or 0]",
        f"{_WITHIN}[ngram]",
    ),
    (
        "the limit of another branch",
        "jspec.core.branches:limited",
        "branch or 0",
        "0",
        "core/test_draft_limits.py::test_a_sequence_takes_drafts_of_the_allowed_branches_alone",
    ),
    (
        "a residual distribution at the limit of a chain",
        "jspec.core.accept:_chain_probs",
        "jnp.where(_proposed(draft_tree)[:, :, None], q, 0.0)",
        "q",
        f"{_AS_IF}[rejection-1-True]",
    ),
    (
        "a residual distribution at the limit of a tree",
        "jspec.core.accept:_walk",
        "generation < draft_tree.limit",
        "generation <= draft_tree.limit",
        f"{_AS_IF}[rejection-3-True]",
    ),
    (
        "drafts beyond the limit are judged",
        "jspec.core.accept:_proposed",
        "generation < draft_tree.limit[:, None]",
        "generation <= draft_tree.limit[:, None]",
        f"{_AS_IF}[block-1-True]",
    ),
    # Drafts that pay
    (
        "a node's results go to its neighbor",
        "jspec.core.ragged:pack",
        "jnp.minimum(place, total - 1)",
        "jnp.minimum(place + 1, total - 1)",
        f"{_RAGGED}[llama]",
    ),
    (
        "a node sees its neighbor's rows",
        "jspec.core.ragged:_Unpacking.attend",
        "x[:, 0][packing.place]",
        "x[:, 0][jnp.roll(packing.place, 1, axis=0)]",
        f"{_RAGGED}[llama]",
    ),
    (
        "adapters of another sequence",
        "jspec.core.ragged:forward",
        "_of_sequences(params, sequence)",
        "_of_sequences(params, jnp.roll(sequence, 1))",
        f"{_RAGGED}[adapters]",
    ),
    (
        "a node's confidence is its child's",
        "jspec.drafters.pruned:Pruned.probabilities",
        "jnp.exp(jnp.minimum(drafted.scores, 0.0))[:, 1:]",
        "jnp.roll(jnp.exp(jnp.minimum(drafted.scores, 0.0)), -1, axis=1)[:, 1:]",
        f"{_PAYS}[chains-0.0]",
    ),
    (
        "a sequence has its neighbor's nodes",
        "jspec.drafters.pruned:Pruned.verified",
        "rank(jnp.where(useful, worth, -1.0).reshape(1, -1)).reshape(batch, nodes)",
        "jnp.roll(rank(jnp.where(useful, worth, -1.0).reshape(1, -1)).reshape(batch, nodes), 1, axis=0)",
        f"{_PAYS}[chains-0.0]",
    ),
    (
        "limits of another request",
        "jspec.runner.device:Device._admitted",
        "draft_limits(request.speculation, self.method.drafter)",
        "draft_limits(requests[0].speculation, self.method.drafter)",
        "engine/test_speculation.py::test_mixed_requests_are_those_of_drafters_of_their_depths[rejection]",
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
    ("penalties count the prompt", "jspec.core.sampling:_count", "column >= first[:, None]", "column >= 0", _PENALTIES),
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
        f"{_GRAMMAR}test_constrained_output_does_not_depend_on_the_drafter[schemas-ngram]",
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
        "jspec.cache.dsa:largest",
        "above.sum(-1, keepdims=True, dtype=jnp.int32)",
        "0 * above.sum(-1, keepdims=True, dtype=jnp.int32)",
        "cache/test_select.py",
    ),
    (
        "a window of inputs that does not move",
        "jspec.cache.recurrent:RecurrentCache.commit",
        "delta_rule.slide(jnp.where(live[:, None, None], window, 0), new.inputs, length)",
        "delta_rule.slide(jnp.where(live[:, None, None], window, 0), new.inputs, 0 * length)",
        f"{_CACHES}[qwen3_next dense-tree-16-5]",
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
        f"{_PAGED}[heads-page_of_3-xla]",
    ),
    (
        "NaN of free pages",
        "pallas_kernels.paged_attention.reference:paged_attention",
        "jnp.where(visible.any(1)[:, :, None, None], values, jnp.zeros((), values.dtype))",
        "values",
        f"{_PAGED}[heads-page_of_3-xla]",
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
    # Block drafts
    (
        "a head's latents have the models' epsilon",
        "jspec.checkpoints.eagle:_read_latent",
        "read_eps(fields)",
        "1e-6",
        _LATENT,
    ),
    (
        "scores without DeepSeek's factor of YaRN",
        "jspec.models.deepseek:Deepseek.layer_scale",
        "scale * self.rope.scaling.score_scale",
        "scale",
        _LATENT,
    ),
    (
        "a convolution reads across the start of its block",
        "jspec.models.dflash2:_convolve",
        "jnp.pad(x.reshape(-1, size, x.shape[-1]), ((0, 0), (taps - 1, 0), (0, 0)))",
        'jnp.pad(x.reshape(-1, size, x.shape[-1]), ((0, 0), (taps - 1, 0), (0, 0)), mode="wrap")',
        _BLOCKS,
    ),
    (
        "both convolutions of a branch have the kernels of the first",
        "jspec.models.dflash2:convolutions",
        "kernels[:, :, 1]",
        "kernels[:, :, 0]",
        _BLOCKS,
    ),
    (
        "convolutions have each other's kernels",
        "jspec.models.dflash2:convolutions",
        "return partial(_convolve, kernels[:, :, 0]), partial(_convolve, kernels[:, :, 1])",
        "return partial(_convolve, kernels[:, :, 1]), partial(_convolve, kernels[:, :, 0])",
        _BLOCKS,
    ),
    (
        "a selector reads another node of a tree",
        "jspec.drafters.block:Block.draft.expand",
        "frontier.tokens",
        "jnp.roll(frontier.tokens, 1, axis=1)",
        "drafters/test_proposals.py::test_proposals_are_those_of_a_forward_that_sees_each_path_alone[dflash2-4-3-11]",
    ),
    (
        "a selector that reads the root at every depth",
        "jspec.drafters.block:Block.draft.step",
        "previous",
        "jnp.broadcast_to(s.root, previous.shape)",
        "drafters/test_block.py::test_the_rounds_are_those_of_the_oracle[dflash2]",
    ),
    (
        "candidates of another row",
        "jspec.drafters.block:Block.draft.step",
        "ids[:, row]",
        "ids[:, :1]",
        "drafters/test_proposals.py::test_sampled_drafts_report_the_distribution_after_their_own_path[dflash2]",
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
    ("noise depends on the slot", "jspec.runner:Device._admitted", "request.seed", "(request.slot, 0)", _RETRACTED),
    (
        "stop strings begin anew after a preemption",
        "jspec.runner:Device._admitted",
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
    ("old rows are registered", "jspec.engine:Scheduler.forget", "request.registered = None", "pass", _SCHEDULE),
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
"""Name, function, old, new and test of each, as in `mutants.Mutant`."""
