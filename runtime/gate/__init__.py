"""The gate: everything that kvferry promises of a bundle on this machine, tried on a few prompts and told line by line.

Speculation on is speculation off; restored is uninterrupted; receipts are true; batched heads say what the sequential one says; and what
happens where one configuration continues another's KV.

Order: prompts · report · held · logits · listening · setup · elsewhere · measuring · speculating · restoring · crossing · running · telling
"""

from .report import Line, Report
from .running import run_gate
from .setup import DEFAULT, QUICK, Configuration, Setup, Size

__all__ = ["DEFAULT", "QUICK", "Configuration", "Line", "Report", "Setup", "Size", "run_gate"]
