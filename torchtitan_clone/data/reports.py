"""What is logged about a source that was prepared: its size, rows that were skipped, and special tokens in its text."""

import logging

from torchtitan_clone.data.sources import BadRows, Source
from torchtitan_clone.data.token_store import StoreMeta, TokenStore, inner_ends

logger = logging.getLogger("torchtitan_clone")


def report_prepared(source: Source, *, store: TokenStore, seconds: float, limit: int) -> None:
    """Logs what became of a source; `limit` is data.max_bad_rows."""
    meta, parses = store.meta, source.parse_special_tokens
    spelled = sum(meta.special_tokens.values())
    sizes = f"{sum(meta.documents.values()):,} documents, {meta.tokens['train']:,} tokens, and "
    sizes += f"{meta.tokens['validation']:,} tokens held out"
    sizes += f"; its text spells out {spelled:,} special tokens" if parses else ""
    sizes += f"; {sum(meta.targets.values()):,} of the tokens are targets" if meta.marks else ""
    logger.info("prepared %s in %.1f s: %s", meta.source, seconds, sizes)
    if meta.bad_rows:
        logger.warning("skipped %s", skipped_rows(meta, limit=limit).report())
    if meta.marks and spelled:
        rule = "which are encoded as their ids, as those of the chat template"
        logger.warning("the messages of %s spell out special tokens %s times, %s", source.name, f"{spelled:,}", rule)
    if meta.without_targets:
        logger.warning("%s: %s chats have no turn to train on and are left out", meta.source, meta.without_targets)
    if parses and (count := inner_ends(store)):
        rule = "each of which ends a document, beyond which attention does not reach (training.document_masking)"
        logger.warning("the text of %s spells out the end-of-text token %s times, %s", source.name, f"{count:,}", rule)
    elif spelled and not parses and not meta.marks:
        logger.warning("%s", describe_spelled(source.name, times=f" {spelled:,} times"))


def skipped_rows(meta: StoreMeta, *, limit: int) -> BadRows:
    """Returns the rows that were skipped when a store was made."""
    return BadRows(limit=limit, count=meta.bad_rows, first=meta.first_bad_rows)


def describe_spelled(name: str, *, times: str = "") -> str:
    """Returns that the text of a source spells out special tokens, and how to encode them as such."""
    rule = "which are encoded as characters; set parse_special_tokens to true to encode them as their ids"
    return f"the text of {name} spells out special tokens{times}, {rule}"
