"""The waiting line: priority with ageing, arrival order inside, and a fair share for each tenant.

Inside a tenant, order is the sequences' own rank: priority, where waiting ``ageing_s`` weighs as much as one
step, then deadline, then arrival. Between tenants, the class of each one's first sequence decides, higher
first; ageing lifts it at most to the highest class in line, so that it beats starvation but not fairness.
Inside a class the tenant goes first that has had least: virtual token counters, tokens served divided
by weight, lifted to the least active one when a tenant returns (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024).

Mutable state: each tenant's heap of sequences; and for each tenant that waits one *entry* in the heaps of
its class. Entries and ended sequences are left where they are and skipped when met, so every operation costs
O(log waiting), amortised, and none looks at the whole line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from pyserve.core.sequence import Rank, Sequence

MAX_IDLE_TENANTS = 4096
"""Tenants with nothing in line or running whose counters are remembered."""


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant's share: ``virtual`` tokens served divided by ``weight``; what it has in line and running."""

    name: str
    number: int
    weight: float = 1.0
    virtual: float = 0.0
    waiting: int = 0
    running: int = 0
    heap: list[tuple[Rank, Sequence]] = field(default_factory=list)
    entry: int = -1  # number of its valid entry; others are stale


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """A snapshot of one tenant."""

    name: str
    weight: float
    virtual_tokens: float
    waiting: int
    running: int


@dataclass(frozen=True, slots=True)
class WaitingStatistics:
    """``waiting_tokens``: known tokens of those in line that are not computed. ``tenants``: those with
    something running, at most as many as the batch has sequences.
    """

    waiting_sequences: int
    waiting_tokens: int
    tenants: tuple[TenantStatistics, ...]


@dataclass(slots=True)
class _Class:
    """The tenants whose first sequence is of one priority class, by what they have had and by age."""

    by_virtual: list[tuple[float, Rank, int, Tenant]] = field(default_factory=list)
    by_age: list[tuple[float, int, Tenant]] = field(default_factory=list)
    compact_at: int = 64

    def compact(self) -> None:
        """Drops stale entries wherever they are; seldom enough to cost nothing on average."""
        self.by_virtual = [e for e in self.by_virtual if e[3].entry == e[2]]
        self.by_age = [e for e in self.by_age if e[2].entry == e[1]]
        heapify(self.by_virtual)
        heapify(self.by_age)
        self.compact_at = 64 + 2 * len(self.by_age)


class WaitingLine:
    """Sequences that wait to be admitted, new or preempted. Bounded by whoever admits requests."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._tenants: dict[str, Tenant] = {}
        self._idle: dict[str, None] = {}  # in the order in which they fell idle
        self._served: dict[str, Tenant] = {}  # those with something running
        self._classes: dict[int, _Class] = {}
        self._entries = 0
        self._tenant_count = 0
        self._length = 0
        self._tokens = 0

    def __len__(self) -> int:
        """How many sequences wait."""
        return self._length

    @property
    def tokens(self) -> int:
        """Known tokens of those in line that are not computed."""
        return self._tokens

    def tenant(self, name: str, weight: float) -> Tenant:
        """The tenant's record, with its present weight; made where it is new."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._tenant_count)
            self._tenant_count += 1
            self._idle[name] = None
        tenant.weight = weight
        return tenant

    def push(self, sequence: Sequence) -> None:
        """Joins the line, at the place of its rank: a preempted sequence is not put behind new ones."""
        spec = sequence.request.spec
        tenant = self.tenant(spec.tenant, spec.weight)
        if tenant.name in self._idle:
            del self._idle[tenant.name]
            tenant.virtual = max(tenant.virtual, self._least_virtual())
        sequence.in_line = True
        sequence.line_tokens = sequence.remaining
        tenant.waiting += 1
        self._length += 1
        self._tokens += sequence.line_tokens
        heappush(tenant.heap, (sequence.rank, sequence))
        if tenant.entry < 0 or tenant.heap[0][1] is sequence:
            self._enter(tenant, spec.priority)

    def pop(self, now: float) -> Sequence | None:
        """Takes the next one out of the line; None where nobody waits.

        Whoever pops it must push it again, or say that it runs.
        """
        tenant = self._next_tenant(now)
        if tenant is None:
            return None
        sequence = tenant.heap[0][1]
        self._take_out(tenant, sequence)
        return sequence

    def peek(self, now: float) -> Sequence | None:
        """The one that pop() would take; it stays in line."""
        tenant = self._next_tenant(now)
        return None if tenant is None else tenant.heap[0][1]

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out that ended in line."""
        tenant = self._tenants[sequence.request.spec.tenant]
        self._take_out(tenant, sequence)
        self._note_idle(tenant)
        if len(tenant.heap) > 64 and len(tenant.heap) > 2 * tenant.waiting:
            tenant.heap = [item for item in tenant.heap if item[1].in_line]
            heapify(tenant.heap)

    def charge(self, sequence: Sequence, tokens: float) -> None:
        """Counts ``tokens`` (negative: takes them back) as served to the sequence's tenant."""
        tenant = self._tenants[sequence.request.spec.tenant]
        tenant.virtual += tokens / tenant.weight
        if tokens < 0 and tenant.heap:  # its entry would rank it too low
            self._enter(tenant, tenant.heap[0][1].request.spec.priority)

    def serve(self, served: Mapping[str, int], cost: float) -> None:
        """Counts output: for each tenant by name so many tokens, at ``cost`` each."""
        for name, tokens in served.items():
            tenant = self._tenants[name]
            tenant.virtual += tokens * cost / tenant.weight

    def run(self, sequence: Sequence, by: int) -> None:
        """Counts a sequence of the tenant that began (1) or ceased (-1) to run."""
        tenant = self._tenants[sequence.request.spec.tenant]
        tenant.running += by
        if tenant.running:
            self._served[tenant.name] = tenant
        else:
            self._served.pop(tenant.name, None)
        self._note_idle(tenant)

    def statistics(self) -> WaitingStatistics:
        """A snapshot; costs as much as the batch is large."""
        return WaitingStatistics(
            self._length,
            self._tokens,
            tuple(
                TenantStatistics(t.name, t.weight, t.virtual, t.waiting, t.running)
                for t in self._served.values()
            ),
        )

    def check(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        """Raises RuntimeError unless exactly ``waiting`` are in line and the counts agree."""
        expected = set(waiting)
        found = [s for t in self._tenants.values() for _, s in t.heap if s.in_line]
        if len(found) != len(expected) or set(found) != expected or self._length != len(found):
            raise RuntimeError("the line does not hold exactly the waiting sequences")
        if self._tokens != sum(s.line_tokens for s in found):
            raise RuntimeError("waiting tokens are miscounted")
        runs = [s.request.spec.tenant for s in running]
        for tenant in self._tenants.values():
            in_line = sum(s.in_line for _, s in tenant.heap)
            if (tenant.waiting, tenant.running) != (in_line, runs.count(tenant.name)):
                raise RuntimeError(f"tenant {tenant.name!r} is miscounted")
            if (tenant.entry >= 0) != (in_line > 0):
                raise RuntimeError(
                    f"tenant {tenant.name!r} waits without an entry, or has a stale one"
                )

    def _next_tenant(self, now: float) -> Tenant | None:
        while (top := self._top_class()) is not None:
            self._lift_aged(top, now)
            heap = self._classes[top].by_virtual
            virtual, rank, number, tenant = heap[0]
            if virtual >= tenant.virtual:
                return tenant
            heappop(heap)  # served since it was entered
            heappush(heap, (tenant.virtual, rank, number, tenant))
        return None

    def _take_out(self, tenant: Tenant, sequence: Sequence) -> None:
        sequence.in_line = False
        tenant.waiting -= 1
        self._length -= 1
        self._tokens -= sequence.line_tokens
        if tenant.heap[0][1] is not sequence:
            return  # its tenant's entry stands
        while tenant.heap and not tenant.heap[0][1].in_line:
            heappop(tenant.heap)
        if tenant.heap:
            self._enter(tenant, tenant.heap[0][1].request.spec.priority)
        else:
            tenant.entry = -1

    def _note_idle(self, tenant: Tenant) -> None:
        if tenant.waiting or tenant.running:
            return
        self._idle[tenant.name] = None
        if len(self._idle) > MAX_IDLE_TENANTS:
            oldest = next(iter(self._idle))
            del self._idle[oldest], self._tenants[oldest]

    def _enter(self, tenant: Tenant, priority: int) -> None:
        """Gives the tenant its one valid entry, in the class of ``priority``."""
        self._entries += 1
        tenant.entry = self._entries
        rank = tenant.heap[0][0]
        group = self._classes.setdefault(priority, _Class())
        heappush(group.by_virtual, (tenant.virtual, rank, tenant.entry, tenant))
        heappush(group.by_age, (rank[0], tenant.entry, tenant))
        if len(group.by_age) > group.compact_at:
            group.compact()

    def _top_class(self) -> int | None:
        """The highest class that has a valid entry, at the head of its heap; drops what is stale."""
        while self._classes:
            top = max(self._classes)
            if self._clean(top):
                return top
        return None

    def _clean(self, priority: int) -> bool:
        """Drops stale entries from the heads of a class; False where it is empty, and gone now."""
        group = self._classes[priority]
        while group.by_virtual and group.by_virtual[0][3].entry != group.by_virtual[0][2]:
            heappop(group.by_virtual)
        while group.by_age and group.by_age[0][2].entry != group.by_age[0][1]:
            heappop(group.by_age)
        if not group.by_virtual:
            del self._classes[priority]
        return bool(group.by_virtual)

    def _lift_aged(self, top: int, now: float) -> None:
        """Enters those in the top class that have waited their way up to it."""
        for priority in [p for p in self._classes if p < top]:
            while self._clean(priority):
                aged, _, tenant = self._classes[priority].by_age[0]
                if (now - aged) / self._ageing_s < top:
                    break
                self._enter(tenant, top)

    def _least_virtual(self) -> float:
        """The least counter of those in line or running; 0 where there is nobody."""
        counters = [tenant.virtual for tenant in self._served.values()]
        counters += [
            self._classes[priority].by_virtual[0][0]
            for priority in list(self._classes)
            if self._clean(priority)
        ]
        return min(counters, default=0.0)
