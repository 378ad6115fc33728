"""Unisono: one OpenAI-compatible gateway that makes every gpt-oss backend reliable."""

__version__ = "0.1.0"
