"""Parameters of OpenAI's, vLLM's and SGLang's bodies that are not supported here and would change the answer,
or what is told of it; with the values that ask for nothing. All others that we do not know are ignored.
"""

from collections.abc import Mapping

Refused = Mapping[str, tuple[object, ...]]

_ANYWHERE: Refused = {
    # What is asked for, and in how many answers.
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "lora_path": (),
    "session_params": ({},),
    # How the prompt is made.
    "prompt_embeds": (),
    "input_ids": (),
    "documents": ([],),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "thinking": (),
    "enable_thinking": (),
    # Which tokens may be chosen.
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "structural_tag": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "thinking_budget": (),
    "thinking_token_budget": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "logits_processors": ([],),
    "watermark": (),
    "vllm_xargs": ({},),
    # Where the answer ends, and how it is shown.
    "stop_regex": ([], ""),
    "repetition_detection": (),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_token_ids": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "return_meta_info": (False,),
    # Whose cache it may use, and who goes first: vLLM's smaller number does, SGLang's larger one.
    "extra_key": ("",),
    "priority": (0,),
    "kv_transfer_params": ({},),
}
IN_CHATS: Refused = {**_ANYWHERE, "add_special_tokens": (False,)}
IN_COMPLETIONS: Refused = {**_ANYWHERE, "chat_template_kwargs": ({},)}
