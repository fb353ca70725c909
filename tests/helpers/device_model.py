"""A model of the device for tests of the scheduler: it runs plans over simulated pages and checks every row it reads.

Each row of the two simulated pools, target and draft, holds a hash of all that a true row depends on: the salt, the
tokens up to its own, `ahead` more tokens for a draft row, and the version of the weights.
"""

from collections import Counter


class Slot:
    """A sequence on the device."""

    def __init__(self, request, truth):
        self.request, self.tokens, self.truth = request, list(request.all_tokens), truth
        self.limit = request.limit
        self.begin, self.resumed = request.cached, request.resumed
        self.ready, self.ended = False, False
        self.rows = self.draft_rows = request.cached
        self.target, self.draft = [], []
        """What the rows of this sequence contain."""
        self.rounds = request.rounds
        self.counts = Counter(dict(enumerate(request.accept_counts)))
        self.reported = len(self.tokens)


class Device:
    """Runs flights in the order of their dispatch, at their dispatch, and returns their reports.

    users: the scheduler's count of users per page, for the check that shared pages are not written.
    ahead, extra_rows: of the drafter, as it truly is.
    truths: the tokens of each request, prompt included, up to where it ends.
    """

    def __init__(self, rng, *, slots, count, size, depth, ahead, extra_rows, truths, users):
        self.rng, self.size, self.depth, self.extra_rows, self.packs = rng, size, depth, extra_rows, False
        self.ahead, self.truths, self.users = ahead or 0, truths, users
        self.slots = [None] * slots
        self.target, self.draft = [None] * (count * size), [None] * (count * size)
        self.states = None
        """Snapshots by place, if the target is recurrent."""
        self.version, self.events, self.dropped = 0, Counter(), Counter()

    def release(self, slots):
        for slot in slots:
            assert self.slots[slot] is not None, "an empty slot is released"
            self.slots[slot] = None

    def admit(self, request):
        assert self.slots[request.slot] is None, "a slot is admitted to before its release"
        slot = Slot(request, self.truths[request])
        assert slot.tokens == slot.truth[: len(slot.tokens)], "an admission with wrong tokens"
        assert slot.resumed == (len(slot.tokens) > len(slot.request.prompt))
        for _ in range(slot.begin):
            self.extend(slot)
            self.extend_draft(slot)
        state = None if request.restore is None else self.states[request.restore]
        assert state == (slot.target[-1] if slot.begin and self.states is not None else None), (
            "the state of another text"
        )
        self.slots[request.slot] = slot

    def extend(self, slot):
        """The contents of one more row of the target."""
        before = slot.target[-1] if slot.target else slot.request.salt
        slot.target.append(hash((before, slot.tokens[len(slot.target)], self.version)))

    def extend_draft(self, slot):
        """The contents of one more row of the drafter."""
        row, before = len(slot.draft), slot.draft[-1] if slot.draft else slot.request.salt
        tokens = slot.tokens[row : row + 1 + self.ahead]
        assert len(tokens) == 1 + self.ahead, "a draft row of unknown tokens"
        slot.draft.append(hash((before, *tokens, self.version)))

    def write(self, slot, table, rows):
        """Extends the target's rows to `rows`, and the drafter's as far as tokens are known."""
        size = self.size
        for row in range(slot.rows, rows):
            self.extend(slot)
            self.target[self.place(slot, table, row)] = slot.target[row]
        slot.rows = rows
        last = rows + self.extra_rows - max(0, self.ahead - 1)
        for row in range(slot.draft_rows, last):
            self.extend_draft(slot)
            self.draft[self.place(slot, table, row)] = slot.draft[row]
        slot.draft_rows = max(slot.draft_rows, last)
        assert len(table) * size >= max(rows, last)

    def place(self, slot, table, row):
        index, offset = divmod(row, self.size)
        assert index < len(table), "a row has no page"
        assert len(table) <= -(-(slot.limit - 1 + self.extra_rows) // self.size), "a sequence has pages for nothing"
        page = table[index]
        assert self.users[page] == 1, "a shared page is written"
        assert page in slot.request.pages, "a page of somebody else is written"
        return page * self.size + offset

    def verify(self, slot, table):
        """Reads all rows back."""
        for pool, wanted in ((self.target, slot.target), (self.draft, slot.draft)):
            for index in range(-(-len(wanted) // self.size)):
                part = wanted[index * self.size : (index + 1) * self.size]
                begin = table[index] * self.size
                assert pool[begin : begin + len(part)] == part, "a sequence reads rows that are not its own"

    def of(self, flight, index):
        slot, request = self.slots[flight.slots[index]], flight.requests[index]
        assert slot is not None and slot.request is request, "a flight for another sequence"
        self.verify(slot, flight.table[index])
        return slot

    def read(self, flight, output):
        assert 1 <= len(flight.requests) <= flight.rows
        results, first = {}, False
        for index, request in enumerate(flight.requests):
            slot = self.of(flight, index)
            begin, count = flight.begin[index], flight.count[index]
            known = len(slot.tokens)
            assert not slot.ready and begin == slot.rows, "a chunk does not follow the one before"
            goes_on = index > 0 and flight.requests[index - 1] is request
            first = first if goes_on else begin == slot.begin
            if flight.requests[index + 1 : index + 2] == [request]:
                assert self.packs and count == flight.size, "a piece that is not the last must be full"
            else:
                assert 1 <= count <= flight.size - self.extra_rows * first, "a chunk of a wrong size"
            assert goes_on or not (first and begin) or count >= self.ahead, "a head of the drafter has nothing to read"
            assert begin + count <= known - slot.resumed, "a chunk beyond what is known"
            ends = begin + count == known - slot.resumed
            assert flight.ends[index] == ends and flight.resumed[index] == slot.resumed
            if ends:
                slot.ready = True
                if not slot.resumed:
                    self.append(slot, 1)
            self.write(slot, flight.table[index], begin + count)
            if flight.save[index] is not None:
                self.states[flight.save[index]] = slot.target[-1]
                self.events["snapshots"] += 1
            if ends and not slot.resumed:
                results[request] = self.report(slot, output)
        self.events["reads"] += 1
        self.events["read rows"] += len(flight.requests)
        return results

    def append(self, slot, number):
        """Appends up to `number` tokens; returns how many."""
        new = slot.truth[len(slot.tokens) : len(slot.tokens) + number]
        slot.tokens += new
        slot.ended = len(slot.tokens) == len(slot.truth)
        return len(new)

    def burst(self, flight, output):
        slots = [self.of(flight, index) for index in range(len(flight.requests))]
        ended = [slot.ended for slot in slots]
        assert all(slot.ready for slot in slots), "a burst before the prompt is read"
        for _ in range(flight.rounds):
            still = True
            for index, slot in enumerate(slots):
                if slot.ended:
                    continue
                if min(len(slot.tokens) + self.depth, slot.limit) + self.extra_rows > flight.row_limit[index]:
                    self.events["holds"] += 1
                    continue
                still = False
                accepted = self.rng.randint(1, self.depth + 1)
                self.dropped[slot.request] = accepted - self.append(slot, accepted)
                slot.rounds += 1
                slot.counts[accepted - 1] += 1
                self.write(slot, flight.table[index], len(slot.tokens) - 1)
            if still or (flight.stop_early and ended != [slot.ended for slot in slots]):
                break
        self.events["bursts"] += 1
        return {slot.request: self.report(slot, output) for slot in slots}

    def report(self, slot, output):
        new, slot.reported = slot.tokens[slot.reported :], len(slot.tokens)
        code = (3 if len(slot.tokens) == slot.limit else 1) if slot.ended else 0
        counts = [slot.counts[accepted] for accepted in range(self.depth + 1)]
        return output(len(slot.tokens), new, code, slot.rounds, counts)
