"""JSON schemas that answers have to match: which of them can be honoured, and what is wrong with an answer.

Promises: pure, bounded in time and memory whatever the schema or the answer holds, and nothing is ever fetched. That is
why the judging is done here: the libraries for it run expressions of strangers in Python, and repeat whole values in
what they report.
"""

from unisono.schemas.messages_for_model import violation
from unisono.schemas.supported import check

__all__ = ["check", "violation"]
