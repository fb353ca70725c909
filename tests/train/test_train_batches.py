"""Batches: what each holds, by seed and step, and the files that tokens are read from."""

import numpy as np
import pytest

from jspec.train import batches


def test_batches_are_a_function_of_seed_and_step():
    flat = np.arange(1000, dtype=np.uint16)
    whole = np.arange(2000, 2000 + 40 * 9, dtype=np.uint16).reshape(40, 9)
    sources = (batches.Source(flat, 0.5), batches.Source(whole, 0.5))
    sampled = [batches.sample(sources, seed=3, step=step, batch_tokens=64, length=16)[0] for step in range(40)]
    again = [batches.sample(sources, seed=3, step=step, batch_tokens=64, length=16)[0] for step in range(40)]
    other = batches.sample(sources, seed=4, step=0, batch_tokens=64, length=16)[0]
    assert all(np.array_equal(a, b) for a, b in zip(sampled, again, strict=True))
    assert not np.array_equal(other, sampled[0])
    assert {batch.shape for batch in sampled} == {(4, 17), (8, 9)}
    for batch in sampled:
        assert (np.diff(batch, axis=1) == 1).all()
        if batch.shape == (8, 9):
            assert ((batch[:, 0] - 2000) % 9 == 0).all()


def test_windows_predict_each_token_once():
    tokens = np.arange(100, dtype=np.uint16)
    parts = batches.heldout_batches(tokens, None, batch_tokens=48, length=16)
    predicted = np.concatenate([batch[:, 1:].ravel() for batch, _ in parts])
    assert predicted.tolist() == list(range(1, 97))


def test_token_files_are_checked(tmp_path):
    with pytest.raises(FileNotFoundError, match="jspec train data"):
        batches.open_source(tmp_path / "absent.npy", vocab_size=10)
    np.save(tmp_path / "wide.npy", np.zeros(4, np.int64))
    with pytest.raises(ValueError, match=r"holds int64\[4\]"):
        batches.open_source(tmp_path / "wide.npy", vocab_size=10)
    np.save(tmp_path / "high.npy", np.array([3, 10], np.uint16))
    with pytest.raises(ValueError, match="holds token 10, but the model has vocab_size=10"):
        batches.open_source(tmp_path / "high.npy", vocab_size=10)
    with pytest.raises(ValueError, match="10 tokens: a sequence needs length . 1 = 11"):
        batches.sample((batches.Source(np.zeros(10, np.uint16)),), seed=0, step=0, batch_tokens=64, length=10)
    with pytest.raises(ValueError, match="the held-out text: has 10 tokens: a sequence needs"):
        next(batches.heldout_batches(np.zeros(10, np.uint16), None, batch_tokens=64, length=10))


def test_sequences_of_like_length_share_batches():
    """Without most of their padding, in at most four widths, each sequence as often as any other."""
    rng, (count, width) = np.random.default_rng(0), (12, 330)
    ends = np.array([3, 60, 83, 84, 100, 166, 167, 200, 249, 250, 329, 330])
    mask = (np.arange(width) < ends[:, None]) * rng.integers(0, 2, (count, width))
    mask[np.arange(count), ends - 1] = 1
    tokens = np.arange(count)[:, None] * 1000 + np.arange(width)
    source, seen, widths = batches.Source(tokens, mask=mask.astype(np.uint8)), np.zeros(count), set()
    for step in range(2000):
        batch, of_batch = batches.sample((source,), seed=0, step=step, batch_tokens=1000, length=9)
        rows = batch[:, 0] // 1000
        np.testing.assert_array_equal(batch, tokens[rows, : batch.shape[1]])
        np.testing.assert_array_equal(of_batch, mask[rows, : batch.shape[1]])
        assert of_batch.sum() == mask[rows].sum() and 1000 - batch.shape[1] < batch.size <= 1000 + len(batch)
        seen += np.bincount(rows, minlength=count)
        widths.add(batch.shape[1])
    assert widths == {83, 166, 249, 330}
    np.testing.assert_allclose(seen / seen.sum(), 1 / count, rtol=0.1)


def test_token_files_of_other_widths_are_one_source(tmp_path):
    """As several machines write them: the mask excludes what fills the shorter sequences, and keeps that of a file."""
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 999, (count, width)).astype(np.uint16) for count, width in ((3, 447), (2, 448), (4, 440))]
    paths = [tmp_path / f"rows-{index}.npy" for index in range(3)]
    for path, part in zip(paths, parts, strict=True):
        np.save(path, part)
    counted = rng.integers(0, 2, parts[1].shape).astype(np.uint8)
    np.save(tmp_path / "rows-1_mask.npy", counted)
    source = batches.open_source(*paths, name="--rows", vocab_size=1000, share=0.5)
    assert source.tokens.shape == source.mask.shape == (9, 448)
    assert (source.name, source.share, source.tokens.dtype) == ("--rows", 0.5, np.uint16)
    masks = [np.ones_like(parts[0]), counted, np.ones_like(parts[2])]
    for begin, part, mask in zip((0, 3, 5), parts, masks, strict=True):
        rows, width = slice(begin, begin + len(part)), part.shape[1]
        np.testing.assert_array_equal(source.tokens[rows, :width], part)
        np.testing.assert_array_equal(source.mask[rows, :width], mask)
        assert not source.mask[rows, width:].any()
    # Without padding no mask is needed.
    assert batches.open_source(paths[0], paths[0], vocab_size=1000).mask is None
    np.save(tmp_path / "text.npy", parts[0][0])
    with pytest.raises(ValueError, match=r"text.npy: is uint16\[447\]; must have tokens along 2 axes"):
        batches.open_source(paths[0], tmp_path / "text.npy", vocab_size=1000)
