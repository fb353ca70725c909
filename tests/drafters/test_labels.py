"""Labels of drafters in reports: nested options are shown, and different drafters never share one."""

import dataclasses

import jspec
from jspec.drafters import describe


@dataclasses.dataclass(frozen=True)
class CopyOrModel:
    """A drafter made of another one, as `jspec.Standalone` is a part of it."""

    part: object = jspec.Standalone()
    others: tuple = ()
    capture_layers = ()

    @property
    def depth(self):
        return self.part.depth

    def bind(self, target, draft):
        return dataclasses.replace(self, part=self.part.bind(target, draft))

    init = draft = extend = None


DRAFTERS = [
    CopyOrModel(),
    CopyOrModel(jspec.Standalone(depth=6)),
    CopyOrModel(jspec.Standalone(depth=6, width=3, num_nodes=12)),
    CopyOrModel(CopyOrModel(jspec.Ngram(depth=2))),
    CopyOrModel(others=(jspec.Ngram(depth=2), jspec.Ngram(depth=3))),
    CopyOrModel(others=(jspec.Ngram(depth=2),)),
    CopyOrModel(others=((1, 2.5), "x")),
    jspec.Adaptive((None, jspec.Ngram())),
    jspec.Adaptive((None, jspec.Ngram()), costs=(1.0, 2.0)),
    jspec.Adaptive((None, jspec.Ngram()), costs=(1.0, 3.0)),
    jspec.Standalone(),
]


def test_different_drafters_have_different_labels():
    labels = [describe(drafter) for drafter in DRAFTERS]
    assert len(set(labels)) == len(labels), labels
    assert labels[2] == "CopyOrModel(part=Standalone(depth=6, width=3, num_nodes=12))"
    assert labels[4] == "CopyOrModel(part=Standalone(depth=4), others=Ngram(depth=2) | Ngram(depth=3))"


def test_a_bound_drafter_has_the_label_of_its_options():
    model = jspec.load("bundled:python-small", draft="bundled:python-tiny")
    for drafter in (CopyOrModel(), jspec.Standalone(depth=2), jspec.Adaptive((None, jspec.Ngram(depth=2)))):
        assert describe(drafter.bind(model.target, model.draft)) == describe(drafter)
