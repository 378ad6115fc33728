"""Rendering of conversations to token ids, equal to openai-harmony, and the message cache."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_harmony import (
    Author,
    DeveloperContent,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
)
from openai_harmony import Conversation as LibraryConversation

from tests.depth import examples
from tests.harmony.library_schema import described
from unisono.core.conversation import (
    AddedTools,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    DeveloperMessage,
    Effort,
    FunctionTool,
    Item,
    Phase,
    Preamble,
    ToolResult,
    UserMessage,
)
from unisono.core.generation import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from unisono.errors import InvalidRequest
from unisono.harmony.encoding import Encoding
from unisono.harmony.library_parser import load_library
from unisono.harmony.render import Renderer
from unisono.harmony.tool_declarations import ToolSet, plan_tools

WEATHER = FunctionTool(
    "get_weather",
    "Weather of a city.\n\nIn words.",
    {"type": "object", "properties": {"city": {"type": "string", "description": "Which"}}, "required": ["city"]},
)
CLOCK = FunctionTool("srv.clock now!", "", {})
NO_TOOLS = plan_tools([])
TOOLS = plan_tools([WEATHER, CLOCK])
CALL_ITEM = AssistantCall("c1", "get_weather", '{"city":  "Köln"}')
RESULT = ToolResult("c1", "get_weather", '{"t": 3}')
DATED = Preamble(instructions="Be brief.", date="2026-11-20")

CONVERSATIONS: dict[str, tuple[Conversation, ToolSet]] = {
    "only the system message": (Conversation(Preamble()), NO_TOOLS),
    "a question": (Conversation(Preamble(), (UserMessage("Hi"),)), NO_TOOLS),
    "a date": (Conversation(Preamble(date="2026-11-20"), (UserMessage("Hi"),)), NO_TOOLS),
    "no identity, no cutoff": (Conversation(Preamble(identity="", knowledge_cutoff="")), NO_TOOLS),
    "low effort": (Conversation(Preamble(effort=Effort.LOW)), NO_TOOLS),
    "high effort": (Conversation(Preamble(effort=Effort.HIGH)), NO_TOOLS),
    "instructions": (Conversation(Preamble(instructions="Be brief."), (UserMessage("Hi"),)), NO_TOOLS),
    "tools": (Conversation(Preamble(), (UserMessage("Hi"),)), TOOLS),
    "instructions and tools": (Conversation(DATED, (UserMessage("Hi"),)), TOOLS),
    "instructions that end in blanks": (Conversation(Preamble(instructions="Be brief.\n \n\n")), TOOLS),
    "instructions that begin with newlines": (Conversation(Preamble(instructions="\n\n Be brief.")), NO_TOOLS),
    "a tool round trip": (
        Conversation(DATED, (UserMessage("Hi"), AssistantReasoning("Look."), CALL_ITEM, RESULT)), TOOLS),
    "two calls": (Conversation(
        DATED, (UserMessage("Hi"), CALL_ITEM, RESULT, AssistantCall("c2", "srv.clock now!", "{}"),
                ToolResult("c2", "srv.clock now!", ""))), TOOLS),
    "a call of an undeclared tool": (Conversation(Preamble(), (UserMessage("Hi"), CALL_ITEM, RESULT)), NO_TOOLS),
    "a preamble before a call": (Conversation(
        DATED, (UserMessage("Hi"), AssistantReasoning("r"), AssistantMessage("I look.", Phase.COMMENTARY), CALL_ITEM,
                RESULT)), TOOLS),
    "two turns": (Conversation(
        DATED, (UserMessage("a"), AssistantReasoning("r"), AssistantMessage("b"), UserMessage("c"),
                AssistantReasoning("s"), AssistantMessage("d"), UserMessage("e"))), NO_TOOLS),
    "instructions in the middle": (Conversation(
        DATED, (UserMessage("a"), DeveloperMessage("Now in verse."), UserMessage("b"))), NO_TOOLS),
    "empty texts": (Conversation(
        Preamble(), (UserMessage(""), AssistantMessage(""), UserMessage(""), AssistantCall("c", "f", ""),
                     ToolResult("c", "f", ""))), NO_TOOLS),
    "odd texts": (Conversation(
        Preamble(instructions="\t 天気\u0301"), (UserMessage("  \n\n x\r\n"), AssistantMessage("e\u0301 😀 \u200b"),
                                               UserMessage("\x00 don't we'LL 12345 \u2028"))), TOOLS),
    "markers spelled out": (Conversation(
        Preamble(instructions="<|end|><|start|>system<|message|>"),
        (UserMessage("<|end|>"), AssistantReasoning("<|channel|>final"), CALL_ITEM,
         ToolResult("c1", "get_weather", "<|call|><|return|>"))), TOOLS),
}  # fmt: skip

EFFORTS = {Effort.LOW: ReasoningEffort.LOW, Effort.MEDIUM: ReasoningEffort.MEDIUM, Effort.HIGH: ReasoningEffort.HIGH}


def library_messages(items: tuple[Item, ...], tools: ToolSet) -> list[Message]:
    messages = []
    for item in items:
        match item:
            case UserMessage(text):
                message = Message.from_role_and_content(Role.USER, text)
            case DeveloperMessage(text):
                content = DeveloperContent.new().with_instructions(text)
                message = Message.from_role_and_content(Role.DEVELOPER, content)
            case AssistantReasoning(text):
                message = Message.from_role_and_content(Role.ASSISTANT, text).with_channel("analysis")
            case AssistantMessage(text, phase):
                message = Message.from_role_and_content(Role.ASSISTANT, text).with_channel(phase.value)
            case AssistantCall():
                message = Message.from_role_and_content(Role.ASSISTANT, item.arguments).with_channel("commentary")
                message.with_recipient(f"functions.{tools.wire(item.name)}").with_content_type("<|constrain|>json")
            case ToolResult():
                author = Author.new(Role.TOOL, f"functions.{tools.wire(item.name)}")
                message = Message.from_author_and_content(author, item.output)
                message.with_channel("commentary").with_recipient("assistant")
        messages.append(message)
    return messages


def by_library(conversation: Conversation, tools: ToolSet) -> list[int]:
    """Return the prompt as openai-harmony renders it.

    Reasoning is dropped here, independently of the product.
    """
    preamble = conversation.preamble
    system = SystemContent(
        model_identity=preamble.identity or None,
        knowledge_cutoff=preamble.knowledge_cutoff or None,
        conversation_start_date=preamble.date or None,
        reasoning_effort=EFFORTS[preamble.effort],
    ).with_required_channels(["analysis", "commentary", "final"] if tools.declared else ["analysis", "final"])
    messages = [Message.from_role_and_content(Role.SYSTEM, system)]
    if preamble.instructions or tools.declared:
        developer = DeveloperContent(instructions=preamble.instructions or None)
        if tools.declared:
            developer.with_function_tools(described(tools))
        messages.append(Message.from_role_and_content(Role.DEVELOPER, developer))
    finals = [n for n, i in enumerate(conversation.items) if isinstance(i, AssistantMessage) and i.phase == "final"]
    kept = tuple(
        item
        for number, item in enumerate(conversation.items)
        if not (isinstance(item, AssistantReasoning) and finals and number < finals[-1])
    )
    messages += library_messages(kept, tools)
    ids: list[int] = load_library().render_conversation_for_completion(
        LibraryConversation.from_messages(messages), Role.ASSISTANT, RenderConversationConfig(auto_drop_analysis=False)
    )
    return ids


@pytest.fixture(scope="module")
def renderer(encoding: Encoding) -> Renderer:
    return Renderer(encoding)


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_token_ids_equal_those_of_the_library(encoding: Encoding, renderer: Renderer, case: str) -> None:
    conversation, tools = CONVERSATIONS[case]
    expected = by_library(conversation, tools)
    assert renderer.prompt(conversation, tools) == expected
    assert renderer.prompt(conversation, tools) == expected
    assert Renderer(encoding, cache_tokens=0).prompt(conversation, tools) == expected


MARKERS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
           "<|endoftext|>", "<|", "|>", "<", "assistant", "to=functions.f", "\n\n", "# Tools", " "]  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=20),
    st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=3)), max_size=5).map("".join),
)
TOOL_NAMES = st.sampled_from(["get_weather", "srv.clock now!", "gone", "odd name"])
ITEMS = st.one_of(
    TEXTS.map(UserMessage),
    TEXTS.map(DeveloperMessage),
    TEXTS.map(AssistantReasoning),
    st.builds(AssistantMessage, TEXTS, st.sampled_from(Phase)),
    st.builds(AssistantCall, st.just("c"), TOOL_NAMES, TEXTS),
    st.builds(ToolResult, st.just("c"), TOOL_NAMES, TEXTS),
)
GENERATED = st.builds(
    Conversation,
    st.builds(Preamble, instructions=TEXTS, effort=st.sampled_from(Effort), date=st.sampled_from(["", "2026-11-20"])),
    st.lists(ITEMS, max_size=8).map(tuple),
)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(conversation=GENERATED, tools=st.sampled_from([NO_TOOLS, TOOLS]))
def test_any_conversation_has_the_token_ids_of_the_library(
    encoding: Encoding, renderer: Renderer, conversation: Conversation, tools: ToolSet
) -> None:
    assert renderer.prompt(conversation, tools) == by_library(conversation, tools)


def test_system_and_developer_messages_declare_tools(encoding: Encoding, renderer: Renderer) -> None:
    without_tools = encoding.decode(renderer.prompt(Conversation(Preamble()), NO_TOOLS))
    assert "# Valid channels: analysis, final. Channel must be included for every message.<|end|>" in without_tools
    assert "developer" not in without_tools
    with_tools = encoding.decode(renderer.prompt(Conversation(Preamble()), TOOLS))
    assert "# Valid channels: analysis, commentary, final. Channel must be included for every message.\n" in with_tools
    assert "Calls to these tools must go to the commentary channel: 'functions'.<|end|>" in with_tools
    assert with_tools.count("# Tools") == 1
    assert "# Instructions" not in with_tools


ANALYSIS: dict[str, tuple[tuple[Item, ...], str]] = {
    "kept before any final message": ((AssistantReasoning("A"), CALL_ITEM, RESULT, AssistantReasoning("B")), "AB"),
    "dropped before the last final message": (
        (AssistantReasoning("A"), AssistantMessage("x"), AssistantReasoning("B"), AssistantMessage("y")), ""),
    "kept after the last final message": (
        (AssistantReasoning("A"), AssistantMessage("x"), UserMessage("u"), AssistantReasoning("B"), CALL_ITEM, RESULT,
         AssistantReasoning("C")), "BC"),
    "a preamble is not a final message": (
        (AssistantReasoning("A"), AssistantMessage("x", Phase.COMMENTARY), CALL_ITEM, RESULT), "A"),
    "a preamble after a final message": (
        (AssistantReasoning("A"), AssistantMessage("x"), AssistantReasoning("B"),
         AssistantMessage("y", Phase.COMMENTARY)), "B"),
}  # fmt: skip


@pytest.mark.parametrize("case", ANALYSIS)
@pytest.mark.parametrize("prefill", [None, "So"])
def test_reasoning_is_kept_only_until_its_turn_is_answered(
    encoding: Encoding, renderer: Renderer, case: str, prefill: str | None
) -> None:
    items, kept = ANALYSIS[case]
    text = encoding.decode(renderer.prompt(Conversation(Preamble(), items, prefill), TOOLS))
    assert [letter for letter in "ABC" if f"analysis<|message|>{letter}<|end|>" in text] == list(kept)
    assert text.count("<|call|>") == items.count(CALL_ITEM)


def test_a_prefill_leaves_the_final_message_open(encoding: Encoding, renderer: Renderer) -> None:
    conversation = Conversation(Preamble(), (UserMessage("Hi"),), "It is <|end|>")
    plain = renderer.prompt(Conversation(Preamble(), (UserMessage("Hi"),)), NO_TOOLS)
    ids = renderer.prompt(conversation, NO_TOOLS)
    assert ids[: len(plain)] == plain
    assert ids[len(plain) :] == [
        CHANNEL,
        *encoding.encode_text("final"),
        MESSAGE,
        *encoding.encode_text("It is <|end|>"),
    ]
    assert renderer.prompt(Conversation(Preamble(), (), ""), NO_TOOLS)[-1] == MESSAGE


def tokens_of(encoding: Encoding, text: str) -> tuple[int, ...]:
    return tuple(encoding.encode_marked(text))


GENERATED_CALLS: dict[str, tuple[str, str]] = {
    "a call with the recipient after the channel": (
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ }<|call|>",
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ }<|call|>"),
    "a call terminated by end": ("<|start|>assistant to=functions.f<|channel|>analysis<|message|>{}<|end|>",
                                    "<|start|>assistant to=functions.f<|channel|>analysis<|message|>{}<|call|>"),
    "a call without a start": ("assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>",
                                 "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>"
                                 "{}<|call|>"),
}  # fmt: skip


@pytest.mark.parametrize("case", GENERATED_CALLS)
def test_a_generated_call_keeps_its_tokens(encoding: Encoding, renderer: Renderer, case: str) -> None:
    generated, expected = GENERATED_CALLS[case]
    item = AssistantCall("c", "f", "{}", tokens_of(encoding, generated))
    assert renderer.item(item, TOOLS) == tokens_of(encoding, expected)
    assert tokens_of(encoding, expected + "<|start|>assistant") == tuple(
        renderer.prompt(Conversation(Preamble(), (item,)), TOOLS)[-len(tokens_of(encoding, expected)) - 2 :]
    )


FINAL = "<|start|>assistant<|channel|>final<|message|>"
GENERATED_ANSWERS = {
    "terminated by return": (FINAL + "x <|return|>", FINAL + "x <|end|>"),
    "terminated by end": (FINAL + "x <|end|>", FINAL + "x <|end|>"),
    "not terminated": (FINAL + "x ", FINAL + "said<|end|>"),
    "without a start": ("<|channel|>final<|message|>x<|return|>", FINAL + "said<|end|>"),
    "terminated by call": (FINAL + "x<|call|>", FINAL + "said<|end|>"),
}


@pytest.mark.parametrize("case", GENERATED_ANSWERS)
def test_a_generated_answer_ends_with_an_end_token(encoding: Encoding, renderer: Renderer, case: str) -> None:
    generated, expected = GENERATED_ANSWERS[case]
    item = AssistantMessage("said", Phase.FINAL, tokens_of(encoding, generated))
    assert renderer.item(item, NO_TOOLS) == tokens_of(encoding, expected)


def test_a_continued_prompt_extends_the_previous_token_ids(encoding: Encoding, renderer: Renderer) -> None:
    first = Conversation(DATED, (UserMessage("Hi"),))
    sent = renderer.prompt(first, TOOLS)
    thought = tokens_of(encoding, "<|start|>assistant<|channel|>analysis<|message|>Hm<|end|>")
    call = tokens_of(
        encoding,
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city":"K"}<|call|>',
    )
    items = (AssistantReasoning("Hm", thought), AssistantCall("c1", "get_weather", '{"city":"K"}', call), RESULT)
    continued = renderer.prompt(Conversation(DATED, (*first.items, *items)), TOOLS)
    assert continued[: len(sent) + len(thought) + len(call) - 2] == [*sent[:-2], *thought, *call]


def test_a_call_has_the_canonical_header(encoding: Encoding, renderer: Renderer) -> None:
    assistant, json = encoding.encode_text("assistant"), encoding.encode_text("json")
    assert renderer.item(CALL_ITEM, TOOLS) == (
        *(START, *assistant, *encoding.encode_text(" to=functions.get_weather")),
        *(CHANNEL, *encoding.encode_text("commentary"), *encoding.encode_text(" "), CONSTRAIN, *json),
        *(MESSAGE, *encoding.encode_text(CALL_ITEM.arguments), CALL),
    )


def test_rendered_history_has_no_return_token(renderer: Renderer) -> None:
    for conversation, tools in CONVERSATIONS.values():
        assert RETURN not in renderer.prompt(conversation, tools)


def test_lone_surrogates_become_replacement_characters(encoding: Encoding, renderer: Renderer) -> None:
    ids = renderer.prompt(Conversation(Preamble(instructions="\ud800"), (UserMessage("a\udfffb"),), "\ud8ff"), NO_TOOLS)
    assert encoding.decode(ids).count("\ufffd") == 3


def test_text_that_cannot_be_tokenised_is_rejected(renderer: Renderer) -> None:
    endless = " " * 2_000_000
    for conversation in (
        Conversation(Preamble(), (UserMessage(endless),)),
        Conversation(Preamble(instructions=endless)),
        Conversation(Preamble(), (), endless),
    ):
        with pytest.raises(InvalidRequest):
            renderer.prompt(conversation, NO_TOOLS)
        with pytest.raises(InvalidRequest):
            renderer.text_prompt(conversation, NO_TOOLS)


def conversation_items(turns: int, words: int) -> tuple[Item, ...]:
    items: list[Item] = []
    for turn in range(turns):
        text = " ".join(f"word{(turn * 7919 + n * 31) % 9973}" for n in range(words))
        items += [UserMessage(text), AssistantMessage(text[::-1])]
    return tuple(items)


def test_cold_chars_counts_only_new_text(encoding: Encoding) -> None:
    renderer = Renderer(encoding)
    items = conversation_items(5, 40)
    conversation = Conversation(DATED, items)
    whole = sum(len(item.text) for item in items if isinstance(item, UserMessage | AssistantMessage))
    assert renderer.plan(conversation, TOOLS).cold_chars > whole + TOOLS.characters
    renderer.prompt(conversation, TOOLS)
    assert renderer.plan(conversation, TOOLS).cold_chars == 0
    grown = Conversation(DATED, (*items, UserMessage("x" * 50)), "y" * 7)
    assert renderer.plan(grown, TOOLS).cold_chars == 57
    other_effort = Conversation(Preamble(instructions="Be brief.", date="2026-11-20", effort=Effort.LOW), items)
    assert 0 < renderer.plan(other_effort, TOOLS).cold_chars < 600
    generated = Conversation(DATED, (AssistantMessage("z", Phase.FINAL, (START, MESSAGE, END)),))
    assert renderer.plan(generated, TOOLS).cold_chars == 0


def test_the_message_cache_is_bounded_and_evicts_the_oldest(encoding: Encoding) -> None:
    renderer = Renderer(encoding, cache_tokens=2_000)
    first, last = (UserMessage("first"),), (UserMessage("last"),)
    renderer.prompt(Conversation(Preamble(), first), NO_TOOLS)
    renderer.prompt(Conversation(Preamble(), conversation_items(40, 30)), NO_TOOLS)
    renderer.prompt(Conversation(Preamble(), last), NO_TOOLS)
    assert renderer.cached_tokens <= 2_000
    assert renderer.plan(Conversation(Preamble(), last), NO_TOOLS).cold_chars == 0
    assert renderer.plan(Conversation(Preamble(), first), NO_TOOLS).cold_chars == len("first")


def test_messages_of_different_kinds_or_tools_differ(encoding: Encoding, renderer: Renderer) -> None:
    text = "same"
    items: list[Item] = [
        *(UserMessage(text), DeveloperMessage(text), AssistantReasoning(text), AssistantMessage(text)),
        *(AssistantMessage(text, Phase.COMMENTARY), AssistantCall("c", "f", text), AssistantCall("c", "ff", text)),
        *(ToolResult("c", "f", text), ToolResult("c", "ff", text), UserMessage("# Instructions\n\nsame")),
    ]
    assert len({renderer.item(item, TOOLS) for item in items}) == len(items)


def test_threads_that_share_a_renderer_get_correct_token_ids(encoding: Encoding) -> None:
    small = Renderer(encoding, cache_tokens=500)
    table = list(CONVERSATIONS.values())
    expected = [Renderer(encoding, cache_tokens=0).prompt(*case) for case in table]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert list(threads.map(lambda case: small.prompt(*case), table)) == expected


def test_the_next_turn_of_a_long_conversation_encodes_only_new_text(encoding: Encoding) -> None:
    items = conversation_items(40, 400)
    renderer = Renderer(encoding)
    conversation = Conversation(DATED, items)
    cold = renderer.plan(conversation, TOOLS).cold_chars
    prompt = renderer.prompt(conversation, TOOLS)
    assert len(prompt) > 50_000
    assert cold > 4 * 50_000
    assert renderer.plan(conversation, TOOLS).cold_chars == 0
    grown = Conversation(DATED, (*items, UserMessage("And then?")))
    assert renderer.plan(grown, TOOLS).cold_chars == len("And then?")


ASKED = UserMessage("What time is it?")
SEARCHED = (AssistantCall("c1", "tool_search", "{}"), ToolResult("c1", "tool_search", "Found: get_weather"))
FINDING = Preamble(tools=(FunctionTool("tool_search"),), date="2026-11-20")


def prompt_of(renderer: Renderer, conversation: Conversation) -> list[int]:
    return renderer.prompt(conversation, plan_tools(conversation.tools))


def test_added_tools_extend_the_prompt_before_them(renderer: Renderer, encoding: Encoding) -> None:
    before = Conversation(FINDING, (ASKED, *SEARCHED))
    after = Conversation(FINDING, (*before.items, AddedTools((WEATHER,)), UserMessage("Go on.")))
    # The end is the beginning of the answer.
    first, later = prompt_of(renderer, before)[:-2], prompt_of(renderer, after)
    assert later[: len(first)] == first
    added = encoding.decode(later[len(first) :])
    assert "get_weather" not in encoding.decode(first).replace("Found: get_weather", "")
    assert added.startswith("<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {")
    assert "type get_weather = (_: {" in added


def test_tools_are_declared_once(renderer: Renderer, encoding: Encoding) -> None:
    again = (AddedTools((WEATHER,)), UserMessage("Go on."), AddedTools((WEATHER, CLOCK)), AddedTools((CLOCK,)))
    text = encoding.decode(prompt_of(renderer, Conversation(FINDING, (ASKED, *again))))
    assert text.count("type get_weather =") == 1
    assert text.count("# Tools") == 3


def test_a_new_definition_of_a_tool_extends_the_prompt_before_it(renderer: Renderer, encoding: Encoding) -> None:
    newer = replace(WEATHER, description="Returns the weather in Celsius.")
    newest = replace(newer, parameters={"type": "object", "properties": {"place": {"type": "string"}}})
    preamble = replace(FINDING, tools=(*FINDING.tools, WEATHER))
    items: tuple[Item, ...] = (ASKED,)
    prompts = [prompt_of(renderer, Conversation(preamble, items))]
    # An equal definition is not repeated.
    for tools in ((CLOCK, newer), (newer,), (newest, CLOCK), (WEATHER,)):
        items += (AddedTools(tools), UserMessage("Go on."))
        prompts.append(prompt_of(renderer, Conversation(preamble, items)))
    for before, after in pairwise(prompts):
        assert after[: len(before) - 2] == before[:-2]
    added = [encoding.decode(after[len(before) - 2 :]) for before, after in pairwise(prompts)]
    assert ["type get_weather" in text for text in added] == [True, False, True, True]
    assert newer.description in added[0]
    assert "place" in added[2]
    assert "Weather of a city." in added[3]
    assert [text.count("type srv_clock") for text in added] == [1, 0, 0, 0]


def test_the_text_prompt_of_added_tools_has_the_same_tokens(renderer: Renderer, encoding: Encoding) -> None:
    conversation = Conversation(FINDING, (ASKED, AddedTools((WEATHER, CLOCK))))
    tools = plan_tools(conversation.tools)
    assert encoding.encode_marked(renderer.text_prompt(conversation, tools)) == renderer.prompt(conversation, tools)
    assert renderer.plan(conversation, tools).cold_chars == 0
    assert Renderer(encoding).plan(conversation, tools).cold_chars > len(WEATHER.description)


def test_the_last_definition_of_a_tool_counts() -> None:
    newer = FunctionTool("get_weather", "Newer.")
    conversation = Conversation(Preamble(tools=(WEATHER,)), (AddedTools((CLOCK,)), AddedTools((newer,))))
    assert conversation.tools == (newer, CLOCK)


OCCUPIED = """
import tracemalloc
from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tool_declarations import NO_TOOLS
tracemalloc.start()
renderer = Renderer(load_encoding())
renderer.prompt(Conversation(Preamble(), (UserMessage("Tell me a story."),)), NO_TOOLS)
print(tracemalloc.get_traced_memory()[0])
"""


def test_encoding_and_renderer_occupy_python_memory_only_for_tokens_in_use() -> None:
    # Tables of the whole vocabulary occupied 10 MB in every idle gateway. tiktoken's own memory is not traced.
    completed = subprocess.run([sys.executable, "-c", OCCUPIED], capture_output=True, text=True, check=True, timeout=60)
    assert int(completed.stdout) < 512 * 1024
