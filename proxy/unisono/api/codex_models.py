"""Codex's model catalogue: the features that Codex may use with a gpt-oss model.

Codex reads the catalogue from the URL in the setting `model_catalog_url` of its provider. If a model has no entry,
Codex prints a warning, assumes a default context window, and does not offer the tool `apply_patch`.
"""

from __future__ import annotations

from typing import Final

from unisono.api.answer_types import Object
from unisono.core.generation import DEFAULT_CONTEXT

MAX_TOOL_OUTPUT_TOKENS: Final = 10_000

# System prompt of Codex. Codex sends the instructions of the catalogue entry instead of its own, so the model would get
# no instructions from an entry without them.
INSTRUCTIONS: Final = """\
You are a coding agent in Codex, a program in the user's terminal. You work in the user's folder, with the tools of \
this session.

# How to work

- Work until the request is done, and only then end your turn. Do not end it with an announcement of the next step: \
call the tool instead.
- Read before you change. Search with `rg` and `rg --files`, or with `grep` and `find` if they are missing.
- Follow the `AGENTS.md` files. Each holds for its folder and everything below; a deeper one takes precedence, and the \
user takes precedence over all.
- Change only what the request needs, in the style of the code around it. Mention other faults, but leave them alone.
- Other people may work in the same folder. Never undo changes that you did not make. Commit, create branches or \
discard changes only if the user asks for it.
- Check your work with the tests or the build of the project, the narrowest check first.
- If a command fails because of the sandbox and the request needs it, ask for approval through the parameters of the \
tool.

# Editing files

Use the tool `apply_patch`. Its input is a patch; do not put it into a shell command:

*** Begin Patch
*** Update File: src/greet.py
@@ def greet():
     name = read_name()
-    print("Hi")
+    print("Hello", name)
*** Add File: notes.txt
+Every line of a new file starts with a plus sign.
*** Delete File: old.txt
*** End Patch

Paths are relative to the folder of the session. In an update, a line starts with a space if it stays, with `-` if it \
goes, and with `+` if it is new. Give three unchanged lines around each change, and after `@@` the function or class \
if these lines occur twice. Do not read a file again after a successful patch.

# Answers

Answer briefly, in plain text or simple Markdown. State what you changed and how you checked it, or what you could \
not do. Name places as `path:line`. The user sees the files: do not repeat their content.
"""


# Reasoning efforts that Codex accepts from its user, with their descriptions.
LEVELS: Final = {
    "low": "Fast answers with little reasoning",
    "medium": "Reasoning for everyday tasks",
    "high": "Much reasoning for hard tasks",
}


# The format belongs to Codex and changes with its versions, so it is no part of the gateway's own API. Codex rejects
# the whole list if a field is missing that its version needs. Codex 0.169.0 accepts the fields below.
def to_codex_model(name: str, context: int | None, priority: int) -> Object:
    """Return the catalogue entry of the gpt-oss model `name`.

    `context` is the context window in tokens; None selects the default. Codex sorts its list of models by `priority`.
    """
    window = context or DEFAULT_CONTEXT
    return {
        "slug": name,
        "display_name": name,
        "description": "gpt-oss, served by Unisono",
        "default_reasoning_level": "medium",
        "supported_reasoning_levels": [{"effort": level, "description": text} for level, text in LEVELS.items()],
        # The name of Codex's shell tool that all versions know; newer ones map it to `unified_exec`.
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": priority,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": INSTRUCTIONS,
        "supports_reasoning_summaries": True,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "tokens", "limit": MAX_TOOL_OUTPUT_TOKENS},
        "supports_parallel_tool_calls": False,
        "context_window": window,
        # Codex limits its user's setting `model_context_window` to this value.
        "max_context_window": window,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        # By default, Codex asks the model `codex-auto-review` for approvals.
        "auto_review_model_override": name,
    }
