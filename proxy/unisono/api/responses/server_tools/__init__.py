"""Server tools of the Responses API: servers, approvals, and their history."""
