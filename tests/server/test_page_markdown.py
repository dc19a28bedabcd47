"""Markdown of answers, as the page's own script reads it: what a text becomes, and what it can never become."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest
import quickjs
from hostile_markdown import ATTACKS, HUGE, SHOWCASE, TAGS
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPT = (resources.files("megatron_infer.server") / "static" / "markdown.js").read_text(encoding="utf-8")
A = "<li><p>a</p>"
ATTRIBUTES = {"tag", "children", "href", "host", "start", "language", "align"}


@pytest.fixture(scope="module")
def nodes():
    """text -> the nodes that it becomes."""
    context = quickjs.Context()
    context.set_time_limit(3)  # of each text; what takes time by the square of its length takes longer
    context.eval(re.sub(r"^export ", "", SCRIPT, flags=re.MULTILINE))
    context.eval("function treeOf(text) { return JSON.stringify(parse(JSON.parse(text)).map((block) => block.node)); }")
    tree_of = context.get("treeOf")
    return lambda text: json.loads(tree_of(json.dumps(text)))


def every(nodes):
    for node in nodes:
        yield node
        if not isinstance(node, str):
            yield from every(node["children"])


def text_of(nodes):
    return "".join(node for node in every(nodes) if isinstance(node, str))


def html(nodes):
    """As test cases write it."""

    def one(node):
        if isinstance(node, str):
            return node
        more = "".join(f" {name}={node[name]}" for name in ("href", "start", "language", "align") if node.get(name))
        return f"<{node['tag']}{more}>{''.join(map(one, node['children']))}</{node['tag']}>"

    return "".join(map(one, nodes))


def check(tree):
    for node in every(tree):
        if isinstance(node, str):
            continue
        assert node["tag"] in TAGS and set(node) <= ATTRIBUTES
        assert ("href" in node) == (node["tag"] == "a") and node.get("align", "") in ("", "right", "center")
        if node["tag"] == "a":
            assert re.fullmatch(r"(?i)https?://[a-z0-9.:\[\]-]+([/?#][^\s<>\"\\]*)?", node["href"])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("# Hi *x* ##\nand", "<h3>Hi <em>x</em></h3><p>and</p>"),
        ("***a*** __b__ ~~c~~", "<p><em><strong>a</strong></em> <strong>b</strong> <del>c</del></p>"),
        ("d_e_f 2 * 3 **open", "<p>d_e_f 2 * 3 **open</p>"),
        ("*a **b*** `*c*`", "<p><em>a <strong>b</strong></em> <code>*c*</code></p>"),
        ("``d`e`` `f", "<p><code>d`e</code> `f</p>"),
        ("\\``a`", "<p>`<code>a</code></p>"),
        (
            "3. a\n   - b\n   c\n4. e\n\nf",
            f"<ol start=3>{A}<ul><li><p>b\nc</p></li></ul></li><li><p>e</p></li></ol><p>f</p>",
        ),
        ("- a\n  ```py\n  x\n    y\n  ```", f"<ul>{A}<pre language=py>x\n  y</pre></li></ul>"),
        ("- a\n\n  b\n* c", f"<ul>{A}<p>b</p></li></ul><ul><li><p>c</p></li></ul>"),
        ("in\n1984. b\n***", "<p>in\n1984. b</p><hr></hr>"),
        ("> q\n> > r", "<blockquote><p>q</p><blockquote><p>r</p></blockquote></blockquote>"),
        (
            "a|b\n-|-:\n`c`|d\\|e|f\n",
            "<table><thead><tr><th>a</th><th align=right>b</th></tr></thead>"
            "<tbody><tr><td><code>c</code></td><td align=right>d|e</td></tr></tbody></table>",
        ),
        ("[a *b*](https://x.y/z_(w))", "<p><a href=https://x.y/z_(w)>a <em>b</em></a></p>"),
        ("see https://x.y/a_b_c.", "<p>see <a href=https://x.y/a_b_c>https://x.y/a_b_c</a>.</p>"),
        ("![cat](http://x.y/c.png) [c](/c)", "<p><a href=http://x.y/c.png>cat</a> [c](/c)</p>"),
        ("<http://x.y>", "<p><a href=http://x.y>http://x.y</a></p>"),
        ("\\*a\\* \\(x^2\\) <b>&lt;</b>", "<p>*a* \\(x^2\\) <b>&lt;</b></p>"),
        ("```\nnot closed\n\n**yet**", "<pre>not closed\n\n**yet**</pre>"),
    ],
)
def test_markdown_becomes_nodes(nodes, text, shown):
    assert html(nodes(text)) == shown


@pytest.mark.security
def test_hostile_texts_become_text_and_links_to_https_only(nodes):
    for text in (*ATTACKS, "\n".join(ATTACKS), "\n\n".join(ATTACKS), SHOWCASE):
        tree = nodes(text)
        check(tree)
        hrefs = [node["href"] for node in every(tree) if isinstance(node, dict) and "href" in node]
        assert not any("bank" in href for href in hrefs) and not any("script:" in href for href in hrefs), text
        assert text_of(tree).count("<script>") == text.count("<script>") - sum(h.count("<script>") for h in hrefs)


@pytest.mark.security
def test_link_says_where_it_leads_to(nodes):
    tree = nodes("[https://bank.example](https://bank.example.evil.example:81/x) https://a.example/b")
    assert [node["host"] for node in every(tree) if isinstance(node, dict) and node["tag"] == "a"] == [
        "bank.example.evil.example:81",
        "",
    ]


@pytest.mark.security
def test_long_hostile_texts_are_read_within_the_time_limit_and_nest_no_deeper_than_is_safe(nodes):
    for piece in HUGE:
        text = piece * (20_000 // len(piece))
        tree = nodes(text)
        assert sum(1 for _ in every(tree)) < 6 * len(text)
    assert text_of(nodes("> " * 200 + "deep")).endswith("deep") and text_of(nodes("- " * 200 + "deep")).endswith("deep")


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab*_~`#>-+|[]()!<\\ \n1.:"), max_size=80))
def test_no_word_is_lost_whatever_the_text(nodes, text):
    tree = nodes(text)
    check(tree)
    said = text_of(tree) + "".join(node.get("language", "") for node in every(tree) if isinstance(node, dict))
    assert sorted(re.findall("[ab]", said)) == sorted(re.findall("[ab]", text))
