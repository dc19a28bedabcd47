"""The parser of the command line: errors that suggest a name, and a --help that fits some screens."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

USAGE_ERROR = 2
"""Exit code."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviated flags; an error is two lines and suggests the nearest name.

    Options that `shorten` names have their first sentence in --help, and rare ones are left out; --help-all shows all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._rare: list[argparse.Action] = []
        self._shortened: list[argparse.Action] = []
        """Options of which --help shows the first sentence, rare ones among them."""

    def shorten(self, action: argparse.Action, *, is_rare: bool) -> None:
        """--help shows the first sentence of an option's text, or leaves the option out where it is rare."""
        if "--help-all" not in self._option_string_actions:
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options, with all of their texts")
        self._shortened.append(action)
        if is_rare:
            self._rare.append(action)

    def format_help(self) -> str:
        if not self._rare:
            return super().format_help()
        texts = [(action, action.help) for action in self._shortened]
        usage, self.usage = self.usage, f"{self.prog} [OPTION ...]{self._positionals_text()}"
        for action, text in texts:
            action.help = argparse.SUPPRESS if action in self._rare else _first_sentence(text)
        try:
            shown = super().format_help()
        finally:
            self.usage = usage
            for action, text in texts:
                action.help = text
        return f"{shown}\n{len(self._rare)} further options: {self.prog} --help-all\n"

    def format_all_help(self) -> str:
        """The help text with every option."""
        return super().format_help()

    def _positionals_text(self) -> str:
        names = [(str(one.metavar or one.dest), one.nargs) for one in self._get_positional_actions()]
        return "".join(f" [{name}]" if nargs == "?" else f" {name}" for name, nargs in names)

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            message += _nearest(wrong[1], re.findall(r"'(.*?)'", wrong[2]))
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error for unknown arguments."""
        flags = [text.split("=")[0] for text in unknown if text.startswith("-") and text != "-"]
        if not flags:
            self.error(f"unexpected argument {unknown[0]!r}")
        self.error(f"unknown option {flags[0]!r}" + _nearest(flags[0], self._option_string_actions))


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_all_help(), end="")
        parser.exit()


def _first_sentence(text: str | None) -> str | None:
    """The first sentence of an option's text, and its default."""
    if text is None or text == argparse.SUPPRESS:
        return text
    default = re.search(r" \((default|chosen) [^()]*\)$", text)
    ending = "" if default is None else default[0]
    without_asides = re.sub(r" \([^()]{30,}\)", "", text.removesuffix(ending))
    return re.split(r"[.;] ", without_asides, maxsplit=1)[0].removesuffix(".") + ending


def _nearest(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
