"""Admin API in LiteLLM's format: keys, teams, users, budgets, spend and audit records."""
