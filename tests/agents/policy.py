"""Scripted model: a table of rules that decide from the prompt alone.

A task is a sentence that the user writes. The rules of a task are tried in order, and the first one that applies is the
output. A rule names an ability; `WAYS` has the calls by which an agent offers it, and the declared tools decide which
of them is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.agents.prompt_view import PromptView

NEXT = "<|start|>assistant"
SENTENCES = {
    "edit": "Fix add() in calc.py so that `python3 check.py` succeeds.",
    "recall": "Which file did you fix?",
    "image": "Describe the picture red.png.",
    "number": "Look up number 137 with its tool.",
    "parallel": "Read left.txt and right.txt.",
    "sum": "Add the values of part1.txt to part8.txt.",
    "poem": "Write a long poem to poem.txt.",
    "count": "Count to a thousand.",
}
SUMMARY = re.compile(
    r"CONTEXT CHECKPOINT|Sum up our conversation|Respond with TEXT ONLY|Here is the conversation so far"
)
# Text in the place of a picture, by the gateway or by an agent that knows that the model reads text only.
NO_IMAGE = re.compile(r"\[Image removed here|does not support image input")
VALUE = re.compile(r"VALUE (\d) = (\d+)")
PARTS = 8


@dataclass(frozen=True)
class Output:
    """Output of the model; `delay_s` is the time before each token."""

    text: str
    delay_s: float = 0.0


@dataclass(frozen=True)
class Way:
    """Call that offers an ability: a pattern of the tool's name, required parameters, and the body of the call."""

    ability: str
    tool: str
    parameters: frozenset[str]
    body: Callable[..., str]


def _json(**names: str) -> Callable[..., str]:
    """Return a function that writes the given values as arguments, under the names of the tool."""
    return lambda **values: json.dumps({names[key]: value for key, value in values.items() if key in names})


def _patch(path: str, old: str, new: str) -> str:
    return f"*** Begin Patch\n*** Update File: {path}\n@@\n-{old}\n+{new}\n*** End Patch"


def _way(ability: str, tool: str, parameters: str, body: Callable[..., str]) -> Way:
    return Way(ability, tool, frozenset(parameters.split()), body)


def _of_shell(tool: str, parameter: str, wrapped: Callable[[str], str] = str) -> tuple[Way, ...]:
    """Ways of a tool that runs shell commands; `wrapped` is the text by which the tool runs a command."""

    def way(ability: str, command: Callable[..., str]) -> Way:
        return _way(ability, tool, parameter, lambda **values: json.dumps({parameter: wrapped(command(**values))}))

    return (
        way("read", lambda path: f"cat {path}"),
        way("edit", lambda **values: f"apply_patch <<'EOF'\n{_patch(**values)}\nEOF"),
        way("write", lambda path, content: f"cat > {path} <<'EOF'\n{content}EOF"),
        way("run", lambda command: command),
    )


def _of_script(ability: str, code: Callable[..., str]) -> Way:
    """Return a way of Codex's `exec`, which runs JavaScript that calls the other tools."""
    return _way(ability, "exec", "input", code)


def _number_code(number: int) -> str:
    return f"const t = ALL_TOOLS.find(t => t.name.includes('number_{number}')); text(await tools[t.name]({{}}));"


def _find(number: int) -> str:
    return json.dumps({"query": f"number_{number}"})


# The first way whose tool is declared is used, so an own tool for an ability precedes the shell.
WAYS = (
    _way("read", "Read", "file_path", _json(path="file_path")),
    _way("read", "read", "filePath", _json(path="filePath")),
    _way("edit", "Edit", "old_string new_string", _json(path="file_path", old="old_string", new="new_string")),
    _way("edit", "edit", "oldString newString", _json(path="filePath", old="oldString", new="newString")),
    _way("edit", "apply_patch", "input", _patch),
    _of_script("edit", lambda **values: f"text(await tools.apply_patch({json.dumps(_patch(**values))}));"),
    _way("write", "Write", "file_path content", _json(path="file_path", content="content")),
    _way("write", "write", "filePath content", _json(path="filePath", content="content")),
    _way("view", "view_image", "path", _json(path="path")),
    _way("view", "Read", "file_path", _json(path="file_path")),
    _way("view", "read", "filePath", _json(path="filePath")),
    _of_script("view", lambda path: f"image((await tools.view_image({{path: {json.dumps(path)}}})).image_url);"),
    _way("number", ".*number_137", "", lambda number: "{}"),
    _way("number", "ToolSearch", "query max_results", _find),
    _way("number", "tool_search", "query limit", _find),
    _of_script("number", _number_code),
    *_of_shell("exec_command", "cmd"),
    *_of_shell("[Bb]ash|shell|shell_command", "command"),
    *_of_shell("exec", "input", lambda cmd: f"text((await tools.exec_command({{cmd: {json.dumps(cmd)}}})).output);"),
)


def call(view: PromptView, ability: str, **values: object) -> str:
    """Return a call for an ability, by the first way whose tool is declared."""
    for way in WAYS:
        if way.ability != ability:
            continue
        for name, parameters in view.tools.items():
            if re.fullmatch(way.tool, name) and way.parameters <= parameters:
                header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                return f"{header}{way.body(**values)}<|call|>"
    raise LookupError(f"no declared tool can {ability}: {', '.join(view.tools)}")


def final(text: str) -> Output:
    thought = "<|channel|>analysis<|message|>I know the answer.<|end|>"
    return Output(f"{thought}{NEXT}<|channel|>final<|message|>{text}<|return|>")


@dataclass(frozen=True)
class Rule:
    task: str
    applies: Callable[[PromptView], bool]
    output: Callable[[PromptView], Output]


def _calls(ability: str, **values: object) -> Callable[[PromptView], Output]:
    """Return a function that calls a tool; a path is in the working directory of the agent."""

    def output(view: PromptView) -> Output:
        paths = {"path": f"{view.folder}/{values['path']}"} if "path" in values else {}
        thought = f"<|channel|>analysis<|message|>I need to {ability}.<|end|>"
        return Output(f"{thought}{NEXT}{call(view, ability, **{**values, **paths})}")

    return output


def _says(text: str) -> Callable[[PromptView], Output]:
    return lambda view: final(text)


def _result(text: str) -> Callable[[PromptView], bool]:
    return lambda view: view.has_result(text)


def _always(view: PromptView) -> bool:
    return True


def _is_edited(view: PromptView) -> bool:
    """Whether the last call wrote the new line, and its result is not an error."""
    return "a + b" in view.last_call and not re.search("error|fail|not found", view.last_result, re.I)


def _both(view: PromptView) -> Output:
    paths = [f"{view.folder}/{name}.txt" for name in ("left", "right") if not view.has_result(name.upper())]
    return Output(NEXT.join(call(view, "read", path=path) for path in paths))


def values_in(view: PromptView) -> dict[str, str]:
    """Values of the parts that the prompt contains, in results or in a summary."""
    return dict(VALUE.findall(view.conversation))


def _next_part(view: PromptView) -> Output:
    missing = next(part for part in range(1, PARTS + 1) if str(part) not in values_in(view))
    return _calls("read", path=f"part{missing}.txt")(view)


def _poem(view: PromptView) -> Output:
    lines = 3 if "token limit hit" in view.conversation else 500
    return Output(call(view, "write", path=f"{view.folder}/poem.txt", content="A line of the poem.\n" * lines))


RULES = (
    Rule("recall", lambda view: "calc.py is fixed" in view.conversation, _says("I fixed calc.py.")),
    Rule("recall", _always, _says("I do not know.")),
    Rule("edit", _result("CHECK PASSED"), _says("calc.py is fixed.")),
    Rule("edit", _is_edited, _calls("run", command="python3 check.py")),
    Rule(
        "edit", _result("return a - b"), _calls("edit", path="calc.py", old="    return a - b", new="    return a + b")
    ),
    Rule("edit", _always, _calls("read", path="calc.py")),
    Rule("image", lambda view: bool(NO_IMAGE.search(view.conversation)), _says("I cannot see red.png.")),
    Rule("image", _always, _calls("view", path="red.png")),
    Rule("number", _result("number 137 is 18769"), _says("Number 137 is 18769.")),
    Rule("number", _always, _calls("number", number=137)),
    Rule("parallel", lambda view: view.has_result("LEFT") and view.has_result("RIGHT"), _says("LEFT and RIGHT.")),
    Rule("parallel", _always, _both),
    Rule(
        "sum",
        lambda view: len(values_in(view)) == PARTS,
        lambda view: final(f"The sum is {sum(map(int, values_in(view).values()))}."),
    ),
    Rule("sum", _always, _next_part),
    Rule("poem", lambda view: "A line" in view.last_call, _says("The poem is in poem.txt.")),
    Rule("poem", _always, _poem),
    Rule("count", _always, lambda view: replace(final(" ".join(map(str, range(1, 1001)))), delay_s=0.05)),
)


def task_of(view: PromptView) -> str:
    """Return the last task that the user gave, or an empty string."""
    for message in reversed(view.messages):
        if message.author in {"user", "assistant"}:
            found = [(message.text.rindex(text), task) for task, text in SENTENCES.items() if text in message.text]
            if found:
                return max(found)[1]
    return ""


def _summary(view: PromptView) -> Output:
    values = "\n".join(f"VALUE {part} = {value}" for part, value in values_in(view).items())
    sentence = SENTENCES.get(task_of(view), "")
    return final(f"<summary>\nThe user's request: {sentence}\nKnown so far:\n{values}\n</summary>")


def answer(prompt: str) -> Output:
    """Return the output for a prompt."""
    before, start, opened = prompt.rpartition(NEXT)
    _, message, text = opened.partition("<|message|>")
    if message:
        # The gateway stopped the model after the header of a message, and requires the form of its text.
        body = _answer(before + start).text.rpartition("<|message|>")[2]
        return Output(body.removeprefix(text))
    return _answer(prompt)


def _answer(prompt: str) -> Output:
    view = PromptView(prompt)
    if SUMMARY.search(view.last_user_text):
        return _summary(view)
    # Requests without tools ask for a title or a label.
    if not view.tools:
        return final("A title")
    task = task_of(view)
    return next((rule.output(view) for rule in RULES if rule.task == task and rule.applies(view)), final("No task."))
