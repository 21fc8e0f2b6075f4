"""Plain Python twin of ``BlockPool``: slow, obvious, and by other means (prefixes are whole token tuples)."""

from __future__ import annotations

from dataclasses import dataclass, field

Chain = tuple[int, tuple[int, ...]]  # salt, and every token from the beginning to the block's end


@dataclass
class Row:
    tokens: list[int]
    prompt_len: int
    salt: int
    tenant: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class TwinPool:
    """Blocks are identities here too, so that the LRU order itself can be compared."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.free = list(range(num_blocks))  # the first is reused first
        self.content: dict[int, Chain] = {}
        self.rows: dict[int, Row] = {}
        self.evictions = self.queries = self.hits = 0

    def references(self, block: int) -> int:
        return sum(row.blocks.count(block) for row in self.rows.values())

    def add(self, row: int, tokens: list[int], prompt_len: int, salt: int, tenant: int) -> None:
        assert row not in self.rows
        self.rows[row] = Row(list(tokens), prompt_len, salt, tenant)

    def append(self, row: int, token: int) -> None:
        self.rows[row].tokens.append(token)

    def chain(self, row: Row, blocks: int) -> Chain:
        return row.salt, tuple(row.tokens[: blocks * self.block_size])

    def advance(self, index: int, take: int) -> None:
        row = self.rows[index]
        before, row.computed = row.computed, row.computed + take
        assert row.computed <= min(len(row.tokens), len(row.blocks) * self.block_size)
        if self.prefix_cache:
            for i in range(before // self.block_size, row.computed // self.block_size):
                self.content[row.blocks[i]] = self.chain(row, i + 1)

    def known_prefix(self, index: int) -> int:
        """How many leading blocks of the row could be taken from the cache."""
        row = self.rows[index]
        most = (len(row.tokens) - 1) // self.block_size if self.prefix_cache else 0
        known = set(self.content.values())
        return next((n for n in range(most) if self.chain(row, n + 1) not in known), most)

    def adopt(self, index: int, blocks: list[int]) -> None:
        """The row shares ``blocks``, which hold its first tokens."""
        row = self.rows[index]
        for n, block in enumerate(blocks, 1):
            if self.prefix_cache:
                assert self.content[block] == self.chain(row, n)
            if block in self.free:
                self.free.remove(block)
        row.blocks = list(blocks)
        row.computed = len(blocks) * self.block_size

    def reserve(self, index: int, tokens: int) -> bool:
        row = self.rows[index]
        lacking = -(-tokens // self.block_size) - len(row.blocks)
        if lacking > len(self.free):
            return False
        for _ in range(lacking):
            block = self.free.pop(0)
            if self.content.pop(block, None) is not None:
                self.evictions += 1
            row.blocks.append(block)
        return True

    def reserve_all(self, indices: list[int]) -> bool:
        needed = [len(self.rows[index].tokens) for index in indices]
        lacking = sum(
            max(0, -(-tokens // self.block_size) - len(self.rows[index].blocks))
            for index, tokens in zip(indices, needed, strict=True)
        )
        return lacking <= len(self.free) and all(map(self.reserve, indices, needed))

    def trim(self, index: int, keep: int) -> None:
        row = self.rows[index]
        while len(row.blocks) > keep:
            block = row.blocks.pop()
            if self.references(block) == 0:
                self.free.insert(len(self.free) if block in self.content else 0, block)
        row.computed = min(row.computed, len(row.blocks) * self.block_size)

    def release(self, index: int) -> None:
        self.trim(index, 0)
        del self.rows[index]

    def tenant_blocks(self, tenant: int) -> int:
        return sum(len(row.blocks) for row in self.rows.values() if row.tenant == tenant)

    def clone(self) -> TwinPool:
        """A deep enough copy to try something on."""
        copy = TwinPool(self.num_blocks, self.block_size, self.prefix_cache)
        copy.free, copy.content = list(self.free), dict(self.content)
        copy.rows = {
            i: Row(list(r.tokens), r.prompt_len, r.salt, r.tenant, r.computed, list(r.blocks))
            for i, r in self.rows.items()
        }
        return copy


@dataclass
class TwinSelection:
    take: list[int]
    preempted: list[tuple[int, int]]
    trimmed: list[tuple[int, int]]


@dataclass(frozen=True)
class Candidate:
    row: int
    want: int
    running: bool
    need_free: int = 0


def twin_select(
    pool: TwinPool,
    candidates: list[Candidate],
    *,
    token_budget: int,
    request_budget: int,
    prefill_budget: int = -1,
) -> TwinSelection:
    """What ``select`` must decide, in the order in which its docstring says it; changes ``pool`` alike."""
    take = [0] * len(candidates)
    cut: set[int] = set()

    def is_decode(i: int) -> bool:
        row = pool.rows[candidates[i].row]
        return (
            candidates[i].running
            and candidates[i].want == 1
            and row.computed == len(row.tokens) - 1
        )

    decode = [is_decode(i) for i in range(len(candidates))]

    def allowed(i: int) -> int:
        row = pool.rows[candidates[i].row]
        bounds = [candidates[i].want, len(row.tokens) - row.computed, token_budget - sum(take)]
        if not decode[i] and prefill_budget >= 0:
            used = sum(t for t, d in zip(take, decode, strict=True) if not d)
            bounds.append(prefill_budget - used)
        if sum(t > 0 for t in take) >= request_budget:
            return 0
        return max(0, min(bounds))

    def lacking(i: int, tokens: int) -> int:
        row = pool.rows[candidates[i].row]
        return -(-(row.computed + tokens) // pool.block_size) - len(row.blocks) - len(pool.free)

    def reclaim(i: int, tokens: int) -> None:
        for shared_too in (False, True):
            for victim in reversed(range(i + 1, len(candidates))):
                row = pool.rows[candidates[victim].row]
                while lacking(i, tokens) > 0 and row.blocks:
                    if not shared_too and pool.references(row.blocks[-1]) > 1:
                        break
                    pool.trim(candidates[victim].row, len(row.blocks) - 1)
                    cut.add(victim)
                    take[victim] = 0

    def obtain(i: int) -> int:
        tokens = allowed(i)
        reclaim(i, tokens)
        if tokens == 0:
            return 0
        while tokens and lacking(i, tokens) > 0:
            tokens -= 1
        if tokens == 0:
            return -1
        assert pool.reserve(candidates[i].row, pool.rows[candidates[i].row].computed + tokens)
        return tokens

    running = [i for i, c in enumerate(candidates) if c.running]
    for i in [i for i in running if decode[i]] + [i for i in running if not decode[i]]:
        if i in cut:
            continue
        take[i] = obtain(i)
        if take[i] < 0:
            take[i] = 0
            cut.add(i)

    for i in range(len(running), len(candidates)):
        if cut:
            break
        if i == len(running) and sum(take) == 0:
            got = obtain(i)
        else:
            got = allowed(i)
            roomy = len(pool.free) >= candidates[i].need_free and lacking(i, got) <= 0
            got = got if roomy else 0
            if got:
                pool.reserve(candidates[i].row, pool.rows[candidates[i].row].computed + got)
        if got <= 0:
            break
        take[i] = got

    kept = [(i, len(pool.rows[candidates[i].row].blocks)) for i in sorted(cut)]
    return TwinSelection(
        take,
        [(i, k) for i, k in kept if candidates[i].running],
        [(i, k) for i, k in kept if not candidates[i].running],
    )
