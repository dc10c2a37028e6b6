"""Which names of keys, variables, headers and flags hold a secret. Pure."""

import re

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
SECRET_WORD = re.compile(
    "accesskey|accesstoken|apikey|auth|authorization|authtoken|bearer|cookie|credentials?"
    "|passphrase|passwd|passwords?|privatekey|pwd|secrets?|secretkey|token|webhook"
)
"""A name that ends with one of these words holds a secret."""
KEY_OWNER = re.compile(
    "access|account|anthropic|api|auth|aws|azure|client|cohere|deepseek|deploy|encryption|gcp"
    "|github|google|hf|huggingface|license|master|mistral|openai|private|secret|service|signing"
    "|ssh|storage|stripe|subscription|wandb"
)
"""``openai_key`` holds a secret, ``sort_key`` does not."""
ORDINARY_KEY = re.compile("foreign|primary|public|sort")
"""In capitals, as environment variables are, every ``..._KEY`` but these holds a secret."""
WORKING_DIRECTORY = "PWD"
"""As shells call it in the environment; a key ``pwd`` holds a password."""
SPECIAL_TOKEN = re.compile(
    "additional|audio|bos|cls|end|eos|first|image|last|mask|next|pad|per|sep|special|start|stop"
    "|think|unk|video"
)
"""``pad_token`` is a text of the vocabulary, and ``experts_per_token`` counts."""


def is_secret(name: str) -> bool:
    """Whether a name is one of a secret: ``HF_TOKEN``, ``x-api-key``, ``dbPassword``, ``MY_KEY_2``.

    The last words tell: ``max_tokens``, ``tokenizer`` and ``num_key_value_heads`` are none.
    """
    if name == WORKING_DIRECTORY:
        return False
    found = _WORD.findall(name)
    while found and found[-1].isdigit():
        found.pop()
    if not found:
        return False
    last, before = found[-1].lower(), (found[-2].lower() if len(found) > 1 else "")
    if last in ("key", "keys"):
        in_capitals = found[-1].isupper() and len(found) > 1
        is_ordinary = bool(ORDINARY_KEY.fullmatch(before))
        return bool(KEY_OWNER.fullmatch(before)) or (in_capitals and not is_ordinary)
    if last == "token":
        return not SPECIAL_TOKEN.fullmatch(before)
    return bool(SECRET_WORD.fullmatch(last)) or (before == "webhook" and last == "url")
