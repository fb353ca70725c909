"""What holds of pages, snapshots and slots between any two calls."""

from collections import Counter

from jspec.runner.request import Phase


def check_scheduler(scheduler):
    """No page and no slot is lost or doubled, and requests are where their phases say."""
    check_pages(scheduler.pages, [request.pages for request in scheduler._admitted])
    taken = [request.slot for request in scheduler._admitted]
    assert None not in taken, "a request in a slot has none"
    assert sorted([*taken, *scheduler._free_slots]) == list(range(scheduler.slots)), "a slot is lost or doubled"
    phases = (scheduler._admitted, (Phase.READING, Phase.RUNNING)), (scheduler._queue, (Phase.WAITING,))
    for requests, allowed in (*phases, (scheduler._preempted, (Phase.PREEMPTED,))):
        assert all(request.phase in allowed for request in requests), "a request is in the wrong place"
    for requests in (scheduler._admitted, scheduler._queue):
        assert requests == sorted(requests, key=lambda request: request.order), "requests are out of order"
    for request in (*scheduler._queue, *scheduler._preempted):
        assert request.slot is None and not request.pages, "a request without a slot has pages"
    assert not any(request.in_flight for request in scheduler._queue), "a waiting request is in flight"


def check_pages(pages, users):
    """No page is lost or doubled. users: the pages of each sequence."""
    # Every page is free, idle or in use.
    counted = Counter(page for pages in users for page in pages)
    assert 0 not in counted, "somebody uses page 0"
    assert all(pages._users[page] == counted[page] for page in range(pages.count)), "users are miscounted"
    everything = sorted([*pages._free, *pages._idle, *counted])
    assert everything == list(range(1, pages.count)), "a page is lost or doubled"
    assert {page: key for key, page in pages._page_of.items()} == pages._key_of, "keys are not unique"
    # Every place of a snapshot is free or belongs to such a page.
    if (snapshots := pages.snapshots) is not None:
        places = sorted([*snapshots._free, *snapshots._place_of.values()])
        assert places == list(range(snapshots.count)), "a snapshot is lost or doubled"
        assert snapshots._place_of.keys() <= counted.keys() | pages._key_of.keys(), "a snapshot has lost its page"
    # Keys, and the order of eviction.
    order = {page: place for place, page in enumerate(pages._idle)}
    for page, (parent, _) in pages._key_of.items():
        assert counted[page] or page in order, "a free page has a key"
        if isinstance(parent, int):
            assert parent in pages._key_of, "a parent has lost its key"
            assert counted[parent] or order[parent] > order[page], "a parent is idle before its child"
