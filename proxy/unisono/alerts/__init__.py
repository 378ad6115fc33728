"""Alerts about budgets and health: rules, and a webhook that receives them."""
