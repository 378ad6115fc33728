"""Conversion of HTML to page text: headings, lists, links, image names and plain words.

The parser of the standard library takes quadratic time on hostile pages. This scanner finds tags in one pass: every
search either advances or, if it fails, is not repeated. No input raises an exception.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urljoin, urlsplit

from unisono.toolservers.browser.text import cleaned, link, one_line

MAX_LINKS: Final = 2000
MAX_LINK_LENGTH: Final = 2000
MAX_TAG_LENGTH: Final = 8192
MAX_DEPTH: Final = 8

_NAME = re.compile(r"/?([a-zA-Z][a-zA-Z0-9:-]{0,30})")
_ATTRIBUTE = re.compile(r"([^\s\"'>/=]+)(?:\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+)))?")
_SPACE = re.compile(r"\s+")

# Elements whose content is not displayed text.
UNREAD: Final = frozenset({"script", "style", "noscript", "template", "iframe", "noembed", "object", "svg", "math"})
# Elements that end only at their own end tag, regardless of their contents.
VERBATIM: Final = UNREAD | {"title", "textarea"}
_GAPS_NAMES = """
    p div section article header footer main nav aside address figure figcaption form fieldset table ul ol dl
    blockquote pre details summary h1 h2 h3 h4 h5 h6
"""
# Elements with an empty line before and after them.
GAPS: Final = frozenset(_GAPS_NAMES.split())
# Elements that begin a new line.
BREAKS: Final = frozenset({"br", "tr", "dt", "dd", "option", "caption"})
SCRIPTS: Final = {"sup": ("^{", "}"), "sub": ("_{", "}")}


@dataclass(frozen=True, slots=True)
class Tag:
    """Start or end tag.

    `attributes` is the unparsed text between the name and the end of the tag. `content` is the text inside an element
    whose content contains no tags, such as `<title>`; otherwise it is empty.
    """

    name: str
    closing: bool
    attributes: str
    content: str = ""

    def get(self, name: str) -> str | None:
        """Return the first attribute with this name, with resolved character references, or None."""
        for found in _ATTRIBUTE.finditer(self.attributes[:MAX_TAG_LENGTH]):
            if found[1].lower() == name:
                return unescaped(found[2] or found[3] or found[4] or "")
        return None


@dataclass(frozen=True, slots=True)
class HtmlText:
    """Converted document. A link has the same number in `text` as its index in `links`.

    `links` are absolute URLs.
    """

    title: str
    text: str
    links: tuple[str, ...]


def unescaped(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:
        return text  # a character reference with more digits than `int` accepts


def domain_of(url: str) -> str:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""


class Scanner:
    """Iterator over text and tags of `source`, in order."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._missing_end_tags: set[str] = set()

    def __iter__(self) -> Iterator[str | Tag]:
        at, source = 0, self._source
        while at < len(source):
            start = source.find("<", at)
            if start < 0:
                yield source[at:]
                return
            if start > at:
                yield source[at:start]
            name = _NAME.match(source, start + 1)
            if name is not None:
                tag, at = self._tag(start, name)
                yield tag
            elif source.startswith("<!--", start):
                at = self._after("-->", start + 4, len(source))
            elif source[start + 1 : start + 2] in {"!", "?", "/"}:
                at = self._after(">", start + 1, len(source))
            else:
                yield "<"
                at = start + 1

    def _find(self, what: str, start: int) -> int:
        """Search as `str.find` does, but remember absent strings and do not search for them again."""
        if what in self._missing_end_tags:
            return -1
        found = self._source.find(what, start)
        if found < 0:
            self._missing_end_tags.add(what)
        return found

    def _after(self, what: str, start: int, otherwise: int) -> int:
        found = self._find(what, start)
        return otherwise if found < 0 else found + len(what)

    def _tag(self, start: int, name: re.Match[str]) -> tuple[str | Tag, int]:
        closing, called = self._source[start + 1] == "/", name[1].lower()
        end = self._end_of_tag(name.end())
        if end < 0:
            return self._source[start : name.end()], name.end()
        tag = Tag(called, closing, self._source[name.end() : end])
        foreign = called in {"svg", "math"} and tag.attributes.endswith("/")
        if closing or called not in VERBATIM or foreign:
            return tag, end + 1
        end_tag = re.compile(f"</{called}(?![a-z0-9])", re.IGNORECASE).search(self._source, end + 1)
        until = end_tag.start() if end_tag else len(self._source)
        return Tag(called, False, tag.attributes, self._source[end + 1 : until]), self._after(">", until, until)

    def _end_of_tag(self, start: int) -> int:
        """Return the index of the `>` that ends the tag, or -1.

        A `>` inside a quoted value does not end it.
        """
        end = self._find(">", start)
        quote = self._source.rfind('="', start, end) if end > 0 else -1
        if quote >= 0 and '"' not in self._source[quote + 2 : end]:
            closed = self._find('"', end)
            further = self._find(">", closed) if 0 <= closed <= start + MAX_TAG_LENGTH else -1
            return further if further >= 0 else end
        return end


class Writer:
    """Line builder for words, breaks and gaps. White space collapses as in a browser."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.verbatim = 0
        self.quoted = 0
        # Open lists: 0 for bullets, otherwise the next number.
        self.lists: list[int] = []
        self._line: list[str] = []
        self._open = ""

    def add_text(self, text: str) -> None:
        if self.verbatim:
            first, *others = text.split("\n")
            self._line.append(first)
            for line in others:
                self.end_line(keep_empty=True)
                self._line.append(line)
            return
        flat = _SPACE.sub(" ", text)
        if not self._line or self._line[-1].endswith(" "):
            flat = flat.lstrip(" ")
        if flat:
            self._line.append(flat)

    def set_line_prefix(self, mark: str) -> None:
        """Set the text that precedes the next line, such as a bullet."""
        self._open = mark

    def end_line(self, *, keep_empty: bool = False) -> None:
        line = "".join(self._line)
        line = line.rstrip() if self.verbatim else line.strip()
        self._line = []
        if line or keep_empty:
            indent = "> " * self.quoted + ("    " if self.verbatim and line else "")
            self.lines.append(indent + self._open + line)
            self._open = ""

    def gap(self) -> None:
        self.end_line()
        if self.lines and self.lines[-1]:
            self.lines.append("")

    def item(self) -> None:
        self.end_line()
        mark = "* "
        if self.lists and self.lists[-1]:
            mark = f"{self.lists[-1]}. "
            self.lists[-1] += 1
        self._open = "  " * max(1, len(self.lists)) + mark


class Reader:
    """Converter of one document to text."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._domain = domain_of(url)
        self._writer = Writer()
        self._title = ""
        self._images = 0
        self._links: dict[str, int] = {}
        self._target: str | None = None
        self._linked: list[str] = []

    def read(self, source: str) -> HtmlText:
        for part in Scanner(source):
            if isinstance(part, str):
                self._text(cleaned(unescaped(part)))
            elif part.name in VERBATIM:
                self._verbatim(part)
            elif part.name == "a":
                self._anchor(part)
            elif part.name == "img":
                self._image(part)
            elif part.name in SCRIPTS:
                self._text(SCRIPTS[part.name][part.closing])
            elif part.name == "base" and not self._links:
                self._url = self._absolute(part.get("href") or "") or self._url
            else:
                self._block(part)
        self._end_link()
        self._writer.end_line()
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(self._writer.lines)).strip("\n")
        return HtmlText(one_line(self._title), text, tuple(self._links))

    def _text(self, text: str) -> None:
        if self._target is None:
            self._writer.add_text(text)
            return
        self._linked.append(text)
        if sum(map(len, self._linked)) > MAX_LINK_LENGTH:
            # An unclosed link would otherwise contain the rest of the page.
            self._target = None
            self._writer.add_text("".join(self._linked))

    def _verbatim(self, tag: Tag) -> None:
        if tag.name == "title" and not self._title:
            self._title = unescaped(tag.content)
        elif tag.name == "textarea":
            self._text(cleaned(unescaped(tag.content)))

    def _anchor(self, tag: Tag) -> None:
        self._end_link()
        href = None if tag.closing else tag.get("href")
        if href and not href.startswith(("#", "mailto:", "javascript:")):
            self._target = self._absolute(href)
            self._linked = []

    def _end_link(self) -> None:
        target, self._target = self._target, None
        if target is None:
            return
        label = _SPACE.sub(" ", "".join(self._linked))
        full = len(self._links) >= MAX_LINKS and target not in self._links
        if not label.strip() or full:
            self._writer.add_text(label)
            return
        number = self._links.setdefault(target, len(self._links))
        domain = domain_of(target)
        # White space inside the link's ends belongs to the surrounding words.
        self._writer.add_text(" " if label[0] == " " else "")
        self._writer.add_text(link(number, label.strip(), "" if domain == self._domain else cleaned(domain)))
        self._writer.add_text(" " if label[-1] == " " else "")

    def _absolute(self, href: str) -> str | None:
        try:
            url = urljoin(self._url, cleaned(href).strip())
        except ValueError:
            return None
        return url if url.startswith(("http://", "https://", "file:///")) and len(url) <= MAX_TAG_LENGTH else None

    def _image(self, tag: Tag) -> None:
        name = one_line(tag.get("alt") or tag.get("title") or "")
        self._text(f"[Image {self._images}: {name}]" if name else f"[Image {self._images}]")
        self._images += 1

    def _block(self, tag: Tag) -> None:
        writer, name = self._writer, tag.name
        if self._target is not None:
            self._linked.append(" ")
            return
        if name in GAPS:
            nested = name in {"ul", "ol"} and (len(writer.lists) > (1 if tag.closing else 0))
            writer.end_line() if nested else writer.gap()
        if name in {"ul", "ol"}:
            if not tag.closing and len(writer.lists) < MAX_DEPTH:
                writer.lists.append(1 if name == "ol" else 0)
            elif tag.closing and writer.lists:
                writer.lists.pop()
        elif name == "li" and not tag.closing:
            writer.item()
        elif name == "pre":
            writer.verbatim = max(0, min(writer.verbatim + (-1 if tag.closing else 1), MAX_DEPTH))
        elif name == "blockquote":
            writer.quoted = max(0, min(writer.quoted + (-1 if tag.closing else 1), MAX_DEPTH))
        elif name in {"h1", "h2", "h3", "h4", "h5", "h6"}:
            writer.set_line_prefix("" if tag.closing else "#" * int(name[1]) + " ")
        elif name in BREAKS or (name == "li" and tag.closing):
            writer.end_line()
        elif name in {"td", "th"}:
            writer.add_text(" ")
        elif name == "hr" and not tag.closing:
            writer.gap()
            writer.add_text("* * *")
            writer.gap()


def read_html(source: str, url: str) -> HtmlText:
    """Convert a document found at `url` to text, title and links."""
    return Reader(url).read(source)
