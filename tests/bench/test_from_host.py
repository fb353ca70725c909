"""`benchmarks/from_host.py`: rounds and seeds that the host calls are those of the loop."""

from functools import partial

import from_host
import pytest
import recorded
import toy
from from_host import Unfolded, seed

from jspec.core import accept
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.drafters import FrozenKvMtp


@pytest.mark.slow
def test_an_unfolded_seed_changes_no_token():
    """Nor how many each round appends."""
    drafter = toy.bound_drafters()["frozen_kv_mtp"]
    both = toy.assistant_params()
    expected = toy.run(drafter, both, toy.start(drafter, both))
    unfolded = Unfolded(drafter)
    run = partial(decode, both, method=Method(toy.TARGET, unfolded, accept.greedy))
    call = partial(seed, both, drafter=unfolded)
    s = from_host.from_host(lambda s, until: run(s, until), call, toy.start(unfolded, both), 12)
    assert toy.generated(s) == toy.generated(expected)
    toy.assert_same(s.stats, expected.stats)
    with pytest.raises(ValueError, match="must be a bound chain that is not sampled"):
        Unfolded(FrozenKvMtp())


@pytest.mark.slow
def test_rounds_that_the_host_calls(capsys, tmp_path):
    sizes = ["--depth", "2", "--rounds", "4", "--repeats", "1", "--tokens-per-round", "2"]
    assert from_host.main(["--preset", "tiny-gemma-4", *sizes, "--json", str(tmp_path / "out")]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["chain", "stepped", "unfolded"]
    lines = recorded.read(tmp_path / "out")
    assert [(line.mode, line.metric, len(line.values)) for line in lines] == [
        (mode, "round", 1) for mode in from_host.MODES
    ]
    assert from_host.main(["--preset", "tiny"]) == 2
    assert "--mode unfolded: requires the drafter frozen-kv-mtp, not Eagle" in capsys.readouterr().err
