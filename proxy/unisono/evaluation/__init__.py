"""Evaluation of models behind a gateway, with scorecards that can be compared."""
