"""The pages on the host, against a reference that keeps the text of every page."""

import random

import pytest
from invariants import check_pages

from jspec.engine.pages import Pages


class Reference:
    """Pages by their whole text, (salt, tokens up to the page's end and ahead, that end), and when they became idle."""

    def __init__(self, count, size, ahead):
        self.count, self.size, self.ahead = count, size, ahead
        self.named, self.idle, self.users, self.time = {}, {}, [0] * count, 0

    def texts(self, tokens, most, salt):
        """The texts of the pages that a sequence may share, from the first one on."""
        for end in range(self.size, most + 1, self.size):
            if end + self.ahead <= len(tokens):
                yield salt, tuple(tokens[: end + self.ahead]), end

    def match(self, tokens, most, salt):
        found = []
        for text in self.texts(tokens, most, salt):
            if text not in self.named:
                break
            found.append(self.named[text])
        for page in found:
            self.users[page] += 1
            self.idle.pop(page, None)
        return found

    def name(self, tokens, rows, pages, salt):
        """Names pages up to the first double that the sequence does not share."""
        for text in self.texts(tokens, rows - max(0, self.ahead - 1), salt):
            page = pages[text[2] // self.size - 1]
            if self.named.setdefault(text, page) != page:
                break

    def give(self, pages):
        for page in reversed(pages):
            self.users[page] -= 1
            if not self.users[page] and page in self.named.values():
                self.idle[page] = self.time = self.time + 1

    def taken(self, pages):
        """Pages have been taken: those with names must have been the least recently used, without children."""
        free = [page for page in pages if page not in self.idle]
        evicted = sorted(self.idle, key=self.idle.__getitem__)[: len(pages) - len(free)]
        assert sorted(evicted + free) == sorted(pages), "not the least recently used"
        if evicted:
            unused = [p for p in range(1, self.count) if not self.users[p] and p not in self.idle]
            assert set(unused) <= set(pages), "a name is lost although pages are free"
        for page in pages:
            assert not self.users[page], "a page in use is given"
            self.users[page] = 1
            self.idle.pop(page, None)
        self.named = {text: page for text, page in self.named.items() if page not in evicted}
        for salt, tokens, end in self.named:
            parent = salt, tokens[: end - self.size + self.ahead], end - self.size
            assert end == self.size or parent in self.named, "a parent is evicted before its child"


def walk(seed, steps):
    """Random sequences that begin, grow and end. Returns how many pages were found."""
    rng = random.Random(seed)
    count, size, ahead = rng.randint(2, 14), rng.randint(1, 3), rng.randint(0, 3)
    pages, reference = Pages(count, size, ahead), Reference(count, size, ahead)
    sequences, hits = [], 0  # [tokens, its pages, named, salt]

    def take(number):
        there = sum(not users for users in reference.users) - 1
        assert pages.available == there
        taken = pages.take(number)
        assert (taken is None) == (number > there)
        if taken is not None:
            assert len(set(taken)) == number
            reference.taken(taken)
        return taken

    for _ in range(steps):
        kind = rng.random()
        if kind < 0.3:
            tokens, salt, most = (
                rng.choices(range(2), k=rng.randint(1, 9)),
                rng.choice(["", "", "b"]),
                rng.randint(0, 9),
            )
            found = pages.match(tokens, min(most, len(tokens)), salt)
            assert found == reference.match(tokens, min(most, len(tokens)), salt)
            hits += len(found)
            sequences.append([tokens, found, len(found), salt])
        elif not sequences:
            continue
        elif kind < 0.7:
            sequence = rng.choice(sequences)
            tokens, own, named, salt = sequence
            new = take(rng.randint(0, 3))
            if new is not None:
                own += new
                tokens += rng.choices(range(2), k=rng.randint(0, 4))
                rows = min(len(own) * size, rng.choice([len(tokens), rng.randint(0, len(tokens))]))
                sequence[2] = pages.register(tokens, rows, own, named, salt)
                reference.name(tokens, rows, own, salt)
        elif kind < 0.98:
            _, own, _, _ = sequences.pop(rng.randrange(len(sequences)))
            assert pages.freed_by([own]) == sum(reference.users[page] == 1 for page in own)
            pages.give(own)
            reference.give(own)
        else:
            pages.forget()
            reference.named, reference.idle = {}, {}
            for sequence in sequences:  # Their users never name them again.
                pages.give(sequence[1])
                reference.give(sequence[1])
            sequences.clear()
        check_pages(pages, [own for _, own, _, _ in sequences])
    return hits


def test_no_page_is_lost_in_random_walks():
    assert sum(walk(seed, 60) for seed in range(150)) > 200


@pytest.mark.slow
def test_no_page_is_lost_in_many_random_walks():
    assert sum(walk(seed, 300) for seed in range(1000, 6000)) > 30_000


def test_a_shared_page_is_free_when_both_users_give_it():
    """A page that two sequences share becomes available when both give it."""
    pages = Pages(9, 2, 0)
    first = pages.take(2)
    pages.register([1, 2, 3, 4], 4, first, 0)
    second = pages.match([1, 2, 3, 4], 4)
    assert first == second
    assert [pages.freed_by(each) for each in ([first], [second], [first, second])] == [0, 0, 2]


def test_shares_nothing_without_ahead():
    pages = Pages(9, 2, None)
    own = pages.take(2)
    assert pages.register([1, 2, 3, 4], 4, own, 0) == 0 and pages.match([1, 2, 3, 4], 4) == []
    pages.give(own)
    assert pages.available == 8 and pages.min_prefill == 1


def test_check_finds_losses():
    pages = Pages(5, 2, 0)
    own = pages.take(2)
    check_pages(pages, [own])
    for wrong in ([], [own, own], [own[:1]], [[0, *own]]):
        with pytest.raises(AssertionError):
            check_pages(pages, wrong)
