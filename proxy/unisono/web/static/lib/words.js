// Error codes in words. The cause of a failing deployment comes from the gateway.

const CODES = {
  backend_unavailable: "No deployment of the model could be reached.",
  backend_timeout: "The deployment did not answer in time.",
  backend_overloaded: "All slots were in use, and the queue was full or too slow.",
  backend_error: "The deployment reported an error, or sent an invalid answer.",
  backend_rejected_request: "The deployment rejected the request.",
  backend_unfit: "A check of the deployment failed.",
  rate_limit_exceeded: "A limit of the key, its user or its team was reached.",
  insufficient_quota: "A budget is used up.",
  model_not_found: "There is no such model.",
  model_not_allowed: "The key may not use this model.",
  permission_denied: "The role of the key does not permit this.",
  invalid_api_key: "The key is missing, wrong, expired or revoked.",
  invalid_value: "A field of the request is not valid.",
  unsupported_value: "The gateway does not support a value of the request.",
  store_unavailable: "The store does not answer.",
  refused_by_hook: "A hook refused the request.",
  hook_failed: "A hook failed.",
  shutting_down: "The gateway was shutting down.",
  tool_server_error: "A tool server reported an error.",
  tool_server_timeout: "A tool server did not answer in time.",
  tool_server_unavailable: "A tool server could not be reached.",
  internal_error: "A fault of the gateway; its log has the details.",
};
const STATUSES = { 400: "The request was not valid.", 401: "The key was refused.", 403: "The key has no permission.", 404: "There is nothing at this address.", 408: "The request was sent too slowly.", 413: "The request was too large.", 429: "A limit was reached.", 499: "The client disconnected before the answer." };

export function inWords({ error, status }) {
  return CODES[error] ?? STATUSES[status] ?? (error ? `Code ${error}.` : "The request failed.");
}

// Returns the causes of failure of those deployments that the request tried and that still fail.
export function causes(record, status) {
  const names = new Set((record.attempts ?? []).filter((one) => one.error).map((one) => one.deployment));
  const members = (status?.models ?? []).flatMap((model) => model.deployments ?? []).filter((one) => one.cause);
  const tried = members.filter((one) => names.has(one.name));
  // If there was no attempt, no deployment of the model was available.
  const own = (status?.models ?? []).find((model) => model.id === record.model);
  const group = (status?.models ?? []).find((model) => model.id === own?.model);
  const found = tried.length || record.attempts?.length || !/^backend_/.test(record.error ?? "") ? tried : (group?.deployments ?? []).filter((one) => one.cause);
  return found.map((one) => `${one.name}: ${one.cause}`);
}
