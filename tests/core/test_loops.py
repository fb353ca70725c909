"""Whole loops of every drafter and every kind of target: lowered for a GPU and a TPU, and on a GPU run as one graph."""

import functools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from crosslower import PLATFORMS, cross_lower
from loops import LOOPS, plain_of

from jspec.core.loop import run_rounds
from jspec.core.sampling import Sampling
from jspec.drafters import Suffix
from pallas_kernels import platform

SHORT = {"cuda": "gpu", "tpu": "tpu"}
LOWERED_FOR_TPUS = "plain", "tree", "temperature"
"""Ends of the names of the loops that are also lowered for a TPU."""
FAST = "block_tree-cuda", "recurrent_plain-tpu"
each_loop = pytest.mark.parametrize("name", LOOPS)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where"),
    [(name, where) for name in LOOPS for where in PLATFORMS if where == "cuda" or name.endswith(LOWERED_FOR_TPUS)],
)
def test_a_loop_is_lowered_as_one_loop(name, where, monkeypatch):
    """On a GPU also without a sort, which would keep it from running as one graph: a kernel ranks the vocabulary."""
    loop = LOOPS[name]
    weights = loop.shapes()
    s = loop.start(weights)
    monkeypatch.setattr(platform, "platform", lambda: SHORT[where])
    text = cross_lower(functools.partial(run_rounds, method=loop.method), where, weights, s, jnp.int32(9))
    # Latent rows, four to a page here, are no whole tile of a TPU: XLA writes them there.
    latent = name.startswith(("mla", "dsa"))
    assert ('name = "kv_compact"' in text) == (where == "cuda" or not latent)
    assert not re.search("callback|infeed|outfeed|triangular_solve|cusolver", text)
    # Top-k and top-p each search their threshold in a loop of fixed length.
    options = loop.sampling or Sampling()
    inner = [options.top_k, options.top_p] if loop.drafter.depth else []
    loops = len(re.findall(r"stablehlo.while\b", text))
    # Each of several drafters has a loop in the loop.
    own = 1 + len(getattr(loop.drafter, "branches", ()))
    assert loops == own if not any(inner) else loops > own
    if where == "cuda":
        # The state's own names contain "top_k".
        assert not re.search(r"\bsort\b|top_k|TopK", text.replace("sampling.top_k", ""))
        attention = "mla_attention" if latent else "paged_attention"
        assert f'name = "{attention}' in text
        assert ('name = "topk_of_rows"' in text) == ranks(name)


def ranks(name):
    """Whether a program chooses several of many: children, candidates, tokens to record, experts, or clusters."""
    loop = LOOPS[name]
    clustered = any(getattr(getattr(loop.drafter, "model", None), part, None) for part in ("clusters", "selector_rank"))
    experts = any(loop.target.layer_experts(layer) for layer in range(loop.target.num_layers))
    trees = getattr(loop.drafter, "width", 1) > 1 and not isinstance(loop.drafter, Suffix)
    return trees or loop.top > 0 or clustered or experts


# On a GPU

RUN = """
import functools, json, sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
sys.path[:0] = [{helpers!r}]
import loops
from jspec.core.loop import decode
from jspec.core.xla_options import LoopProgram

def run(name):
    loop = loops.LOOPS[name]
    function = lambda params, s, until, method: decode._function(params, s, until, method=method)
    function.__name__ = f"decode_{{name}}"
    program = LoopProgram(function, static_argnames=("method",), donate_argnames=("s",))
    try:
        start, end = functools.partial(loop.start, weights[name]), np.int32(1000)
        states = [program(weights[name], start(), end, method=loop.method) for _ in range(2)]
        return [[row[:n].tolist() for row, n in zip(np.array(s.tokens), np.array(s.length))] for s in states]
    except Exception as error:
        return repr(error)

names = json.loads(sys.argv[1])
weights = {{name: loops.LOOPS[name].weights() for name in names}}
with ThreadPoolExecutor(4) as pool:
    print(json.dumps(dict(zip(names, pool.map(run, names)))))
"""


@pytest.fixture(scope="module")
def captured(request, tmp_path_factory):
    """The directory of the dumps of all selected loops and their plain ones, and the tokens of two runs of each.

    One process runs them: a program is dumped where it is compiled, which the compilation cache would prevent.
    """
    directory = tmp_path_factory.mktemp("dump")
    own = [item for item in request.session.items if item.originalname == "test_a_loop_is_one_graph_and_runs_again"]
    wanted = {item.callspec.params["name"] for item in own}
    names = sorted(wanted | {plain_of(name) for name in wanted})
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={directory} --xla_dump_hlo_pass_re=.*thunk.*"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    code = RUN.format(helpers=str(request.path.parents[1] / "helpers"))
    done = subprocess.run([sys.executable, "-c", code, json.dumps(names)], env=environment, stdout=subprocess.PIPE)
    assert done.returncode == 0
    return directory, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU as JAX's default backend")
@each_loop
def test_a_loop_is_one_graph_and_runs_again(name, captured):
    directory, tokens = captured
    assert isinstance(tokens[name], list), tokens[name]
    first, second = tokens[name]
    assert first == second
    # Rejection sampling gives other tokens of the same distribution, and sampling gives other tokens than greedy.
    if LOOPS[name].sampling is None:
        assert first == tokens[plain_of(name)][0]
    (dump,) = directory.glob(f"*jit_decode_{name}.*thunk_sequence_after_thunk_passes.txt")
    outer = [line for line in dump.read_text().splitlines() if line[:3].isdigit()]
    assert len(outer) == 1 and "kCommandBuffer" in outer[0], outer
    assert "kWhile" in dump.read_text()
