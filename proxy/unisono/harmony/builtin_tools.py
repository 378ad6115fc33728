"""Tools that gpt-oss was trained on: names, and declarations in the system message.

`browser` and `python` are declared exactly as openai-harmony declares them. openai-harmony has no `container`. This
tool is declared like any other namespace, with the arguments that all inference servers for gpt-oss accept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from unisono.core.conversation import Builtin
from unisono.core.frozen import dataclass

# Function names in calls, by tool.
FUNCTIONS_OF: Final[dict[str, frozenset[str]]] = {
    "browser": frozenset({"browser.search", "browser.open", "browser.find"}),
    "python": frozenset({"python"}),
    "container": frozenset({"container.exec"}),
}

# Maximum length in characters of a client's description of a tool; the rest is cut off.
MAX_DESCRIPTION_LENGTH: Final = 8_000


def namespace(recipient: str) -> str:
    """Return the part of `recipient` before the first dot, or all of it if there is no dot."""
    return recipient.partition(".")[0]


def is_builtin(name: str) -> bool:
    """Return whether `name` belongs to the namespace of a tool gpt-oss was trained on."""
    return namespace(name) in FUNCTIONS_OF


@dataclass(frozen=True, slots=True)
class BuiltinNamespace:
    """Description of a tool, and the TypeScript declarations of its functions.

    A tool without functions takes plain text, such as code for `python`.
    """

    description: str
    functions: tuple[str, ...] = ()

    def section(self, name: str, description: str) -> str:
        """Return the tool's section of the system message; a `description` replaces the default one."""
        lines = _lines(description) if description else self.description.splitlines()
        return namespace_section(name, lines, self.functions)


def namespace_section(name: str, lines: Iterable[str], functions: Iterable[str]) -> str:
    """Return the section of a namespace; the section belongs below the heading `# Tools`.

    `lines` describe the namespace. The text of each function in `functions` must end with a blank line.
    """
    functions = tuple(functions)
    if not functions:
        return "\n".join((f"## {name}\n", *lines))
    comments = (f"// {line}" for line in lines)
    return "\n".join((f"## {name}\n", *comments, f"namespace {name} {{\n", *functions, f"}} // namespace {name}"))


def builtin_sections(builtins: Iterable[Builtin]) -> list[str]:
    """Return the sections of the offered tools, in openai-harmony's order."""
    return [
        NAMESPACES[builtin.name].section(builtin.name, builtin.description)
        for builtin in sorted(builtins, key=lambda builtin: builtin.name)
    ]


def _lines(description: str) -> list[str]:
    """Split a description into lines, without the leading `#` that would begin a new section."""
    return [line.lstrip("# \t") for line in description[:MAX_DESCRIPTION_LENGTH].splitlines()]


# The texts of `browser` and `python` are those of openai-harmony 0.0.8 (Apache-2.0), on which gpt-oss was trained.
NAMESPACES: Final = {
    "browser": BuiltinNamespace(
        """Tool for browsing.
The `cursor` appears in brackets before each browsing display: `[{cursor}]`.
Cite information from the tool using the following format:
`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.
Do not quote more than 10 words directly from the tool output.
sources=web (default: web)""",
        (
            """// Searches for information related to `query` and displays `topn` results.
type search = (_: {
query: string,
topn?: number, // default: 10
source?: string,
}) => any;
""",
            """// Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, \
showing `num_lines` lines.
// Valid link ids are displayed with the formatting: `【{id}†.*】`.
// If `cursor` is not provided, the most recent page is implied.
// If `id` is a string, it is treated as a fully qualified URL associated with `source`.
// If `loc` is not provided, the viewport will be positioned at the beginning of the document or centered on \
the most relevant passage, if available.
// Use this function without `id` to scroll to a new location of an opened page.
type open = (_: {
id?: number | string, // default: -1
cursor?: number, // default: -1
loc?: number, // default: -1
num_lines?: number, // default: -1
view_source?: boolean, // default: false
source?: string,
}) => any;
""",
            """// Finds exact matches of `pattern` in the current page, or the page given by `cursor`.
type find = (_: {
pattern: string,
cursor?: number, // default: -1
}) => any;
""",
        ),
    ),
    "container": BuiltinNamespace(
        "A container with a command line.",
        (
            """// Runs the command `cmd` in the container and returns what it printed.
type exec = (_: {
cmd: string[],
session_name?: string,
workdir?: string,
timeout?: number,
env?: {
    },
user?: string,
}) => any;
""",
        ),
    ),
    "python": BuiltinNamespace(
        """Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. \
This tool should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. \
when creating plots, tables, or files).

When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook \
environment. python will respond with the output of the execution or time out after 120.0 seconds. The drive at \
'/mnt/data' can be used to save and persist user files. Internet access for this session is UNKNOWN. Depends on the \
cluster."""
    ),
}
