"""How large a value may be declared, whichever way the program is written down."""

RANK_LIMIT = 16
ELEMENT_LIMIT = 1 << 36
IMMEDIATE_LIMIT = 1 << 27
"""Elements of a value that stands in the program itself."""
