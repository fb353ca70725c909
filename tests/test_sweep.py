"""`jspec evaluate --sweep` runs a drafter with every combination of values."""

import pytest

from jspec import cli
from jspec.cli import evaluate


@pytest.mark.slow
def test_evaluate_sweeps_over_shapes(capsys, tmp_path):
    path = tmp_path / "p.json"
    path.write_text('["def f(x):"]')
    options = ("--model", "bundled:python-tiny", "--prompts", str(path), "--drafter", "ngram", "--max-new-tokens", "8")
    assert cli.main(["evaluate", *options, "--sweep", "depth=2,4", "n=1"]) == 2
    status, out = cli.main(["evaluate", *options, "--sweep", "depth=2,4"]), capsys.readouterr().out
    table = [line.split() for line in out.splitlines()[-4:]]
    assert status == 0 and [row[0] for row in table] == ["drafter", "plain", "Ngram(depth=2)", "Ngram(depth=4)"]
    assert [row[1] for row in table[1:]] == ["1", "1", "1"]
    with pytest.raises(ValueError, match="--sweep depth=2: depth has values already"):
        evaluate.Options(depth=3, sweep=("depth=2",))
    shapes = evaluate.Options(sweep=("depth=2,4", "num-nodes=8,16")).shapes()
    assert [(o.depth, o.num_nodes) for o in shapes] == [(2, 8), (2, 16), (4, 8), (4, 16)]
