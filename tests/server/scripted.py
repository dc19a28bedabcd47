"""An engine that replies with a given text, a piece of it with each token."""

from __future__ import annotations

from dataclasses import replace

from echo import EchoEngine


class ScriptedEngine(EchoEngine):
    """The text of each sequence is `script`, `stride` characters per token; the sequence ends with the script."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.script, self.stride = "", 1
        self.prompts: list[list[int]] = []
        self.params: list = []

    def set_script(self, script: str, stride: int = 1) -> None:
        self.script, self.stride = script, stride
        self.prompts.clear()
        self.params.clear()

    def _queue(self, request_id, prompt, params, drawn, salt):
        self.prompts.append(prompt)
        self.params.append(params)
        length = max(1, -(-len(self.script) // self.stride))
        asked = params.max_tokens
        super()._queue(
            request_id, prompt, replace(params, max_tokens=length if asked is None else min(asked, length)), drawn, salt
        )

    def _output(self, request):
        before = [one.num_sent for one in request.sequences]
        output = super()._output(request)
        for one, first in zip(output.outputs, before, strict=True):
            last = first + len(one.token_ids)
            one.text = self.script[first * self.stride : last * self.stride]
            if one.finish_reason == "length" and last * self.stride >= len(self.script):
                one.finish_reason = "stop"
        return output
