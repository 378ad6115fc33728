"""Nouns and protocols shared by every package. Standard library only."""
