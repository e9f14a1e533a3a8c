"""What a model is called in a bundle's JSON, and which folder that name stands for."""

from __future__ import annotations

PACKAGE = ".mlpackage"
COMPILED = ".mlmodelc"


def folder_names(name: str) -> tuple[str, ...]:
    """The folders that may hold the model called ``name``, the one to use first; empty for another kind of name.

    Of a package and its compiled sibling every engine uses the compiled one, as the published app does: so one bundle
    is the same model everywhere.
    """
    if name.endswith(PACKAGE):
        return name.removesuffix(PACKAGE) + COMPILED, name
    return (name,) if name.endswith(COMPILED) else ()


def stem(name: str) -> str:
    """A model's name without its packaging."""
    return name.removesuffix(PACKAGE).removesuffix(COMPILED)
