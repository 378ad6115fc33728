"""Known keys without effect, by section: LiteLLM's keys and reserved keys.

A LiteLLM file should start without changes, with a warning for each key without effect. The names are from LiteLLM's
documentation of its settings and from the types of its router. `*` in a name is a wildcard.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

LITELLM = "this LiteLLM setting has no effect in Unisono"
LATER = "this setting is reserved and has no effect in this version"
FRAGMENT = "this key has no effect itself; it may only contain YAML anchors"

_COSTS = "*cost* max_budget budget_duration tiered_pricing regional_processing_uplift*"

_TOP = "callback_settings guardrails prompts vector_store_registry search_tools credential_list"
_TOP += " finetune_settings files_settings router_config include policies agents mcp_tools sandbox_tools"

_PARAMS = (
    "api_version custom_llm_provider itpm otpm max_retries num_retries drop_params organization "
    "configurable_clientside_auth_params litellm_credential_name litellm_trace_id max_file_size_mb mock_* tags "
    "default_api_key_*_limit keepalive_seconds allow_client_keepalive_override use_* tag_regex "
    "merge_reasoning_content_in_choices provider_affinity_header "
    "auto_router_* complexity_router_* adaptive_router_* quality_router_* "
    "azure_* tenant_id client_id client_secret vertex_* aws_* gcs_* s3_* bucket_name bedrock_* watsonx_* region_name "
    "vector_* milvus_* valkey_* index_name embedding_model cooldown_time additional_drop_params allowed_openai_params "
    "extra_headers headers default_headers extra_body model_info metadata cache caching fallbacks ssl_verify "
    "supports_system_message input_type dimensions prompt_* hf_model_name num_ctx keep_alive guardrails "
    # Defaults for request fields.
    "temperature top_p top_k min_p max_tokens max_completion_tokens n stop seed frequency_penalty presence_penalty "
    "logit_bias logprobs top_logprobs user response_format tools tool_choice parallel_tool_calls stream "
    "stream_options reasoning_effort thinking service_tier store verbosity " + _COSTS
)

_INFO = (
    "custom_tokenizer "
    "db_model updated_at updated_by created_at created_by base_model tier team_id team_public_model_name "
    "member_auto_router blocked discoverable access_windows access_groups ptu_* allow_fail_open enable_tag_filtering "
    "internal_router_model max_tokens max_output_tokens output_vector_size litellm_provider supports_* supported_* "
    "health_check_* disable_background_health_check key metadata description version tpm rpm " + _COSTS
)

_LITELLM_SETTINGS = (
    "success_callback failure_callback callbacks service_callbacks audit_log_callbacks turn_off_message_logging "
    "redact_* langfuse_* force_ipv4 json_logs set_verbose content_policy_fallbacks mcp_* "
    "cache cache_params modify_params enable_* disable_* "
    "key_generation_settings use_* allowed_fails cooldown_time telemetry max_budget budget_duration "
    "max_internal_user_budget internal_user_budget_duration default_internal_user_params default_team_* "
    "default_in_memory_ttl default_redis_* default_key_* max_end_user_budget* max_ui_session_budget "
    "upperbound_key_generate_params public_model_groups* store_audit_logs ssl_* aws_* api_base api_key "
    "add_function_to_prompt return_response_headers custom_provider_map tag_budget_config s3_callback_params "
    "gcs_* datadog_* prometheus_* credential_list model_alias_map model_fallbacks safe_memory_mode num_retries_* "
    "context_* azure_* openai_key vertex_* failure_handler forward_* priority_reservation* blocked_user_list "
    "banned_keywords_list guardrails require_auth_for_metrics_endpoint reasoning_auto_summary"
)

_GENERAL = (
    "store_* disable_* enable_* forward_* enforce* reject_* allowed_* key_management_* database_* allow_* custom_* "
    "max_parallel_requests global_max_parallel_requests infer_model_from_keys background_health_checks health_check_* "
    "alert* use_* public_routes service_account_settings image_generation_model embedding_model moderation_model "
    "supported_db_objects user_mcp_management_mode max_request_size_mb max_response_size_mb proxy_* "
    "default_team_disabled user_* litellm_* admin_* spend_report_frequency ui_* oauth2_* pass_through_endpoints "
    "maximum_spend_logs_* mcp_* token_rate_limit_type control_plane_url role_* always_include_stream_usage "
    "block_robots search_tools cold_storage_* require_* coding_agent* dynamic_rate_limit* team_*"
)

_ROUTER = (
    "routing_* redis_* enable_* tag_* disable_cooldowns retry_* allowed_fails_policy "
    "content_policy_fallbacks max_fallbacks default_* polling_interval debug_level client_ttl "
    "cache_* caching_groups set_verbose max_retries retry_after model_group_retry_policy model_group_affinity_config "
    "optional_pre_call_checks alerting_config assistants_config provider_budget_config weights search_tools "
    "deployment_affinity_ttl_seconds ignore_invalid_deployments guardrail_list health_check_* cooldown_* "
    "fallback_* stream_* num_retries_per_request"
)

_MCP_SERVERS = (
    "server_id server_name alias spec_path spec_version protocol_version instructions mcp_info extra_headers env_vars "
    "auth_value scopes allowed_params pinned_tools tool_name_to_* access_groups mcp_access_groups allow_* "
    "available_on_public_internet "
    "delegate_auth_to_upstream oauth* token_* authorization_url registration_url dcr_* per_server_oauth_discovery "
    "client_id_metadata_* client_private_key* client_assertion_* id_jag_* audience subject_token_type upstream_* "
    "aws_* is_byok byok_* rpm source_url"
)

# An entry that litellm serves passes most keys of `_PARAMS` to litellm. For all other entries they have no effect.
FOREIGN: dict[str, Mapping[str, str]] = {
    "": {LITELLM: _TOP, FRAGMENT: "x-* .*"},
    "model_list[]": {LITELLM: "model_group blocked tpm rpm", LATER: "fallbacks"},
    "model_list[].litellm_params": {LITELLM: _PARAMS},
    "model_list[].model_info": {LITELLM: _INFO},
    "model_list[].unisono": {LATER: "failover"},
    "litellm_settings": {LITELLM: _LITELLM_SETTINGS},
    "general_settings": {LITELLM: _GENERAL},
    "mcp_servers[]": {LITELLM: _MCP_SERVERS},
    "router_settings": {LITELLM: _ROUTER},
    "unisono": {LATER: "trust_proxy_headers"},
}
"""Patterns of keys without effect, by section and reason."""


STRATEGIES = (
    "usage-based-routing usage-based-routing-v2 latency-based-routing cost-based-routing provider-budget-routing lar1"
)
FOREIGN_VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("router_settings", "routing_strategy"): dict.fromkeys(
        STRATEGIES.split(), "is a LiteLLM strategy; `prefix-aware` is used instead"
    )
}
"""LiteLLM values that are replaced by the default, with the warning, by section and key."""


UNSERVED = (
    *("embedding", "image_generation", "image_edit", "audio_transcription", "audio_speech", "moderation", "rerank"),
    *("batch", "realtime", "video_generation", "ocr", "search", "vector_store"),
)
"""Values of `model_info.mode` other than text generation."""

_NOT_HANDED_ON = (
    "provider itpm otpm tags tag_regex litellm_credential_name litellm_trace_id "
    "configurable_clientside_auth_params "
    "mock_* max_retries num_retries cooldown_time max_budget budget_duration model_info use_in_pass_through "
    "use_litellm_proxy max_file_size_mb default_api_key_* auto_router_* complexity_router_* adaptive_router_* "
    "quality_router_* cache caching fallbacks guardrails stream stream_options messages input n tiered_pricing *_cost_*"
)
"""Keys in `litellm_params` for LiteLLM's router, not for the provider."""


def is_passed_to_litellm(key: str) -> bool:
    """Return whether a key of an entry that litellm serves is passed to litellm."""
    return not any(fnmatchcase(key, pattern) for pattern in _NOT_HANDED_ON.split())


def default_reason(section: str, key: str, value: object) -> str | None:
    """Return the reason why a value is replaced by the default; None if it is used."""
    return FOREIGN_VALUES.get((section, key), {}).get(value) if isinstance(value, str) else None


def unused_reason(section: str, key: str) -> str | None:
    """Return the reason why `key` has no effect; None if the key is unknown.

    `section` is a path with `[]` for any index.
    """
    # The matching is case-sensitive on every system, as key names are.
    for reason, patterns in FOREIGN.get(section, {}).items():
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            return reason
    return None
