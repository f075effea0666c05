"""Parameters of OpenAI's and vLLM's APIs that this server knows of and does not serve.

Each is refused by name, unless it has a value that changes nothing (the neutral values listed here; null always is).
"""

from typing import Any

_NONE: tuple[Any, ...] = ()

_BOTH: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "metadata": ({},),
    "store": (False,),
    # vLLM
    "allowed_token_ids": _NONE,
    "bad_words": ([],),
    "detokenize": (True,),
    "guided_choice": _NONE,
    "guided_decoding_backend": _NONE,
    "guided_grammar": _NONE,
    "guided_json": _NONE,
    "guided_regex": _NONE,
    "guided_whitespace_pattern": _NONE,
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": _NONE,
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "prompt_logprobs": _NONE,
    "repetition_penalty": (1,),
    "request_id": _NONE,
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": _NONE,
    "structured_outputs": _NONE,
    "truncate_prompt_tokens": _NONE,
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_BOTH,
    "best_of": (1,),
    "echo": (False,),
    "prompt_embeds": _NONE,
    "suffix": ("",),
}

UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    **_BOTH,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": _NONE,
    "best_of": (1,),
    "chat_template": _NONE,
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": _NONE,
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": _NONE,
    "prediction": _NONE,
    "prompt_cache_key": _NONE,
    "prompt_cache_retention": _NONE,
    "reasoning_effort": _NONE,
    "safety_identifier": _NONE,
    "service_tier": ("auto", "default"),
    "thinking_token_budget": _NONE,
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": _NONE,
    "web_search_options": _NONE,
}

# Fields of an assistant's message: clients send back what they were answered.
UNSUPPORTED_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": _NONE,
    "function_call": _NONE,
    "name": _NONE,
    "refusal": _NONE,
    "tool_calls": _NONE,
}


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    """Whether `value` is one of the neutral values, or null. `true` is no 1, and `false` no 0."""
    return value is None or any(
        value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral
    )
