"""Terminal view of a recording: coloured text with chips for special tokens.

Marks show where the gateway repaired the output of the model. Colours identify channels. The caller can remove the
colours. A chip then shows the name of the special token, such as <|end|>. Ordinary text with this spelling is preceded
by a backslash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click

from unisono.cli.terminal import harmless, on_one_line
from unisono.core.events import Repaired
from unisono.core.generation import CALL, CHANNEL, END, FIRST_SPECIAL, MESSAGE, RETURN, START, VOCABULARY
from unisono.core.recovery_rules import RULES
from unisono.engine.journal import JournalEntry, JournalMarker, TokenSource, parts_of, with_repairs
from unisono.harmony.encoding import Encoding
from unisono.observe.recording import prompts_of
from unisono.web.segments import describe_action

# Colours of message bodies, by channel or else by role. Calls have the colour of tools.
COLOURS: Final[Mapping[str, str]] = {
    "analysis": "cyan",
    "commentary": "yellow",
    "final": "green",
    "system": "bright_black",
    "developer": "blue",
    "user": "white",
    "tool": "magenta",
}
ENDS: Final = frozenset({START, END, RETURN, CALL})
# Maximum number of printed characters of a note.
WIDEST: Final = 400


class Painter:
    """Formatter for the tokens of one prompt or one answer, which must be passed in order."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._header: list[int] = []
        self._in_header = True
        self._colour = COLOURS["system"]

    def paint(self, tokens: Iterable[int | None]) -> str:
        """Return the tokens as styled text. A token that the recording omits is None."""
        painted: list[str] = []
        text: list[int] = []
        gap = 0
        for token in tokens:
            if gap and token is not None:
                painted.append(_omission(gap))
                gap = 0
            if token is not None and 0 <= token < FIRST_SPECIAL:
                text.append(token)
                if self._in_header:
                    self._header.append(token)
                continue
            painted.append(self._text(text))
            text = []
            if token is None:
                gap += 1
                continue
            painted.append(self._styled_token(token))
            self._move_to(token)
        return "".join([*painted, self._text(text), _omission(gap) if gap else ""])

    def _move_to(self, token: int) -> None:
        if token == MESSAGE:
            header = self._encoding.decode(self._header)
            self._colour = _colour_of(header)
            self._in_header = False
        elif token in ENDS or (token == CHANNEL and not self._in_header):
            self._header, self._in_header = [], True

    def _text(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        # Text that spells a special token gets a backslash, so that it differs from a real one even without colours.
        text = harmless(self._encoding.decode(tokens)).replace("<|", "\\<|")
        return click.style(text, dim=True) if self._in_header else click.style(text, fg=self._colour)

    def _styled_token(self, token: int) -> str:
        name = self._encoding.decode([token]) if 0 <= token < VOCABULARY else f"<|no token {token}|>"
        break_ = "\n" if token in ENDS - {START} else ""
        return click.style(name, reverse=True, bold=token == START) + break_


def _omission(tokens: int) -> str:
    return click.style(f"[{tokens} tokens omitted]", fg="red")


def _colour_of(header: str) -> str:
    if " to=" in header:
        return COLOURS["tool"]
    # A header ends with its channel, for example `assistant<|channel|>final`.
    named = [name for name in COLOURS if name in header]
    channels = [name for name in named if header.endswith(name)]
    return COLOURS[(channels or named or ["tool"])[0]]


# -- the whole recording


def painted(document: Mapping[str, Any], encoding: Encoding) -> Iterator[str]:
    """Yield the styled view of a recording, one or several lines at a time."""
    yield from _heading(document)
    prompts = prompts_of(document)
    painted_steps = 0
    answer = Painter(encoding)
    for number, output in enumerate(_steps(document, answer)):
        generations = [at for at, step in enumerate(document["steps"]) if step["step"] == number]
        yield _line(f"step {number}")
        for at in generations:
            yield _generation(document["steps"][at])
        if generations:
            prompt = prompts[generations[0]]
            # The beginning that equals the previous prompt is not printed again. The first prompt is printed whole.
            reused = document["steps"][generations[0]]["prompt"]["same"] if painted_steps else 0
            yield click.style(
                f"prompt{f', after {reused} tokens of the previous prompt' if reused else ''}:", bold=True
            )
            yield Painter(encoding).paint(prompt[reused:])
            painted_steps += 1
        yield click.style("output:", bold=True)
        yield output
    for tool in document["tools"]:
        took = tool["ended_s"] - tool["began_s"]
        name = on_one_line(f"{tool['server']}.{tool['name']}")
        yield f"tool {name} at {tool['began_s']:.3f} s, {took:.3f} s: {tool['outcome']}"
    if document["left_out"]:
        yield click.style(
            "omitted because of the size limit: " + ", ".join(map(on_one_line, document["left_out"])), fg="red"
        )


def _heading(document: Mapping[str, Any]) -> Iterator[str]:
    at = datetime.fromtimestamp(document["at"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield click.style(on_one_line(document["id"]), bold=True) + f"  {at}  gateway {on_one_line(document['gateway'])}"
    failed = f" ({on_one_line(document['error'])})" if document["error"] else ""
    first = "" if document["first_s"] is None else f", first after {document['first_s']:.3f} s"
    yield (
        f"{on_one_line(document['model'])} by {on_one_line(document['surface'])}: {document['outcome']}{failed}"
        + (f", {document['finish']}" if document["finish"] else "")
        + f", {document['ended_s']:.3f} s{first}"
    )
    key = f", key {on_one_line(document['key'])}" if document["key"] else ""
    flags = "".join(f", {name}" for name in ("background", "resumed") if document[name])
    yield f"tenant {on_one_line(document['tenant'])}{key}{flags}"
    for wait in document["waits"]:
        ended = f": {on_one_line(wait['failure'])}" if wait["failure"] else ""
        yield f"waited {wait['ended_s'] - wait['began_s']:.3f} s for a slot{ended}"
    if document["tries"]:
        yield "tried " + ", then ".join(
            on_one_line(attempt["deployment"] + (f" ({attempt['failure']})" if attempt["failure"] else ""))
            for attempt in document["tries"]
        )
    if document["unmet"]:
        yield click.style(on_one_line(document["unmet"]), fg="red")
    yield "recoveries: " + (on_one_line(", ".join(document["recoveries"])) or "none")


def _generation(step: Mapping[str, Any]) -> str:
    cached = "" if step["cached_tokens"] is None else f" ({step['cached_tokens']} cached)"
    first = "no token" if step["first_token_s"] is None else f"first at {step['first_token_s']:.3f} s"
    ended = step["failure"] or step["finish"] or "stopped by the gateway"
    counts = f"{step['prompt_tokens']} tokens{cached}, {step['generated']} generated"
    times = f"from {step['began_s']:.3f} s, {first}, to {step['ended_s']:.3f} s"
    return f"{on_one_line(step['deployment'])}: {counts}, {times}: {on_one_line(ended)}"


def _line(title: str) -> str:
    return click.style(f"--- {title} ".ljust(72, "-"), dim=True)


def _steps(document: Mapping[str, Any], painter: Painter) -> Iterator[str]:
    """Yield the output of each step, with repairs at the position where they were decided."""
    repairs = [
        Repaired(str(record["repaired"]), record["position"], record["dropped"])
        for record in document["said"]
        if "repaired" in record
    ]
    pieces: list[str] = []
    for part in with_repairs(parts_of(document["output"]), repairs):
        match part:
            case JournalMarker.STEP_ENDED:
                yield "".join(pieces)
                pieces = []
            case TokenSource():
                pieces.append(
                    _remark(f"tokens derived from text: {part.guessed}; stop token hidden: {part.stop_hidden}")
                )
            case JournalEntry():
                pieces.append(_note(part.value, painter))
            case Repaired():
                pieces.append(_repair(part))
            case tokens:
                assert not isinstance(tokens, JournalMarker)
                pieces.append(painter.paint(tokens))
    yield "".join(pieces)


def _note(value: Mapping[str, Any], painter: Painter) -> str:
    """Describe a recorded action of the gateway, with the tokens that it inserted."""
    remark, inserted = _remark(describe_action(value)), value.get("moved")
    return remark + painter.paint(inserted) if isinstance(inserted, list) else remark


def _remark(text: str) -> str:
    text = on_one_line(text)
    return click.style(f"\n  [{text if len(text) <= WIDEST else text[: WIDEST - 1] + '…'}]\n", dim=True)


def _repair(repair: Repaired) -> str:
    dropped = f" {repair.dropped} characters were dropped." if repair.dropped else ""
    sentence = RULES.get(repair.rule, "Unknown rule in this version of the gateway.")
    return click.style(f"\n  ^ {on_one_line(repair.rule)}: {sentence}{dropped}\n", fg="bright_yellow", bold=True)
