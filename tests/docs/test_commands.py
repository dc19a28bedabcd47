"""Every block says what it is, and every command line names commands, flags, files and extras that are there."""

from __future__ import annotations

import re

from command_lines import wrong
from pages import LANGUAGES, all_blocks


def test_every_block_has_a_language_and_text_is_no_code():
    for block in all_blocks():
        place = f"{block.page}:{block.line}"
        assert block.language in LANGUAGES, f"{place}: {block.language or 'no language'}"
        if block.language == "text":
            found = re.search(r"^(\$ |(megatron-infer|torchrun|python|curl|import|from) \w)", block.text, re.M)
            assert not found, f"{place}: {found[0]}"


def test_command_lines_would_be_taken():
    found = [(block.page, block.line, command) for block in all_blocks() for command in block.commands]
    refused = [(*one, why) for one in found if (why := wrong(one[2])) is not None]
    assert len(found) > 40 and not refused
