"""The ledger, and what the portable engine promises beyond every engine's contract (`test_engine_contract`)."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from feeding import Feeder
from graphs import Writer, planned

from kvstore.errors import KVError
from runtime.engine import Fp16Overflow, FunctionNotAllowed, LoadLedger
from runtime.mlpackage import PackageError
from runtime.portable import PortableEngine


def test_the_ledger_keeps_order_and_names_heads_by_their_package() -> None:
    ledger = LoadLedger()
    ledger.record("chunk_1.mlpackage", "decode", 0.5)
    ledger.record("lmhead.mlpackage", None, 0.25)
    assert ledger.names() == ["chunk_1.mlpackage:decode", "lmhead.mlpackage"]
    assert [entry.seconds for entry in ledger.loaded] == [0.5, 0.25]


def test_a_restricted_ledger_lets_only_the_named_pairs_pass() -> None:
    ledger = LoadLedger()
    ledger.check("any", "thing")
    ledger.restrict([("chunk_0", "decode"), ("lmhead", None)])
    ledger.check("chunk_0", "decode")
    ledger.check("lmhead", None)
    for package, function in (("chunk_0", "prefill_4"), ("chunk_1", "decode"), ("lmhead", "main"), ("chunk_0", None)):
        with pytest.raises(FunctionNotAllowed, match="opened decode-only") as caught:
            ledger.check(package, function)
        assert "chunk_0:decode, lmhead" in str(caught.value) and package in caught.value.details["function"]
    assert ledger.names() == []


def test_a_refused_load_reads_nothing(tmp_path: Path) -> None:
    engine = PortableEngine(tmp_path)  # there is no package to read
    engine.ledger.restrict([("chunk_0.mlpackage", "decode")])
    with pytest.raises(FunctionNotAllowed, match="prefill_4: opened decode-only"):
        engine.function("chunk_0.mlpackage", "prefill_4")
    with pytest.raises(FileNotFoundError):
        engine.function("chunk_0.mlpackage", "decode")
    assert engine.ledger.names() == []


def test_a_function_that_the_package_lacks_is_a_package_error(tiny_bundle: Path) -> None:
    with pytest.raises(PackageError, match="verify_4"):
        PortableEngine(tiny_bundle).function("chunk_0.mlpackage", "verify_4")


def test_two_engines_in_two_threads_do_not_disturb_each_other(tiny_bundle: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((12, 64)).astype(np.float16)
    found: list[bytes] = []

    feeders = [Feeder(tiny_bundle, PortableEngine(tiny_bundle)) for _ in range(3)]

    def work(feeder: Feeder) -> None:
        found.append(b"".join(feeder.feed("decode", row[None], p).tobytes() for p, row in enumerate(rows)))

    for feeder in feeders:
        feeder.feed("decode", rows[:1], 0)  # loads; running is what goes on at once
    threads = [threading.Thread(target=work, args=(feeder,)) for feeder in feeders[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work(feeders[2])
    assert len(set(found)) == 1


def test_describe_is_stable_and_says_what_matters(tiny_bundle: Path) -> None:
    engine = PortableEngine(tiny_bundle, compute="fp16-rounding", threads=2)
    told = engine.describe()
    engine.function("lmhead.mlpackage", None)({"hidden": np.zeros(64, np.float16)})
    assert told == engine.describe() == PortableEngine(tiny_bundle, compute="fp16-rounding", threads=2).describe()
    assert told["engine"] == "portable" and told["compute"] == "fp16-rounding" and told["threads"] == "2"
    keys = {"engine", "compute", "numpy", "blas", "blas_core", "threads", "os", "machine", "python"}
    assert told.keys() == keys and all(isinstance(value, str) and value for value in told.values())
    assert told["numpy"] == np.__version__


def test_threads_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="threads: expected 1 or more, found 0"):
        PortableEngine(tmp_path, threads=0)


def test_blas_is_held_to_its_threads_during_a_call_only(tiny_bundle: Path) -> None:
    from threadpoolctl import threadpool_info, threadpool_limits

    def threads() -> set[int]:
        return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}

    engine = PortableEngine(tiny_bundle)
    head = engine.function("lmhead.mlpackage", None)
    inside: list[set[int]] = []
    plain = head._function.__class__.__call__

    class Spy(type(head._function)):  # type: ignore[misc]
        def __call__(self, *args: object, **kwargs: object) -> object:
            inside.append(threads())
            return plain(self, *args, **kwargs)

    head._function.__class__ = Spy
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        head({"hidden": np.zeros(64, np.float16)})
        assert threads() == before
    assert inside == [{1}]


def test_overflow_is_named_with_what_it_was_before_rounding() -> None:
    w = Writer(hidden=(2,))
    w("mul", (2,), x="hidden", y=2.0, _name="doubled")
    w("mul", (2,), x="doubled", y=0.25, _name="small")
    hidden = {"hidden": np.array([4e4, 1], np.float16)}
    assert planned(w.function("small"))(hidden)["small"].tolist() == [20000.0, 0.5]
    with pytest.raises(
        Fp16Overflow, match=r"main: doubled: expected magnitudes up to 65504 .*, found 80000;"
    ) as caught:
        planned(w.function("small"), rounding=True)(hidden)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, KVError) and again.details["op"] == "doubled" and again.details["largest"] > 79000
    with pytest.raises(Fp16Overflow, match="main: doubled"):
        planned(w.function("doubled"))(hidden)  # leaving as fp16 is rounding too


def test_keys_that_overflow_fp16_are_refused_in_float32_as_well() -> None:
    w = Writer(rows=(1, 4), onehot=(6,), k_0_in=(1, 6, 4))
    hit = w("reshape", (1, 6, 1), x="onehot", shape=[1, 6, 1])
    keep = w("sub", (1, 6, 1), x=1.0, y=hit)
    w("mul", (1, 4), x="rows", y=2.0, _name="key")
    new = w("mul", (1, 6, 4), x=w("reshape", (1, 1, 4), x="key", shape=[1, 1, 4]), y=hit)
    w("add", (1, 6, 4), x=w("mul", (1, 6, 4), x="k_0_in", y=keep), y=new, _name="k_0_out")
    given = {"rows": np.full((1, 4), 6e4, np.float16), "onehot": np.eye(6, dtype=np.float16)[2]}
    with pytest.raises(Fp16Overflow, match="main: key"):
        planned(w.function("k_0_out"))({**given, "k_0_in": np.zeros((1, 6, 4), np.float16)})
