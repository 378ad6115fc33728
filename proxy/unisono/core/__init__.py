"""Nouns shared by every package: what a conversation, a generation and an event are. Standard library only."""
