"""`stats store` counts what was asked and found; `find --explain` names the nearest snapshot and what keeps it from serving."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Kvferry

from kvstore import Identity, Store
from kvstore.index import Index

BUNDLE = ("--bundle", "tiny")


@pytest.fixture
def forked(story: Path) -> Path:
    """The story's first 400 characters, and then something else."""
    path = story.parent / "forked.txt"
    path.write_text(story.read_text("utf-8")[:400] + "Zebras, quite unexpectedly, dance.", "utf-8")
    return path


def test_hits_misses_and_what_sharing_saves(kvferry: Kvferry, story: Path, forked: Path) -> None:
    assert kvferry("stats", "store").code == 3, "no store yet"
    kvferry("prefill", *BUNDLE, str(story), "--tokens", "130", "--name", "a")
    before = kvferry("stats", "store", "--json").json
    assert before["asked"] == {
        "finds": 1, "hits": 0, "hit_rate": 0.0, "tokens": 130, "reused_tokens": 0, "reuse_share": 0.0
    }  # fmt: skip
    assert before["logical_bytes"] == before["once_bytes"] == 130 * 768 and before["saved_by_sharing_bytes"] == 0
    made = kvferry("prefill", *BUNDLE, str(forked), "--name", "b", "--json").json
    kvferry("prefill", *BUNDLE, str(story), "--tokens", "66", "--name", "c", "--namespace", "other")
    kvferry("find", *BUNDLE, str(story), "--explain")  # only a question
    kvferry("generate", *BUNDLE, "--from", "a", "-n", "1")  # by name: nothing was looked for
    after = kvferry("stats", "store", "--json").json
    assert made["reused_tokens"] > 64
    assert after["asked"]["finds"] == 3 and after["asked"]["hits"] == 1
    assert after["asked"]["tokens"] == 130 + made["context_tokens"] + 66
    assert after["asked"]["reused_tokens"] == made["reused_tokens"]
    mine, other = after["models"]
    assert (mine["namespace"], other["namespace"]) == ("default", "other")
    assert mine["model"] == other["model"] == "tiny" and mine["identity"] == other["identity"]
    assert (mine["asked"]["hits"], mine["snapshots"], other["asked"]["hits"], other["snapshots"]) == (1, 2, 0, 1)
    shared = made["reused_tokens"] // 64 * 64 * 768
    assert mine["saved_by_sharing_bytes"] == shared == mine["logical_bytes"] - mine["once_bytes"]
    # The other namespace computed the same first block: its bytes are here once, and count for both.
    assert after["once_bytes"] == mine["once_bytes"] + other["once_bytes"] - 64 * 768
    assert after["stored_bytes"] >= after["once_bytes"]
    text = kvferry("stats", "store").out
    assert "3 questions, 1 answered with something (33%)" in text and "other" in text


def test_counts_begin_anew_with_the_index(kvferry: Kvferry, story: Path, tmp_path: Path) -> None:
    kvferry("prefill", *BUNDLE, str(story), "--tokens", "70", "--name", "a")
    with Store.open(tmp_path / "store") as store:
        store.indexed(Index.rebuild)
    assert kvferry("stats", "store", "--json").json["asked"]["finds"] == 1, "a rebuilt index keeps them"
    (tmp_path / "store" / "index.sqlite").write_bytes(b"damaged")
    for suffix in ("-wal", "-shm"):
        (tmp_path / "store" / f"index.sqlite{suffix}").unlink(missing_ok=True)
    value = kvferry("stats", "store", "--json").json
    assert value["asked"]["finds"] == 0 and value["counted_since"] is None and value["snapshots"] == 1
    assert "Nothing was asked of it yet" in kvferry("stats", "store").out


def test_the_place_where_two_texts_part(kvferry: Kvferry, story: Path, forked: Path) -> None:
    kvferry("prefill", *BUNDLE, str(story), "--tokens", "300", "--name", "a")
    answer = kvferry("find", *BUNDLE, str(forked), "--explain", "--json")
    near = answer.json["nearest"]
    assert near["names"] == ["a"] and near["differences"] == [] and near["tokens"] == 300
    assert (
        near["common_tokens"]
        == near["usable_tokens"]
        == answer.json["reused_tokens"]
        == answer.json["first_difference"]
    )
    text = story.read_text("utf-8")
    assert near["asked"]["text"] == answer.json["first_difference_text"]
    assert "Z" in near["asked"]["text"] + near["asked"]["after"] and "Z" not in near["before"]
    told = near["before"] + near["stored"]["text"] + near["stored"]["after"]
    assert told in text and len(near["before"]) > 8
    assert (near["before"] + near["asked"]["text"] + near["asked"]["after"]) in forked.read_text("utf-8")
    assert near["asked"]["token"] != near["stored"]["token"] and not near["asked"]["soft"]
    assert near["why"] == f"token {near['common_tokens']} differs."
    shown = kvferry("find", *BUNDLE, str(forked), "--explain").out
    assert "nearest: a (tiny, namespace default, 300 tokens)" in shown and repr(near["stored"]["text"]) in shown


def test_the_text_goes_on_or_ends(kvferry: Kvferry, story: Path) -> None:
    kvferry("prefill", *BUNDLE, str(story), "--tokens", "100", "--name", "a")
    longer = kvferry("find", *BUNDLE, str(story), "--tokens", "120", "--explain", "--json").json["nearest"]
    assert longer["stored"] is None and longer["asked"]["text"] and longer["why"] == "the snapshot ends at 100 tokens."
    shorter = kvferry("find", *BUNDLE, str(story), "--tokens", "90", "--explain", "--json").json["nearest"]
    assert shorter["asked"] is None and shorter["stored"]["text"] and shorter["usable_tokens"] == 89


def test_another_namespace_and_another_model(kvferry: Kvferry, story: Path, tmp_path: Path) -> None:
    kvferry("prefill", *BUNDLE, str(story), "--tokens", "100", "--name", "a", "--namespace", "elsewhere")
    answer = kvferry("find", *BUNDLE, str(story), "--tokens", "100", "--explain", "--json").json
    near = answer["nearest"]
    assert (answer["reused_tokens"], answer["snapshot"], near["usable_tokens"]) == (0, None, 0)
    assert near["differences"] == [{"field": "namespace", "asked": "default", "found": "elsewhere"}]
    assert near["common_tokens"] == 100 and near["why"].startswith("it is in another namespace (namespace:")
    other_weights(tmp_path / "store")
    near = kvferry("find", *BUNDLE, str(story), "--tokens", "90", "--explain", "--json").json["nearest"]
    assert [one["field"] for one in near["differences"]] == ["tokenizer", "weights"]
    assert near["names"] == ["b"] and near["stored"]["text"] is None and near["asked"] is None
    assert near["why"].startswith("its KV is of another model (tokenizer: expected ")


def other_weights(path: Path) -> None:
    """A named copy of snapshot a, in the namespace that is asked for, by another model with another tokenizer."""
    with Store.open(path) as store:
        match = store.match("a")
        snapshot = match.snapshot
        rows = Anything()
        identity = Identity.of({**snapshot.identity.wire(), "weights": "other", "tokenizer": "other"})
        store.save(
            snapshot.layout, identity, snapshot.items, rows, namespace="default", name="b",
            lineage=[snapshot.lineages[0]] * len(snapshot.blocks),
        )  # fmt: skip
        store.shelf.records.remove(["a"])
        for end in ("", ".cov"):
            (path / "snapshots" / f"{match.digest}{end}").unlink()


class Anything:
    """Rows that are all zero: here only tokens and identity are of interest."""

    def spans(self, group: int, start: int, stop: int) -> list[memoryview]:
        # tiny: per token and layer 2 heads of 16 in a full layer, 1 of 32 in a sliding one; what counts is the length
        return [memoryview(bytes((stop - start) * n)) for n in SPANS[group]]


SPANS: dict[int, list[int]] = {}


@pytest.fixture(autouse=True)
def spans_of_tiny(tiny_bundle: Path) -> None:
    from runtime import Bundle

    layout = Bundle.open(tiny_bundle).layout()
    for number, group in enumerate(layout.groups):
        SPANS[number] = [2 * group.row_elements] * (2 * len(group.layers))


def test_a_trimmed_snapshot_lacks_rows(kvferry: Kvferry, story: Path, tmp_path: Path) -> None:
    kvferry("prefill", *BUNDLE, str(story), "--tokens", "1100", "--name", "a")
    kvferry("push", str(tmp_path / "stick"), "a")
    kvferry("--store", str(tmp_path / "device"), "pull", str(tmp_path / "stick"), "a", "--trimmed")
    asked = ("find", *BUNDLE, str(story), "--tokens", "700", "--explain", "--json", "--store", str(tmp_path / "device"))
    answer = kvferry(*asked).json
    near = answer["nearest"]
    assert near["common_tokens"] == 700 and near["usable_tokens"] == answer["reused_tokens"] < 699
    assert "rows that continuing at 699 reads are not in this store" in near["why"] and "kvferry pull" in near["why"]


def test_nothing_is_near(kvferry: Kvferry, story: Path) -> None:
    for _ in range(2):
        answer = kvferry("find", *BUNDLE, str(story), "--explain", "--json")
        assert answer.code == 0 and answer.json["nearest"] is None
        kvferry("--store", "store", "ls")
    assert "no snapshot begins with the text's first token" in kvferry("find", *BUNDLE, str(story), "--explain").out
