"""Checks of JSON schemas and grammars from requests, and validation of answers against them.

All functions are pure. Their time and memory are limited for any schema and answer. Nothing is ever fetched.

The package has its own validator, because the library jsonschema-rs 0.60.3 has the following disadvantages. They were
measured on one core, with linear-time regular expressions. "Here" means this package.

- It has no limit on work. 40 definitions, each with two references to the next, keep it busy for over 12 s of CPU time
  (here: 0.3 s until the limit). Only `is_valid` avoids repeated work, and only for recursive references.
- It holds the interpreter lock, so the event loop stops even if another thread validates. One pattern of 900 states on
  a text of 1 MB stops it for 4.4 s (here: the estimated work exceeds the limit, and nothing runs).
- Only `is_valid` is fast, and it reports no violations. `iter_errors` computes all of them first: 50,000 items against
  an enum of 1,000 values take 12 s and 3.5 GB (here: 0.02 s).
- Integers of more than 4,300 digits become null, so `multipleOf` accepts them and `minimum` rejects them.

The library is faster for ordinary answers. It takes 4 ms instead of 100 ms for an answer of 355 kB, and 1 µs instead of
8 µs for an answer of 25 bytes. It adds 14 ms to the import and 15 MB to the installation.
"""

from unisono.schemas.check_schema import ANTHROPIC, OPENAI, StrictRules, check
from unisono.schemas.grammars import MAX_GRAMMAR_CHARACTERS, BadGrammar, check_grammar
from unisono.schemas.violation_messages import violation

__all__ = [
    "ANTHROPIC",
    "MAX_GRAMMAR_CHARACTERS",
    "OPENAI",
    "BadGrammar",
    "StrictRules",
    "check",
    "check_grammar",
    "violation",
]
