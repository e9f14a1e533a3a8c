"""The texts that speculation is measured on: one that is copied, one that is half copied, and one that is not."""

from __future__ import annotations

from importlib import resources

WORKLOADS = ("verbatim", "extraction", "chat")

PEOPLE = (
    ("Marta Lind", "Holm", 41),
    ("Anders Falk", "Oxelvik", 58),
    ("Ines Berg", "Sandhamn", 23),
    ("Piet Voss", "Harlingen", 35),
)


def workload(name: str) -> str:
    """The prompt of one of `WORKLOADS`.

    verbatim: a text and its beginning again; extraction: lines to be repeated in another shape; chat: a question.
    """
    match name:
        case "verbatim":
            story = resources.files("kvstore").joinpath("data", "ferry.txt").read_text("utf-8").strip()
            passage = story[: story.index("\n", 1200)]
            return f"{passage}\n\nThe same text again, word for word:\n\n{passage[:160]}"
        case "extraction":
            lines = "\n".join(
                f"{name}, {age} years old, lives in {town} and takes the ferry every morning."
                for name, town, age in PEOPLE
            )
            shown = "\n".join(f"Name: {name}; town: {town}; age: {age}" for name, town, age in PEOPLE[:1])
            return f"{lines}\n\nThe same people as a table:\n\n{shown}\n"
        case "chat":
            return "Question: Why does a ferry float although it is made of steel?\nAnswer:"
    raise AssertionError(name)
