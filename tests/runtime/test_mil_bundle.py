"""A compiled bundle is the same model: the same IR, the same KV bytes and tokens, and snapshots go from one to the other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from bundle_folder import write_json
from consumer import rows_digest
from mil_printer import Style, compile_package, compiled_bundle

from kvstore import Store
from kvstore.errors import WeightsMismatch
from kvstore.identity import differences
from runtime.bundle import Bundle, BundleDamaged
from runtime.mil import Compiled
from runtime.mlpackage import Const, Function, Op, Package, Value
from runtime.portable import PortableEngine
from runtime.session import Session

# 512 + 256 + 4 · 32 + 8 + 4 + 1: every function of tiny
TOKENS = 909
STYLES = {
    "1.3": Style(),
    "1.0": Style(scalars=False),
    "without names": Style(named=False, gap=""),
    "blanks, lines and comments": Style(gap=' // one; {\n\t/* two\n ( " */ ', flat=True),
}


@pytest.fixture(scope="module", params=[Style(inline=True), Style(scalars=False)], ids=["1.3, inlined", "1.0"])
def compiled(request: pytest.FixtureRequest, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_bundle(tiny_bundle, tmp_path_factory.mktemp("compiled") / "tiny", request.param)


@pytest.fixture(scope="module")
def produced(
    bundle: Bundle, ids: list[int], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str], tuple[int, ...]]:
    """A store with the snapshot `book` of the packages; the digests of rows at saving and at the end; the tokens."""
    path = tmp_path_factory.mktemp("produced") / "store"
    with Store.open(path) as store:
        session = Session.open(bundle, PortableEngine(bundle.root), store=store)
        session.feed(ids[:TOKENS])
        session.save("book", receipt=session.receipt())
        digests = [rows_digest(session, (0, 0))]
        made = session.generate(24).tokens
    return path, [*digests, rows_digest(session, (0, 0))], made


def constant(value: Value) -> object:
    return (value.spec, value.array.tolist(), value.array.dtype) if isinstance(value, Const) else value


def plain(op: Op, named: bool) -> object:
    inputs = {key: [constant(a) if isinstance(a, Const) else a for a in args] for key, args in op.inputs.items()}
    attributes = {key: constant(value) for key, value in op.attributes.items() if named or key != "name"}
    return op.type, inputs, op.outputs, attributes


def described(function: Function, named: bool = True) -> object:
    ops = [plain(op, named) for op in function.ops]
    return function.name, list(function.inputs.items()), list(function.outputs.items()), ops


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("package", ["chunk_0", "lmhead_v4"])
def test_the_ir_is_that_of_the_package(tiny_bundle: Path, tmp_path: Path, package: str, style: Style) -> None:
    source = tiny_bundle / f"{package}.mlpackage"
    opened, ours = Package.open(source), Compiled.open(compile_package(source, tmp_path / "c.mlmodelc", style))
    assert ours.functions == opened.functions
    assert ours.default_function == (opened.default_function if package == "lmhead_v4" else None)
    for name in opened.functions:
        assert described(ours.function(name)) == described(opened.function(name), style.named)
    blobs = [
        v for op in ours.function(opened.functions[0]).ops for v in op.attributes.values() if not isinstance(v, Const)
    ]
    assert blobs
    for blob in blobs:
        assert ours.blob(blob).tobytes() == opened.blob(blob).tobytes()


def test_every_function_makes_the_same_kv_and_tokens(
    compiled: Path, produced: tuple[Path, list[str], tuple[int, ...]], ids: list[int]
) -> None:
    bundle, engine = Bundle.open(compiled), PortableEngine(compiled)
    session = Session.open(bundle, engine)
    session.feed(ids[:TOKENS])
    before = rows_digest(session, (0, 0))
    made = session.generate(24).tokens
    assert ([before, rows_digest(session, (0, 0))], made) == produced[1:]
    functions = {"decode", *bundle.config.prefill_functions.values()}
    assert functions == {"decode", "prefill_512", "prefill_256", "prefill_32", "prefill_8", "prefill_4"}
    assert set(engine.ledger.names()) == {f"{c}:{f}" for c in bundle.config.chunks for f in functions} | {
        bundle.config.lmhead
    }


def test_the_batched_head_chooses_the_same_tokens(compiled: Path, bundle: Bundle) -> None:
    (head,) = bundle.config.lmhead_batched.values()
    rows = np.random.default_rng(3).standard_normal((4, bundle.config.hidden)).astype(np.float16)
    chosen = [PortableEngine(root).function(head, None)({"hidden": rows})["token"] for root in (bundle.root, compiled)]
    assert chosen[0].tobytes() == chosen[1].tobytes() and len(set(chosen[0].tolist())) > 1


def test_a_snapshot_of_the_packages_restores_with_the_compiled_copy(
    compiled: Path, produced: tuple[Path, list[str], tuple[int, ...]]
) -> None:
    store_path, digests, tokens = produced
    bundle = Bundle.open(compiled)
    with Store.open(store_path) as store:
        session = Session.open(bundle, PortableEngine(compiled), store=store, decode_only=True)
        restored = session.restore("book")
        assert restored.reused_tokens == TOKENS and rows_digest(session, (0, 0)) == digests[0]
        assert session.generate(24).tokens == tokens and rows_digest(session, (0, 0)) == digests[1]
    assert set(bundle.unverified) == {*bundle.config.chunks, *bundle.config.heads}


def test_another_model_s_compiled_copy_does_not_get_the_record_s_identity(tiny_bundle: Path, tmp_path: Path) -> None:
    """It is what would run, beside a package that is whole; its KV would be stored under the package's name."""
    root = shutil.copytree(tiny_bundle, tmp_path / "mixed")
    copy = compile_package(root / "chunk_0.mlpackage", root / "chunk_0.mlmodelc")
    assert Bundle.open(root).identity() == Bundle.open(tiny_bundle).identity()
    weights = copy / "weights" / "weight.bin"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BundleDamaged, match=r"Remove chunk_0\.mlmodelc"):
        Bundle.open(root)


def test_without_a_record_other_packing_is_another_model(
    tiny_bundle: Path, produced: tuple[Path, list[str], tuple[int, ...]], tmp_path: Path
) -> None:
    """The weights are repacked, as Core ML's compiler may: the same numbers in other bytes."""
    bare = compiled_bundle(tiny_bundle, tmp_path / "bare", record=False)
    weights = bare / "chunk_0.mlmodelc" / "weights" / "weight.bin"
    same = Bundle.open(bare)
    packages = Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "p", ignore=shutil.ignore_patterns("kvferry.json")))
    assert same.identity() == packages.identity() and not same.has_record
    weights.write_bytes(weights.read_bytes() + bytes(64))
    repacked = Bundle.open(bare)
    assert {name for name, _, _ in differences(packages.identity(), repacked.identity())} == {"weights"}
    with Store.open(produced[0]) as store:
        session = Session.open(repacked, PortableEngine(bare), store=store, decode_only=True)
        with pytest.raises(WeightsMismatch):
            session.restore("book")


def test_the_head_s_weights_are_not_the_model_s(tiny_bundle: Path, tmp_path: Path) -> None:
    bare = compiled_bundle(tiny_bundle, tmp_path / "bare", record=False)
    identity, heads = Bundle.open(bare).identity(), Bundle.open(bare).head_digest()
    for head in ("lmhead", "lmhead_v4"):
        file = bare / f"{head}.mlmodelc" / "weights" / "weight.bin"
        file.write_bytes(file.read_bytes() + bytes(64))
    (bare / "chunk_0.mlmodelc" / "metadata.json").write_text("[]")
    after = Bundle.open(bare)
    assert after.identity() == identity and after.head_digest() != heads


def test_packages_and_compiled_models_may_be_mixed(
    tiny_bundle: Path, produced: tuple[Path, list[str], tuple[int, ...]], tmp_path: Path
) -> None:
    """One chunk compiled beside its package, one head by its compiled name; the ledger keeps the names of the JSON."""
    root = shutil.copytree(tiny_bundle, tmp_path / "mixed")
    compile_package(root / "chunk_0.mlpackage", root / "chunk_0.mlmodelc", Style(inline=True))
    # what is beside a compiled copy isn't run
    model = root / "chunk_0.mlpackage" / "Data" / "com.apple.CoreML" / "model.mlmodel"
    compile_package(root / "lmhead.mlpackage", root / "lmhead.mlmodelc")
    shutil.rmtree(root / "lmhead.mlpackage")
    config = json.loads((root / "convert_config.json").read_text())
    config["corellm"]["lmhead"] = "lmhead.mlmodelc"
    write_json(root / "convert_config.json", config)
    (root / "kvferry.json").unlink()
    model.write_bytes(b"not a model")
    bundle, engine = Bundle.open(root), PortableEngine(root)
    assert [bundle.package_path(name).suffix for name in bundle.config.chunks] == [".mlmodelc", ".mlpackage"]
    session = Session.open(bundle, engine)
    session.feed(bundle.tokenizer.encode("The ferry"))
    assert len(session.generate(4).tokens) == 4
    assert {n.partition(":")[0] for n in engine.ledger.names()} == {
        "chunk_0.mlpackage",
        "chunk_1.mlpackage",
        "lmhead.mlmodelc",
    }
