"""Tools that the gateway runs itself, as the Responses API asks for them: servers, approvals, what was told before."""
