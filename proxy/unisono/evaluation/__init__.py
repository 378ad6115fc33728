"""Evaluation of the models of a gateway, with scorecards that can be compared."""
