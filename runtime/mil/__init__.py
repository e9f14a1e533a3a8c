"""Reads compiled models: ``.mlmodelc`` folders, whose program is text. The IR is that of ``runtime.mlpackage``.

Files in order: text, sections, types, values, reader, compiled, opening. Each imports only those before it.
"""

from .compiled import Compiled
from .opening import Model, open_model

__all__ = ["Compiled", "Model", "open_model"]
