"""Chat templates in the manner of the families that know tools, and tokenizers with their marks."""

from __future__ import annotations

from typing import Any, Final

from serving_fakes import byte_level_backend, hf_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

_TURNS: Final = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}"""
_END: Final = """<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TOOLS: Final = "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"

HERMES: Final = f"""{_TOOLS}{_TURNS}{{% for c in m.tool_calls or [] %}}
<tool_call>
{{{{ c.function | tojson }}}}
</tool_call>{{% endfor %}}{_END}"""
QWEN3: Final = HERMES.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
) + (
    "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% elif begin_thinking %}<think>\n{% endif %}"
)
LLAMA3: Final = f"""{_TOOLS}{_TURNS}{{% for c in m.tool_calls or [] %}}<|python_tag|>
{{{{- '{{"name": "' + c.function.name + '", "parameters": ' + (c.function.arguments | tojson) + '}}' }}}}
{{%- endfor %}}{_END}"""
MISTRAL: Final = f"""{_TOOLS}{_TURNS}{{% if m.tool_calls %}}[TOOL_CALLS] [{{% for c in m.tool_calls %}}
{{{{- {{"name": c.function.name, "arguments": c.function.arguments, "id": c.id}} | tojson }}}}
{{%- endfor %}}]{{% endif %}}{_END}"""
MISTRAL_NAMED: Final = f"""{_TOOLS}{_TURNS}{{% for c in m.tool_calls or [] %}}
{{{{- "[TOOL_CALLS]" + c.function.name + "[ARGS]" + (c.function.arguments | tojson) }}}}
{{%- endfor %}}{_END}"""
_WRITTEN_OUT: Final = """{% for t in tools or [] %}
{{- "- " + t.function.name + ": " + t.function.description + "\n" }}{% endfor %}"""
HERMES_DESCRIBED: Final = HERMES.replace(_TOOLS, _WRITTEN_OUT)
"""Fails for a tool without a description."""
_ONE_CALL: Final = """{% if m.tool_calls and m.tool_calls | length > 1 %}
{{- raise_exception("one call at a time") }}{% endif %}"""
LLAMA3_SINGLE: Final = LLAMA3.replace("{% for c in m.tool_calls", f"{_ONE_CALL}{{% for c in m.tool_calls")
LLAMA3_FIRST: Final = LLAMA3.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
"""Drops all calls but the first."""
_NINE_CHARS: Final = """{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}
{{- raise_exception("ids of calls have 9 characters") }}{% endif %}{% endfor %}"""
MISTRAL_STRICT: Final = MISTRAL.replace("{% if m.tool_calls %}", f"{_NINE_CHARS}{{% if m.tool_calls %}}")
TEMPLATES: Final = {
    "hermes": HERMES, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "mistral named": MISTRAL_NAMED,
    "hermes described": HERMES_DESCRIBED, "llama3 single": LLAMA3_SINGLE, "llama3 first": LLAMA3_FIRST,
    "mistral strict": MISTRAL_STRICT,
}  # fmt: skip

SPECIAL_MARKS: Final = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
MARKS: Final = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
VOCAB_SIZE: Final = 448
"""At least the tokenizer's."""


def tool_tokenizer(family: str, *, has_marks: bool = True, **overrides: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a family's template. `has_marks`: each mark is one token, those of Llama and
    Mistral special ones."""
    backend = BackendTokenizer.from_str(byte_level_backend().to_str())
    if has_marks:
        backend.add_special_tokens(SPECIAL_MARKS)
        backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return hf_tokenizer(tokenizer_object=backend, chat_template=TEMPLATES[family], **overrides)
