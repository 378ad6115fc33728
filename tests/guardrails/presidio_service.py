"""Presidio's analyzer and anonymizer behind their HTTP API, for the environment `.envs/presidio`.

Presidio's own servers are only in its images, so this program offers the same two routes with its packages. Names of
people need language models, which cannot be downloaded everywhere: only the recognisers by pattern are active.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import spacy
from presidio_analyzer import AnalyzerEngine, PatternRecognizer, RecognizerRegistry
from presidio_analyzer.nlp_engine import SpacyNlpEngine
from presidio_anonymizer import AnonymizerEngine
from presidio_anonymizer.entities import RecognizerResult


class BlankEngine(SpacyNlpEngine):
    """Language engine without a model: it only splits words."""

    def __init__(self) -> None:
        super().__init__()
        self.nlp = {"en": spacy.blank("en")}

    def load(self) -> None:
        pass

    def is_loaded(self) -> bool:
        return True


registry = RecognizerRegistry()
registry.load_predefined_recognizers(languages=["en"])
registry.recognizers = [each for each in registry.recognizers if isinstance(each, PatternRecognizer)]
analyzer = AnalyzerEngine(nlp_engine=BlankEngine(), registry=registry, supported_languages=["en"])
anonymizer = AnonymizerEngine()


def answer(path: str, body: dict[str, Any]) -> Any:
    if path == "/analyze":
        options = {name: body[name] for name in ("entities", "score_threshold") if name in body}
        return [found.to_dict() for found in analyzer.analyze(body["text"], language=body["language"], **options)]
    results = [
        RecognizerResult(found["entity_type"], found["start"], found["end"], found["score"])
        for found in body["analyzer_results"]
    ]
    return json.loads(anonymizer.anonymize(body["text"], results).to_json())


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = json.dumps(answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        print(self.path, file=sys.stderr, flush=True)


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
