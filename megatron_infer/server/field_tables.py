"""Fields without an action that are the same on every route: those of OpenAI, vLLM 0.32, SGLang 0.5.23 and Anthropic.

A dialect adds rows to these where a field means something else there. The pages `docs/request_fields*.md` are made from
the tables of all routes (`tools/field_docs.py`).
"""

from __future__ import annotations

from megatron_infer.server.inactive_fields import FieldTable, no_effect, refused, rows

NO_MEDIA = "there are no images, audio or video here: this model reads text"
LABEL = no_effect("it labels the call for the caller's own use")
_NO_PLACE = "a template has no place for it"
_NO_PLACES = "a template has no place for them"
_BY_TOKENS = "prefixes are found by their tokens"
_TEXT_ONLY = "this server makes text"
_BEAM = "beam search is not served; use best_of"
_NOT_CUT = "a prompt is not cut here"
_BY_MODEL = "give the adapter's name as model"
_NO_CALLS = "nothing is called here"
_NO_KV_TRANSFER = refused("keys and values are not handed between servers", {})

LABELS = rows(
    {
        "user safety_identifier session_id client_metadata conversation_id custom_labels": LABEL,
        "metadata": no_effect("this server stores nothing that it could label", {}),
        "prompt_cache_key": no_effect(_BY_TOKENS),
        "prompt_cache_options": no_effect(_BY_TOKENS, {}),
        "prompt_cache_retention": no_effect("prefixes stay while there is room"),
        "service_tier": no_effect("there is one tier; see priority", "auto", "default"),
        "store": no_effect("this server stores nothing", False),
    }
)
"""What clients send with calls of any kind."""

SHARED = LABELS | rows(
    {
        # searches, filters and lengths that the engine does not have
        "use_beam_search early_stopping": refused(_BEAM, False),
        "length_penalty": refused(_BEAM, 1.0),
        "beam_width": refused("beam search is not served", 0, 1),
        "bad_words": refused("give bad_token_ids", []),
        "stop_regex": refused("give stop or stop_token_ids", [], ""),
        "thinking_token_budget": refused("thoughts are bounded by max_tokens only"),
        "repetition_detection": refused("give stop, repetition_penalty or max_tokens"),
        "watermarking": refused("there are no watermarks here", False),
        "watermark": refused("there are no watermarks here"),
        "truncate_prompt_tokens": refused(f"{_NOT_CUT}; send the tokens that are to be read"),
        "truncation": refused(f"{_NOT_CUT}; send what is to be read", "disabled"),
        "truncation_side": no_effect(_NOT_CUT),
        "context_management": no_effect(_NOT_CUT, [], {}),
        "custom_logit_processor": refused("code of a caller is not run; use logit_bias or structured_outputs", ""),
        "chat_template": refused("templates of callers are not run; send the rendered prompt to /v1/completions"),
        "guided_whitespace_pattern": refused("use structured_outputs with disable_any_whitespace"),
        "guided_decoding_backend": refused("llguidance is the only one", "auto", "guidance"),
        "prediction": no_effect("predicted outputs change the speed of an answer, and are not used"),
        "verbosity": no_effect("the model has no such setting; ask for it in a message", "medium"),
        "thinking": no_effect(
            "a model thinks as its chat template makes it; see --reasoning-parser", {"type": "disabled"}
        ),
        "spaces_between_special_tokens": no_effect("tokenizers of tokenizer.json put no spaces there", True),
        # what replies do not have
        "logprob_token_ids": refused("give logprobs (top_logprobs), which has the likeliest tokens", []),
        "prompt_logprob_token_ids": refused("give prompt_logprobs, which has the likeliest tokens", []),
        "prompt_logprob_start": refused("prompt_logprobs covers the whole prompt", 0),
        "flat_logprobs": no_effect("it is a form within vLLM's process"),
        "return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64": refused(
            "log probabilities come as lists", False
        ),
        "sampling_logprobs_mode": refused("see --logprobs-mode of the server"),
        "return_hidden_states": refused("hidden states are not returned; /v1/embeddings has pooled ones", False),
        "return_token_offsets": no_effect("it is for vLLM's render routes", False),
        "routed_experts_prompt_start": no_effect("this route returns no routed experts; SGLang's /generate does", 0),
        "routed_experts_start_len": refused("routed_experts covers the whole sequence", 0),
        "return_indexer_topk": refused("choices of keys are returned in Python (return_index_choices)", False),
        "return_bytes": refused(_TEXT_ONLY, False),
        "stream_interval": no_effect("a stream sends every token as soon as its client reads", 1),
        "output_kind": no_effect("the stream field says what is sent", 0, 2),
        "moderation": refused("this server checks no texts"),
        # adapters, prefixes, processes
        "lora_path lora_id": refused(_BY_MODEL, [], ""),
        "extra_key": refused("give cache_salt to /v1/completions, which keeps prefixes apart", [], ""),
        "skip_reading_prefix_cache": refused("give a new cache_salt, which matches no prefix", False),
        "session_params": refused("send the whole prompt: its prefix is found in the cache", {}),
        "cache_control": no_effect(_BY_TOKENS),
        "kv_transfer_params ec_transfer_params": _NO_KV_TRANSFER,
        "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key": _NO_KV_TRANSFER,
        "data_parallel_rank routed_dp_rank disagg_prefill_dp_rank routing_key": no_effect(
            "the coordinator chooses the engine"
        ),
        "skip_clone output_text_buffer_length": no_effect("it is about vLLM's process"),
        "trace_decode_token_ids": refused("it is about vLLM's tests"),
        "http_worker_ipc external_trace_header received_time": no_effect("it is about SGLang's processes"),
        "log_metrics": no_effect("every call is counted", True),
        "no_logs": no_effect("prompts and texts are never logged"),
        "background": refused("a reply is sent on its own call", False),
        "vllm_xargs extra_args": refused("there are no extensions of vLLM here", {}),
        "speed": no_effect("there is one speed", "standard"),
        "inference_geo": no_effect("the answer is made on this server"),
        "betas": no_effect("there are no versions of this API", []),
        # tools of the server
        "max_tool_calls": no_effect("this server calls no tools itself"),
        "web_search_options": refused("this server does not search"),
        "container": refused("nothing is run here"),
        "mcp_servers": refused(_NO_CALLS, []),
        # media, and prompts in other forms
        "mm_processor_kwargs media_io_kwargs mm_payload return_mm_kwargs mm_hashes mm_content_hashes "
        "use_audio_in_video video_config images_config max_dynamic_patch min_dynamic_patch "
        "image_max_dynamic_patch video_max_dynamic_patch": no_effect(
            "there are no images, audio or video here", {}, False
        ),
        "multi_modal_data features": refused(NO_MEDIA, {}),
        "images": refused(NO_MEDIA, []),
        "image_data video_data audio_data": refused(NO_MEDIA, [], "", [[]]),
        "audio": refused(_TEXT_ONLY),
        "modalities": refused(_TEXT_ONLY, ["text"], []),
        "prompt_embeds": refused("send the prompt as text or token ids"),
        "suffix": refused("there is nothing here that fills in before a text", ""),
    }
)
"""What clients send with calls that generate, embed or score."""

STREAM_OPTIONS = FieldTable({"include_obfuscation": no_effect("streams are not padded", False)})
PART = FieldTable(
    {
        "cache_control prompt_cache_breakpoint": no_effect(_BY_TOKENS),
        "annotations citations logprobs": no_effect(_NO_PLACES, []),
        "caller": no_effect(_NO_PLACE),
        "is_error": no_effect(_NO_PLACE, False),
        "signature": no_effect("thoughts are not signed", ""),
        "data": no_effect("redacted thoughts are not shown"),
        "image_url image image_embeds input_audio audio_url audio video_url video file file_id file_data file_url "
        "source": refused(NO_MEDIA),
    }
)
"""Pieces of a message's content."""
MESSAGE = FieldTable(
    {
        "id": no_effect("messages are known by their place"),
        "status": no_effect("messages are taken as they are"),
        "type": no_effect(_NO_PLACE, "message"),
        "metadata": no_effect(_NO_PLACE, {}),
        "refusal": no_effect(_NO_PLACE, ""),
        "timestamp created_at model stop_reason stop_sequence stop_details usage": no_effect(_NO_PLACE),
        "cache_control": no_effect(_BY_TOKENS),
        "annotations": no_effect(_NO_PLACES, []),
        "provider_specific_fields": no_effect("another server's fields", {}),
        "thinking_blocks reasoning_details": no_effect("another server's form of reasoning_content", []),
        "raw_text": no_effect("the prompt is made of content and generation_token_ids"),
        "audio": refused(NO_MEDIA),
        "images": refused(NO_MEDIA, []),
        "function_call": refused("use tool_calls"),
    },
    {"content": PART},
)
TOOL = FieldTable(
    {
        "cache_control": no_effect(_BY_TOKENS),
        "defer_loading": no_effect("all tools are shown to the model", False),
        "eager_input_streaming": no_effect("arguments are streamed as they come"),
        "output_schema": no_effect("results are not checked"),
        "allowed_callers": refused(_NO_CALLS, ["direct"]),
        "input_examples": refused("put them into the description", []),
    },
    kinds=("function",),
)
ALLOWED_TOOLS = FieldTable(nested={"tools": FieldTable(kinds=("function",))})
