"""Fields without an action here, by route: those of OpenAI, vLLM 0.32, SGLang 0.5.23, Megatron and Anthropic.

`docs/request_fields.md` is generated from TABLES (`tools/field_docs.py`).
"""

from __future__ import annotations

from megatron_infer.server.request_fields import FieldTable, no_effect, refused

_NO_STORE = no_effect("this server stores nothing", False)
_NO_MEDIA = "there are no images, audio or video here: this model reads text"
_MEDIA_OPTIONS = no_effect("there are no images, audio or video here", {}, False)
_ALL_SHOWN = no_effect("all tools are shown to the model", False)
_NOT_CUT = no_effect("a prompt is not cut here", [], {})
_NO_PLACE = no_effect("a template has no place for it")
_LABELS = {
    "id": no_effect("messages are known by their place"),
    "type": no_effect("a template has no place for it", "message"),
    "status": no_effect("messages are taken as they are"),
    "timestamp": _NO_PLACE,
    "created_at": _NO_PLACE,
    "metadata": no_effect("a template has no place for it", {}),
}
"""What clients store with a message."""
_BEAM = "beam search is not served; use best_of"
_CHAT_ONLY = "tool calls are served at /v1/chat/completions and /v1/responses only"
_LABEL = no_effect("it labels the call for the caller's own use")
_BY_MODEL = refused("give the adapter's name as model", [], "")
_NO_KV_TRANSFER = refused("keys and values are not handed between servers", {})
_NO_DP_RANK = no_effect("the coordinator chooses the engine")

_HINTS = {
    "user": _LABEL,
    "metadata": no_effect("this server stores nothing that it could label", {}),
    "safety_identifier": _LABEL,
    "prompt_cache_key": no_effect("prefixes are found by their tokens"),
    "prompt_cache_retention": no_effect("prefixes stay while there is room"),
    "prompt_cache_options": no_effect("prefixes are found by their tokens", {}),
    "service_tier": no_effect("there is one tier; see priority", "auto", "default"),
    "store": _NO_STORE,
    "session_id": _LABEL,
    "client_metadata": _LABEL,
}
_VLLM = {
    "use_beam_search": refused(_BEAM, False),
    "length_penalty": refused(_BEAM, 1.0),
    "early_stopping": refused(_BEAM, False),
    "bad_words": refused("give bad_token_ids", []),
    "truncate_prompt_tokens": refused("a prompt is not cut here; send the tokens that are to be read"),
    "truncation_side": no_effect("a prompt is not cut here"),
    "spaces_between_special_tokens": no_effect("tokenizers of tokenizer.json put no spaces there", True),
    "logprob_token_ids": refused("give logprobs (top_logprobs), which has the likeliest tokens", []),
    "prompt_logprob_token_ids": refused("give prompt_logprobs, which has the likeliest tokens", []),
    "prompt_logprob_start": refused("prompt_logprobs covers the whole prompt", 0),
    "flat_logprobs": no_effect("it is a form within vLLM's process"),
    "thinking_token_budget": refused("thoughts are bounded by max_tokens only"),
    "repetition_detection": refused("give stop, repetition_penalty or max_tokens"),
    "stream_interval": no_effect("a stream sends every token as soon as its client reads", 1),
    "watermarking": refused("there are no watermarks here", False),
    "vllm_xargs": refused("there are no extensions of vLLM here", {}),
    "extra_args": refused("there are no extensions of vLLM here", {}),
    "kv_transfer_params": _NO_KV_TRANSFER,
    "ec_transfer_params": _NO_KV_TRANSFER,
    "routed_experts_prompt_start": no_effect("this route returns no routed experts; SGLang's /generate does", 0),
    "return_token_offsets": no_effect("it is for vLLM's render routes", False),
    "skip_reading_prefix_cache": refused("give a new cache_salt, which matches no prefix", False),
    "guided_whitespace_pattern": refused("use structured_outputs with disable_any_whitespace"),
    "guided_decoding_backend": refused("llguidance is the only one", "auto", "guidance"),
    "mm_processor_kwargs": _MEDIA_OPTIONS,
    "media_io_kwargs": _MEDIA_OPTIONS,
    "mm_payload": _MEDIA_OPTIONS,
    "return_mm_kwargs": _MEDIA_OPTIONS,
}
_SGLANG = {
    "return_hidden_states": refused("hidden states are not returned; /v1/embeddings has pooled ones", False),
    "custom_logit_processor": refused("code of a caller is not run; use logit_bias or structured_outputs", ""),
    "lora_path": _BY_MODEL,
    "lora_id": _BY_MODEL,
    "session_params": refused("send the whole prompt: its prefix is found in the cache", {}),
    "data_parallel_rank": _NO_DP_RANK,
    "routed_dp_rank": _NO_DP_RANK,
    "disagg_prefill_dp_rank": _NO_DP_RANK,
    "bootstrap_host": _NO_KV_TRANSFER,
    "bootstrap_port": _NO_KV_TRANSFER,
    "bootstrap_room": _NO_KV_TRANSFER,
    "bootstrap_pair_key": _NO_KV_TRANSFER,
    "extra_key": refused("give cache_salt to /v1/completions, which keeps prefixes apart", [], ""),
}

STREAM_OPTIONS = FieldTable({"include_obfuscation": no_effect("streams are not padded", False)})
PART = FieldTable(
    {
        "cache_control": no_effect("prefixes are found by their tokens"),
        "annotations": no_effect("a template has no place for them", []),
        **dict.fromkeys(
            ("image_url", "image", "image_embeds", "input_audio", "audio_url", "audio", "video_url", "video", "file"),
            refused(_NO_MEDIA),
        ),
    }
)
MESSAGE = FieldTable(
    _LABELS
    | {
        "cache_control": no_effect("prefixes are found by their tokens"),
        "refusal": no_effect("a template has no place for it", ""),
        "annotations": no_effect("a template has no place for them", []),
        "provider_specific_fields": no_effect("another server's fields", {}),
        "thinking_blocks": no_effect("another server's form of reasoning_content", []),
        "reasoning_details": no_effect("another server's form of reasoning_content", []),
        "raw_text": no_effect("the prompt is made of content and generation_token_ids"),
        "audio": refused(_NO_MEDIA),
        "images": refused(_NO_MEDIA, []),
        "function_call": refused("use tool_calls"),
    },
    {"content": PART},
)
FUNCTIONS = ("function",)
TOOL = FieldTable(
    {"cache_control": no_effect("prefixes are found by their tokens"), "defer_loading": _ALL_SHOWN}, kinds=FUNCTIONS
)
ALLOWED_TOOLS = FieldTable(nested={"tools": FieldTable(kinds=FUNCTIONS)})

_OPENAI = _HINTS | _VLLM | _SGLANG
CHAT = FieldTable(
    _OPENAI
    | {
        "functions": refused("use tools", []),
        "function_call": refused("use tool_choice", "none", "auto"),
        "audio": refused("this server makes text"),
        "modalities": refused("this server makes text", ["text"], []),
        "prediction": no_effect("predicted outputs change the speed of an answer, and are not used"),
        "web_search_options": refused("this server does not search"),
        "verbosity": no_effect("the model has no such setting; ask for it in a message", "medium"),
        "echo": refused("use continue_final_message, or join the texts", False),
        "add_special_tokens": refused("the chat template writes the special tokens; see add_BOS", False),
        "chat_template": refused("templates of callers are not run; send the rendered prompt to /v1/completions"),
        "return_prompt_text": refused("use return_raw_text", False),
        "separate_reasoning": refused("the server separates reasoning by --reasoning-parser", True),
        "stream_reasoning": refused("thoughts are streamed as they come", True),
        "skip_prompt_log_probs": refused("ask for prompt_logprobs", True),
    },
    {
        "stream_options": STREAM_OPTIONS,
        "messages": MESSAGE,
        "tools": TOOL,
        "tool_choice": FieldTable(nested={"allowed_tools": ALLOWED_TOOLS}),
    },
)
COMPLETIONS = FieldTable(
    _OPENAI
    | {
        "tools": refused(_CHAT_ONLY, []),
        "tool_choice": refused(_CHAT_ONLY, "none"),
        "parallel_tool_calls": no_effect(_CHAT_ONLY),
        "functions": refused(_CHAT_ONLY, []),
        "function_call": refused(_CHAT_ONLY, "none"),
        "reasoning_effort": refused("a text has no chat template that could read it"),
        "suffix": refused("there is nothing here that fills in before a text", ""),
        "prompt_embeds": refused("send the prompt as text or token ids"),
        "multi_modal_data": refused(_NO_MEDIA, {}),
        "add_BOS": refused("texts begin with the tokenizer's special tokens; see add_special_tokens", False),
    },
    {"stream_options": STREAM_OPTIONS},
)
EMBEDDINGS = FieldTable(
    _HINTS
    | {
        "truncate_prompt_tokens": _VLLM["truncate_prompt_tokens"],
        "truncation_side": _VLLM["truncation_side"],
        "priority": no_effect("vectors take one forward each", 0),
        "embed_dtype": refused("numbers are float32", "float32", "auto"),
        "endianness": refused("base64 is little-endian", "little", "native"),
        "messages": refused("send the rendered text as input"),
        "lora_path": _BY_MODEL,
    }
)
TOKENIZE = FieldTable(
    {
        "chat_template": CHAT.rules["chat_template"],
        "mm_processor_kwargs": _MEDIA_OPTIONS,
        "media_io_kwargs": _MEDIA_OPTIONS,
    },
    {"messages": MESSAGE, "tools": TOOL},
)

_RESPONSES_PART = FieldTable(
    {
        "annotations": no_effect("a template has no place for them", []),
        "logprobs": no_effect("a template has no place for them", []),
        "prompt_cache_breakpoint": no_effect("prefixes are found by their tokens"),
        **dict.fromkeys(("image_url", "file_id", "file_data", "file_url", "input_audio"), refused(_NO_MEDIA)),
    }
)
_ITEM = FieldTable(
    {
        "id": no_effect("items are known by their place"),
        "status": no_effect("items are taken as they are"),
        "phase": no_effect("a template has no place for it"),
        "summary": no_effect("a template is shown the reasoning's content", []),
        "encrypted_content": no_effect("a template is shown the reasoning's content"),
        "caller": no_effect("a template has no place for it"),
        "namespace": no_effect("a template has no place for it"),
        "agent": no_effect("a template has no place for it"),
        "created_by": no_effect("a template has no place for it"),
    },
    {"content": _RESPONSES_PART, "output": _RESPONSES_PART},
)
RESPONSES = FieldTable(
    {name: rule for name, rule in _HINTS.items() if name != "store"}
    | {
        "store": refused("this server stores nothing; give false", False),
        "background": refused("a reply is sent on its own call", False),
        "previous_response_id": refused("this server stores nothing; send the conversation as input"),
        "conversation": refused("this server stores nothing; send the conversation as input"),
        "prompt": refused("this server stores no prompts; send the text"),
        "truncation": refused("a prompt is not cut here; send what is to be read", "disabled"),
        "context_management": _NOT_CUT,
        "max_tool_calls": no_effect("this server calls no tools itself"),
        "moderation": refused("this server checks no texts"),
        "stream_options": no_effect("events are not padded", {}),
    },
    {
        "input": _ITEM,
        "tools": FieldTable(
            {
                "defer_loading": _ALL_SHOWN,
                "allowed_callers": refused("nothing is called here", ["direct"]),
                "output_schema": no_effect("results are not checked"),
            },
            kinds=FUNCTIONS,
        ),
        "tool_choice": ALLOWED_TOOLS,
        "text": FieldTable({"verbosity": CHAT.rules["verbosity"]}),
        "reasoning": FieldTable(
            {
                "summary": no_effect("reasoning is shown as a whole", "auto", "none"),
                "generate_summary": no_effect("reasoning is shown as a whole", "auto"),
                "encrypted_content": no_effect("reasoning is shown as a whole"),
            }
        ),
    },
)

_CACHE_CONTROL = no_effect("prefixes are found by their tokens")
_PLAIN_BLOCK = FieldTable(
    {
        "cache_control": _CACHE_CONTROL,
        "citations": no_effect("a template has no place for them", []),
        "caller": no_effect("a template has no place for it"),
        "signature": no_effect("thoughts are not signed", ""),
        "is_error": no_effect("a template has no place for it", False),
        "data": no_effect("redacted thoughts are not shown"),
        "source": refused(_NO_MEDIA),
    }
)
_BLOCK = FieldTable(_PLAIN_BLOCK.rules, {"content": _PLAIN_BLOCK})
_ANTHROPIC_TOOL = FieldTable(
    {
        "cache_control": _CACHE_CONTROL,
        "defer_loading": _ALL_SHOWN,
        "eager_input_streaming": no_effect("arguments are streamed as they come"),
        "allowed_callers": refused("nothing is called here", ["direct"]),
        "input_examples": refused("put them into the description", []),
    },
    kinds=("custom",),
)
ANTHROPIC = FieldTable(
    {
        "metadata": _LABEL,
        "cache_control": _CACHE_CONTROL,
        "service_tier": no_effect("there is one tier", "auto", "standard_only"),
        "speed": no_effect("there is one speed", "standard"),
        "inference_geo": no_effect("the answer is made on this server"),
        "betas": no_effect("there are no versions of this API", []),
        "thinking": no_effect(
            "a model thinks as its chat template makes it; see --reasoning-parser", {"type": "disabled"}
        ),
        "container": refused("nothing is run here"),
        "mcp_servers": refused("nothing is called here", []),
        "context_management": _NOT_CUT,
    },
    {
        "messages": FieldTable(
            _LABELS | dict.fromkeys(("model", "stop_reason", "stop_sequence", "stop_details", "usage"), _NO_PLACE),
            {"content": _BLOCK},
        ),
        "system": _PLAIN_BLOCK,
        "tools": _ANTHROPIC_TOOL,
        "output_config": FieldTable({"task_budget": no_effect("outputs are bounded by max_tokens only")}),
    },
)
_SCORE_CUTS = refused("a text is not cut here; send what is to be read", 0)
SCORE = FieldTable(
    _HINTS
    | {
        "temperature": refused("probabilities are those of the model", 1.0),
        "truncate_prompt_tokens": _VLLM["truncate_prompt_tokens"],
        "truncation_side": _VLLM["truncation_side"],
        "max_tokens_per_query": _SCORE_CUTS,
        "max_tokens_per_doc": _SCORE_CUTS,
        "instruction": refused("put it into the texts"),
        "priority": no_effect("scores take one forward each", 0),
        "mm_processor_kwargs": _MEDIA_OPTIONS,
        "return_token_logprobs": refused("scores are probabilities; take their logarithm", False),
        "return_pooled_hidden_states": refused("use /v1/embeddings", False),
        "score_extraction_token": refused("labels are scored behind the last token"),
    }
)

VLLM_GENERATE = FieldTable(
    {
        "features": refused(_NO_MEDIA, {}),
        "mm_processor_kwargs": _MEDIA_OPTIONS,
        "kv_transfer_params": _NO_KV_TRANSFER,
        "ec_transfer_params": _NO_KV_TRANSFER,
        "output_mode": refused("the reply has token ids; /v1/completions has text", "tokens"),
        "session_id": _LABEL,
        "routed_experts_prompt_start": _VLLM["routed_experts_prompt_start"],
    },
    {
        "stream_options": STREAM_OPTIONS,
        "sampling_params": FieldTable(
            _VLLM
            | {
                "output_kind": no_effect("the stream field says what is sent", 0, 2),
                "skip_clone": no_effect("it is about vLLM's process"),
                "output_text_buffer_length": no_effect("it is about vLLM's process"),
                "trace_decode_token_ids": refused("it is about vLLM's tests"),
            }
        ),
    },
)
TRL = FieldTable(_VLLM | {"images": refused(_NO_MEDIA, [])})
TRL_SCORES = FieldTable({"temperature": refused("log probabilities are those of the model at temperature 1", 1.0)})
SGLANG_GENERATE = FieldTable(
    {name: rule for name, rule in _SGLANG.items() if name != "lora_path"}
    | {
        "session_id": _LABEL,
        "conversation_id": _LABEL,
        "routing_key": _NO_DP_RANK,
        "custom_labels": _LABEL,
        "log_metrics": no_effect("every call is counted", True),
        "no_logs": no_effect("prompts and texts are never logged"),
        "background": refused("a reply is sent on its own call", False),
        "modalities": _MEDIA_OPTIONS,
        "mm_hashes": _MEDIA_OPTIONS,
        "mm_content_hashes": _MEDIA_OPTIONS,
        "use_audio_in_video": _MEDIA_OPTIONS,
        "video_config": _MEDIA_OPTIONS,
        "images_config": _MEDIA_OPTIONS,
        "mm_processor_kwargs": _MEDIA_OPTIONS,
        "max_dynamic_patch": _MEDIA_OPTIONS,
        "min_dynamic_patch": _MEDIA_OPTIONS,
        "image_max_dynamic_patch": _MEDIA_OPTIONS,
        "video_max_dynamic_patch": _MEDIA_OPTIONS,
        **dict.fromkeys(("image_data", "video_data", "audio_data"), refused(_NO_MEDIA, [], "", [[]])),
        "input_embeds": refused("send text or input_ids"),
        "positional_embed_overrides": refused("send text or input_ids"),
        "token_ids_logprob": refused("give top_logprobs_num, which has the likeliest tokens", []),
        "return_sampling_mask": refused("use custom_params.return_top_p_token_ids", False),
        "sampling_logprobs_mode": refused("see --logprobs-mode of the server"),
        "return_flat_raw_top_logprobs": refused("log probabilities come as lists", False),
        "return_flat_raw_output_top_logprobs": refused("log probabilities come as lists", False),
        "return_flat_raw_top_logprobs_b64": refused("log probabilities come as lists", False),
        "routed_experts_start_len": refused("routed_experts covers the whole sequence", 0),
        "return_indexer_topk": refused("there is no sparse attention here", False),
        "return_entropy": refused("give top_logprobs_num", False),
        "return_bytes": refused("this server makes text", False),
        "require_reasoning": refused("use /v1/chat/completions", False),
        "max_thinking_tokens": refused("thoughts are bounded by max_new_tokens only"),
        "watermark": refused("there are no watermarks here"),
        "priority": refused("give it to /v1/completions or /inference/v1/generate", 0),
        "http_worker_ipc": no_effect("it is about SGLang's processes"),
        "external_trace_header": no_effect("it is about SGLang's processes"),
        "received_time": no_effect("it is about SGLang's processes"),
    },
    {
        "sampling_params": FieldTable(
            {
                "stop_regex": refused("give stop or stop_token_ids", [], ""),
                "structural_tag": refused("give json_schema, regex or ebnf", ""),
                "beam_width": refused("beam search is not served", 0, 1),
                "stream_interval": _VLLM["stream_interval"],
                "watermark": refused("there are no watermarks here"),
                "spaces_between_special_tokens": _VLLM["spaces_between_special_tokens"],
            },
        )
    },
)

_TORCH_CACHE = no_effect("no cache of torch is kept", False)
_RELOADER = "the engines' own weights are written in place"
UPDATE_FROM_DISK = FieldTable(
    {
        "flush_cache": no_effect("prefixes computed with other weights never match", True),
        "keep_pause": no_effect("engines that were paused stay paused, others go on", False),
        "torch_empty_cache": _TORCH_CACHE,
        "recapture_cuda_graph": no_effect("graphs stay valid as weights are written in place", False),
        "token_step": no_effect("version_spans has the version of every token", 0),
        "manifest": no_effect("the files say what is in them"),
        "is_async": refused("the reply comes when the engines have the weights", False),
        "load_format": refused("the format follows from the files", "auto", "safetensors"),
    }
)
CONTINUE = FieldTable({"torch_empty_cache": no_effect("no cache of torch is kept", True, False)})
ABORT = FieldTable(
    {
        "abort_message": no_effect("replies name the finish reason"),
        "finished_reason": no_effect("replies name the finish reason"),
        "weight_versions": no_effect("replies have version_spans"),
    }
)
WEIGHTS_CHECKER = FieldTable(
    {
        "allow_quant_error": refused("weights are compared bit by bit", False),
        "skip_tensor_list": refused("all tensors are compared", []),
        "selector": refused("there is one model", "all", "target"),
    }
)
WEIGHT_UPDATE = FieldTable({"selector": refused("there is one model", "all", "target")})
START_PROFILE = FieldTable(
    {
        "output_dir": refused("the folder is that of the engine's MEGATRON_INFER_PROFILE_DIR"),
        "start_step": refused("the trace begins with the next step", 0),
        "activities": no_effect("what the engine's device does is traced"),
        "profile_by_stage": refused("steps are traced as they run, prompts and decode together", False),
        "with_stack": no_effect("stacks are not traced", False),
        "record_shapes": no_effect("shapes are not traced", False),
    }
)

SPEECH = FieldTable(
    _HINTS
    | {
        "stream": no_effect("sound is sent as it is made; see stream_format", True, False),
        "top_p": refused("give top_k", 1.0),
        "language": refused("the model's text decides", ""),
    }
)
"""Fields of servers whose model speaks; docs/audio.md lists them."""

TABLES: dict[str, FieldTable] = {
    "/v1/chat/completions, /chat/completions": CHAT,
    "/v1/completions, /completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages, /v1/messages/count_tokens": ANTHROPIC,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/score": SCORE,
    "/tokenize": TOKENIZE,
    "/generate": SGLANG_GENERATE,
    "/inference/v1/generate, /skyrl/v1/generate": VLLM_GENERATE,
    "/generate/, /chat/": TRL,
    "/get_sequence_logprobs/": TRL_SCORES,
    "/update_weights_from_disk": UPDATE_FROM_DISK,
    "/continue_generation": CONTINUE,
    "/abort_request": ABORT,
    "/weights_checker": WEIGHTS_CHECKER,
    "/begin_weight_update": WEIGHT_UPDATE,
    "/start_profile": START_PROFILE,
}
"""Routes -> table, in the order of the documentation."""
