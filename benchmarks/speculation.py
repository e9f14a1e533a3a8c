"""What speculation gains on Gemma 3 270M: `kvferry bench speculation` on the cached bundle, which is built if it is not there.

It has no code of its own, so that what is recorded is what a user measures. Arguments are the command's; --folder, which one ARGS gives every
benchmark, is taken and not used.
"""

from __future__ import annotations

import sys

from kvstore.__main__ import main
from kvstore.demo import ensure_bundle

MODEL = "gemma3-270m"


def words(given: list[str]) -> list[str]:
    """The command's arguments: ``given`` without --folder, and --bundle if it is not among them."""
    left = list(given)
    if "--folder" in left:
        at = left.index("--folder")
        del left[at : at + 2]
    if "--bundle" in left:
        return left
    ensure_bundle(MODEL)
    return ["--bundle", MODEL, *left]


if __name__ == "__main__":
    sys.argv = ["kvferry", "bench", "speculation", *words(sys.argv[1:])]
    main()
