"""Where a response ends, and its text without what ended it."""

from collections.abc import Sequence

from rltrain.data.prompts import Tokenizer
from rltrain.rollout.types import Rollout


def response_texts(tokenizer: Tokenizer, rollout: Rollout) -> tuple[str, str]:
    """The text of a response as it was sampled, and without the tokenizer's special tokens.

    Neither has the stop token or the stop string that ended it.

    Raises:
        ValueError: the stop string that ended it is not in its text.
    """
    tokens, stop = rollout.response_tokens, rollout.stop_string
    if rollout.finish_reason == "stop" and stop is None:
        tokens = tokens[:-1]
    raw, clean = (_decoded(tokenizer, tokens, skip_special_tokens=skip) for skip in (False, True))
    if stop is None:
        return raw, clean
    if stop not in raw:
        raise ValueError(
            f"a response that ended at the stop string {stop!r} reads {raw[-80:]!r}: expected it "
            "there; the engine's tokenizer is not that of the run"
        )
    cut = raw[raw.index(stop) :]
    for special in tokenizer.all_special_tokens:
        cut = cut.replace(special, "") if cut not in clean else cut
    return raw[: raw.index(stop)], clean.removesuffix(cut)


def _decoded(tokenizer: Tokenizer, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text exactly: some tokenizers would take out spaces before punctuation."""
    return tokenizer.decode(
        tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
