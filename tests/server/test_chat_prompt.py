"""Messages to token ids: the template's text, turns with their sampled tokens, a continued last message."""

from __future__ import annotations

from server_case import END, START, tokenizer

from megatron_infer.server.body_types import Message, TextPart
from megatron_infer.server.chat_prompt import prompt_ids


def text_of(ids):
    return tokenizer().decode(ids, skip_special=False)


def ids_of(*turns, **options):
    return prompt_ids(tokenizer(), [Message(role=role, **fields) for role, fields in turns], **options)


USER = ("user", {"content": "Hi"})


def test_text_parts_and_developer_are_what_templates_know():
    parts = [TextPart(text="one"), TextPart(text="two")]
    ids = ids_of(("developer", {"content": parts}), USER)
    head = "<|im_start|>system\none\ntwo<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert text_of(ids) == head + "<|im_start|>assistant\n"
    assert text_of(ids_of(USER, variables={"opening": "So"})).endswith("assistant\nSo")


def test_sampled_tokens_take_the_place_of_their_turn_with_one_end_token():
    drawn = [65, 300, 66]
    for given, ended in ((drawn, [END]), ([*drawn, END], [])):
        ids = ids_of(USER, ("assistant", {"content": "other words", "generation_token_ids": given}), USER)
        place = ids.index(300)
        assert ids[place - 1 : place + 2] == drawn and ids[place + 2] == END
        assert ids[place - 1 :][: len(given) + len(ended)] == given + ended
        assert ids.count(END) == 3
    kept = ids_of(USER, ("assistant", {"content": "words", "generation_token_ids": drawn}), USER, keep_tokens=False)
    assert 300 not in kept and "words" in text_of(kept)


def test_prompt_ids_of_a_turn_replace_all_before_it():
    first = [START, 1, 2, 3]
    turn = {"content": "x", "prompt_token_ids": first, "generation_token_ids": [9, END]}
    ids = ids_of(USER, ("assistant", turn), ("user", {"content": "Go on"}))
    assert ids[:6] == [*first, 9, END] and text_of(ids[6:]) == (
        "\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_last_message_is_continued_exactly():
    ids = ids_of(USER, ("assistant", {"content": "Well, "}), add_generation_prompt=False, continue_final=True)
    assert text_of(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, "
    turn = ("assistant", {"content": "Well", "generation_token_ids": [300, 301]})
    ids = ids_of(USER, turn, add_generation_prompt=False, continue_final=True)
    assert ids[-2:] == [300, 301]
