"""Arrays and the loop: types, trees, sampling, acceptance, stopping, drafting steps, `prefill` and `decode`."""
