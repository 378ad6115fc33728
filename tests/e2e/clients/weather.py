"""Prompts of the agent suites, and the answers of the demo model and the scripts."""

from __future__ import annotations

HELLO = "Hello! How can I help you today?"
PARIS = "What is the weather in Paris?"
ANSWER = "It is sunny in Paris with 18 degrees."
SAID = "Here is the answer."


class Asked:
    """Weather function for a tool, which records its arguments."""

    def __init__(self, *answers: str) -> None:
        self.asked: list[str] = []
        answers = answers or ("18 degrees, sunny",)

        def get_weather(location: str) -> str:
            """Gets the current weather in a city.

            Args:
                location: City name
            """
            self.asked.append(location)
            return answers[(len(self.asked) - 1) % len(answers)]

        self.get_weather = get_weather
