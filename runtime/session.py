"""One conversation over a bundle and a store: what `Decoding` does, and prompt, save, restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from kvstore.backend import Backend
from kvstore.digest import ContentDigest
from kvstore.errors import InputInvalid, NotCovered, ObjectMissing, Refused
from kvstore.identity import DEFAULT_NAMESPACE, require_same
from kvstore.items import Item, common_prefix
from kvstore.layout import BLOCK
from kvstore.match import Match
from kvstore.saving import Expected, Saved
from kvstore.snapshot import Lineage, Receipt

from .bundle import Bundle
from .decoding import Decoding
from .engine import Engine
from .reports import Prompted, Restored, Source
from .soft import Input, items_of
from .speculation import verify_assets
from .state import State


class Session(Decoding):
    """Not thread-safe. Uses, and does not close, the bundle, the engine and the store. Made by `Session.open`."""

    def __init__(
        self, bundle: Bundle, engine: Engine, store: Backend | None, namespace: str, *, only_decode: bool
    ) -> None:
        super().__init__(bundle, engine, only_decode=only_decode)
        self._store = store
        self._namespace = namespace
        self._head = bundle.head_digest()
        if store is not None:
            bundle.identity()  # may hash files: now, and not while somebody waits for a restore

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        engine: Engine,
        *,
        store: Backend | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        decode_only: bool = False,
        allow_verify: bool = False,
    ) -> Session:
        """An empty session. ``decode_only``: from now on the engine refuses to load anything but the chunks' decode functions and the
        sequential head (`engine.FunctionNotAllowed`), and every token is fed through decode. ``allow_verify``: besides these it may then load
        what speculation verifies with; prompts still go through decode. Says nothing without ``decode_only``."""
        if decode_only:
            config = bundle.config
            allowed: list[tuple[str, str | None]] = [(chunk, config.decode_function) for chunk in config.chunks]
            allowed.append((config.lmhead, None))
            if allow_verify:
                allowed += verify_assets(config)
            engine.ledger.restrict(allowed)
        return cls(bundle, engine, store, namespace, only_decode=decode_only)

    @property
    def known(self) -> tuple[tuple[ContentDigest, ...], ...]:
        """Content digests, per group, of the leading full blocks that came from the store or were saved to it."""
        return self._state.known

    def prompt(self, tokens: Sequence[Input], progress: Callable[[int, int], None] | None = None) -> Prompted:
        """Hold exactly ``tokens`` (ids and soft spans, 1 position or more), reusing what the session or the store already has, whichever is longer.

        Rewinds to at most one token before the end, so that there is a pending token; with one at hand for exactly these tokens nothing
        is computed. `generate` then starts right after them.
        """
        asked = self._checked(tokens)
        items = items_of(asked)
        if not items:
            raise InputInvalid("prompt: expected at least 1 token, found none")
        self._require_room(len(items))
        common = common_prefix(self.items, items)
        if common == len(items) == self.position and self.pending is not None:
            self._state = self._state.with_emitted(False)
            return Prompted(common, "session", self.feed(()), None)
        reused = self._rewindable(min(common, len(items) - 1))
        source: Source = "session" if reused else "nothing"
        match = self._find(items)
        if match is not None and match.n > reused:
            reused, source = (match.n, "store") if self._loaded(match) else (0, "nothing")
        else:
            self.rollback(reused)
        return Prompted(reused, source, self._feed(asked[reused:], progress), match)

    def save(
        self,
        name: str | None = None,
        receipt: Receipt | None = None,
        model: str = "",
        expect: Expected = "anything",
    ) -> Saved:
        """Save to the store, named or as cache. Blocks whose content is known are neither hashed nor written again; rows that are not
        covered are never written. ``model``: a name for people, the bundle's if empty. ``expect``: where the name must stand to be moved, else
        `RefConflict`."""
        state = self._state
        saved = self._required_store().save(
            self.bundle.layout(),
            self.bundle.identity(),
            state.items,
            self.kv,
            namespace=self._namespace,
            name=name,
            lineage=state.lineage(),
            pending=state.pending,
            head=None if state.pending is None else self._head,
            receipt=receipt,
            model=model or self.bundle.config.name,
            covered=self.kv.covered,
            known=state.known,
            expect=expect,
        )
        if saved.snapshot is not None and len(saved.snapshot.blocks) > len(state.known):
            self._state = state.with_known(saved.snapshot.blocks)
        return saved

    def restore(self, name: str, at: int | None = None) -> Restored:
        """Become the snapshot ``name``, or its first ``at`` tokens. Replaces what the session holds.

        Raises `SnapshotMissing`, `IdentityMismatch` (its narrow class), `ContextOverflow` or `NotCovered` before anything changes; an error
        while reading (`Corrupt`, `ObjectMissing`) leaves an empty session.
        """
        started = perf_counter()
        return self._restore(self._required_store().match(name, at=at, head=self._head), started)

    def restore_match(self, match: Match) -> Restored:
        """Become the tokens that ``match`` has in common with what was asked for. Otherwise as `restore`."""
        return self._restore(match, perf_counter())

    def _rewindable(self, position: int) -> int:
        try:
            self.kv.require(position)
        except NotCovered:
            return 0
        return position

    def _required_store(self) -> Backend:
        if self._store is None:
            raise InputInvalid("store: expected one for save and restore, found none. Pass store= to Session.open.")
        return self._store

    def _find(self, items: Sequence[Item]) -> Match | None:
        if self._store is None:
            return None
        return self._store.find(
            self.bundle.layout(),
            self.bundle.identity(),
            items,
            namespace=self._namespace,
            head=self._head,
            lineage=Lineage.of(self._engine_fields),
        )

    def _loaded(self, match: Match) -> bool:
        """False, and empty, where an object was collected since it was found: a cache miss. Damage is raised."""
        self._admit(match)
        try:
            self._load(match)
        except ObjectMissing:
            return False
        return True

    def _admit(self, match: Match) -> None:
        snapshot = match.snapshot
        mine = (self.bundle.identity(), self.bundle.layout())
        require_same(mine, (snapshot.identity, snapshot.layout), f"snapshot {match.digest}")
        if snapshot.namespace != self._namespace:
            raise Refused(
                f"snapshot {match.digest}: namespace: expected {self._namespace!r}, found {snapshot.namespace!r}. KV never crosses "
                f"namespaces; open the session (or give --namespace) for {snapshot.namespace!r}.",
                expected=self._namespace,
                found=snapshot.namespace,
            )
        self._require_room(match.n)

    def _restore(self, match: Match, started: float) -> Restored:
        self._admit(match)
        rest: list[int] = []
        for item in match.snapshot.items[match.n : match.common]:
            if not isinstance(item, int):
                raise InputInvalid(
                    f"restore: item {match.n + len(rest)} is a soft token, whose row is not at hand to feed it. Give the whole sequence "
                    f"with its rows to Session.prompt, which reuses what is here, or restore at another position."
                )
            rest.append(item)
        self._require_room(match.common)
        read = self._load(match)
        seconds = perf_counter() - started
        self._chain.load_decode()
        if rest:
            self.feed(rest)
        return Restored(self.position, match.n, seconds, read, tuple(self.engine.ledger.names()), match.lineage, match)

    def _load(self, match: Match) -> int:
        """Replace everything held by the ``match.n`` tokens of ``match``. Returns bytes read."""
        snapshot = match.snapshot
        self._state = State()
        self.kv.reset()
        try:
            read = self._required_store().load(match, into=self.kv) if match.n else 0
        except BaseException:
            self.kv.reset()
            raise
        self.kv.hold(match.n, [start for start, _ in match.runs])
        makers = tuple(snapshot.lineages[snapshot.lineage[i // BLOCK]] for i in range(match.n))
        restored = State(snapshot.items[: match.n], makers, pending=match.pending)
        self._state = restored.with_known(snapshot.blocks)
        return read
