"""The `browser` tool in the form gpt-oss was trained on: `search`, `open` and `find`, cursors, numbered lines.

    text      how pages are written: lines of fixed width, numbers, windows, links
    markup    HTML to such text
    pages     what a session has seen, by cursor
    web       pages of the web, by addresses that may be dialled
    sources   where search results come from: SearXNG, a folder
    acting    the three actions, as text for the model and facts for a gateway
    server    the MCP server around them

Text of pages is data: markers of the Harmony format pass through as the characters they are, and it is the gateway's
business that they never become more. Only the brackets that mean a link here, and characters nobody sees, are replaced.
"""
