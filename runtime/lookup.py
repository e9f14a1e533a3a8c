"""Drafts by prompt lookup: what followed the last three tokens where they stood before. Text that repeats itself is guessed this way
at no cost; whether a guess was right is for the model to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.items import Item

NGRAM = 3
"""Tokens, the pending one last, that must stand earlier in the text."""


def prompt_lookup(tokens: Sequence[Item], most: int) -> tuple[int, ...]:
    """At most ``most`` ids to follow ``tokens`` (everything fed, then the pending token): those behind the latest earlier place of
    the last three, which may overlap them. Empty if there is no such place.

    The latest place counts even if few tokens follow it. A soft token has no id to copy: the draft ends before it.
    """
    end = len(tokens)
    if end < NGRAM + 1 or most < 1:
        return ()
    # index:   at  at+1  at+2 | at+3 …            end−3  end−2  end−1
    #          a   b     c    | the draft   ...   a      b      c       at + 3 ≤ end − 1: at least one token follows
    first, second, last = tokens[end - NGRAM :]
    for at in range(end - NGRAM - 1, -1, -1):
        if tokens[at + 2] == last and tokens[at + 1] == second and tokens[at] == first:
            drafts: list[int] = []
            for item in tokens[at + NGRAM : at + NGRAM + most]:
                if not isinstance(item, int):
                    break
                drafts.append(item)
            return tuple(drafts)
    return ()
