"""Which group of devices gets a request."""

import pytest

from jspec.engine import balance
from jspec.engine.pages import Pages
from jspec.runner.request import Request


@pytest.mark.parametrize(
    ("loads", "cached", "assigned", "slots", "group"),
    [
        ([2, 1, 3], [0, 0, 0], [0, 0, 0], 8, 1),
        ([1, 1, 1], [0, 0, 0], [9, 7, 8], 8, 1),
        ([2, 0, 0], [0, 5, 9], [0, 0, 0], 8, 2),
        ([2, 0, 2], [8, 0, 4], [0, 0, 0], 8, 0),
        ([3, 0, 2], [8, 0, 4], [0, 0, 0], 8, 2),
        ([8, 7, 7], [8, 0, 0], [0, 0, 1], 8, 1),
        ([10, 8, 9], [8, 0, 4], [0, 0, 0], 8, 0),
        ([11, 8, 9], [8, 0, 4], [0, 0, 0], 8, 2),
        ([1, 0], [8, 0], [0, 0], 1, 1),
        ([2, 1], [8, 0], [0, 0], 1, 0),
    ],
)
def test_a_group_that_knows_the_prompt_gets_it_unless_it_is_busier(loads, cached, assigned, slots, group):
    assert balance.choose(loads, cached, assigned, slots) == group


def test_known_tokens_are_those_in_pages_and_of_the_last_request():
    pages = Pages(9, 4, lookahead=1)
    text = list(range(20))
    own = pages.take(3)
    pages.register(text[:13], 12, own, 0, "salt")

    def known(prompt, last=None, salt="salt"):
        return balance.cached_tokens(pages, Request(prompt, 1, salt=salt), last and Request(last, 1, salt="salt"))

    users = list(pages._users)
    # A prompt is read from its last token on, and a page needs the token after it.
    assert [known(text[:n]) for n in (4, 5, 12, 13, 20)] == [0, 4, 8, 12, 12]
    assert known(text, salt="other") == known(text, text, salt="other") == 0
    assert known([5, *text[1:]]) == 0
    assert known(text, last=text) == 16 and known(text, last=text[:19]) == 16
    assert known([5, *text[1:]], last=[5, *text[1:11], 3, 4]) == 8
    assert known(text[:5], last=text) == 4
    assert pages._users == users
    pages.lookahead = None
    assert known(text, last=text) == 0
