"""JSON schemas for answers: which of them are supported, and validation of answers.

Pure, bounded in time and memory for any schema and answer; nothing is ever fetched. Existing libraries do not guarantee
this: they run untrusted regular expressions in Python, and repeat whole values in their messages.
"""

from unisono.schemas.messages_for_model import violation
from unisono.schemas.supported import check

__all__ = ["check", "violation"]
