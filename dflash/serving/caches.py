"""The prompt caches that a server keeps between requests."""

from typing import TYPE_CHECKING

from mlx_lm.models.cache import LRUPromptCache

if TYPE_CHECKING:
    from ..generate import DFlashSpeculativeDecoder
    from ..prompts.prompt_cache import PromptCache

UNKNOWN = -1
"""A token that no text has, so that the last one of a prompt is never found."""
MODEL = "served"
"""mlx-lm's caches are of a model by name; here they are all of the one that is served."""


class PromptCaches(LRUPromptCache):
    """mlx-lm's store of prompt caches, by the tokens that they hold."""

    def keep(self, cache: "PromptCache", kind: str = "assistant") -> None:
        """Keep a cache, unless it is empty; ``kind`` is what mlx-lm calls the end of its tokens."""
        if cache.tokens:
            self.insert_cache(MODEL, cache.tokens, [cache], cache_type=kind)

    def take(self, decoder: "DFlashSpeculativeDecoder", tokens: list[int]) -> "PromptCache":
        """A copy of the one that holds most of ``tokens`` but the last, or a new one."""
        caches, _ = self.fetch_nearest_cache(MODEL, [*tokens[:-1], UNKNOWN])
        return caches[0] if caches else decoder.make_prompt_cache()
