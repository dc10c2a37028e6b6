"""Finds stop strings in a response, and its text without what ended it."""

import re
from collections.abc import Sequence

from rltrain.data.prompts import Tokenizer
from rltrain.rollout.requests import Rollout

STOP_STRINGS = "stop_strings"
"""The key of a request's stop strings in ``extra_args`` of vLLM's sampling parameters."""
MARGIN = 4
"""Characters. Text decoded without the tokens before it may begin differently."""
UNREAD = "\ufffd"
"""Decoders write it for one or more bytes that are no complete character."""
BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token of one byte, as Llama 2, Mixtral and Gemma have them. A run of such tokens is read as a
whole: where one byte does not fit, no character of the run is."""


class StopStrings:
    """Finds the first stop string that is complete in a response.

    A response's text is that of its tokens, special ones included. No string holds U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._tokenizer = tokenizer
        self._longest = max(map(len, self.stops))
        self._last = {stop[-1] for stop in self.stops}
        self._may_end: dict[int, bool] = {}
        self._bytes: dict[int, bool] = {}

    def end(self, before: Sequence[int], new: Sequence[int]) -> tuple[str | None, int]:
        """The string that is complete first, and the number of new tokens up to it; or None, 0.

        Args:
            before: the tokens so far, in which no string is complete
        """
        for count, token in enumerate(new, 1):
            if self._can_end(token) and (stop := self._ended([*before, *new[:count]])):
                return stop, count
        return None, 0

    def _can_end(self, token: int) -> bool:
        """Whether this token may contain the last character of a stop string."""
        if token not in self._may_end:
            # Decode it twice, because the first token of a text may lose a space.
            text = _decoded(self._tokenizer, [token, token], skip_special_tokens=False)
            self._may_end[token] = UNREAD in text or any(last in text for last in self._last)
        return self._may_end[token]

    def _ended(self, tokens: Sequence[int]) -> str | None:
        """The string that the last token completes: the first one, and of those the longest."""
        text = _decoded(self._tokenizer, tokens[self._start(tokens) :], skip_special_tokens=False)
        endings = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self.stops]
        return min((ending for ending in endings if ending[2] in text), default=(0, 0, None))[2]

    def _start(self, tokens: Sequence[int]) -> int:
        """The first token to decode, so that a string that the last token completes is whole."""
        start = len(tokens) - self._longest - MARGIN
        while start > 0:
            if self._is_byte(tokens[start]):
                start -= 1
                continue
            before = _decoded(self._tokenizer, tokens[start:-1], skip_special_tokens=False)
            unread = before.count(UNREAD)
            # A character of UTF-8 has at most 4 bytes.
            if len(before) - unread + unread // 4 >= self._longest + MARGIN:
                return start
            start -= len(tokens) - start
        return 0

    def _is_byte(self, token: int) -> bool:
        if token not in self._bytes:
            piece = self._tokenizer.convert_ids_to_tokens(token)
            self._bytes[token] = BYTE.fullmatch(str(piece)) is not None
        return self._bytes[token]


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
            " [RL3006]"
        )
    kept, cut = raw[: raw.index(stop)], raw[raw.index(stop) :]
    if not clean.endswith(cut):
        for special in tokenizer.all_special_tokens:
            cut = cut.replace(special, "")
    return kept, clean.removesuffix(cut)


def _decoded(tokenizer: Tokenizer, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The exact text: some tokenizers would remove spaces before punctuation."""
    return tokenizer.decode(
        tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
