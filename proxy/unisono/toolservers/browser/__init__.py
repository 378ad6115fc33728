"""The `browser` tool in the form gpt-oss was trained on: `search`, `open`, `find`.

    text           text format of pages: wrapped and numbered lines, windows, links
    html_text      conversion of HTML to that format
    visited_pages  pages of a session, by cursor
    web            reader of web pages, with an SSRF guard
    page_sources   ports for searching and reading; implemented by searxng, folder and web
    actions        the three actions: text for the model, facts for the gateway
    server         the MCP server

Page text is data. Markers of the Harmony format pass through as plain characters; the gateway ensures that they never
become special tokens. Only link brackets and invisible characters are replaced.
"""
