"""The chat page, clicked through."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.fake import FakeServer

ROOT = Path(__file__).parents[2]
HOSTILE = (
    '<img src=x onerror="window.broken=1"><script>window.broken=1</script> <b>bold</b>\n\n'
    "[link](javascript:window.broken=1) <svg/onload=window.broken=1> &amp; ```\n</code></pre><script>window.broken=1"
)
Open = Callable[..., Any]


def send(page: Any, text: str) -> None:
    page.fill("#draft", text)
    page.press("#draft", "Enter")


def done(page: Any) -> None:
    page.wait_for_selector("#send:not([hidden])")


def ask(page: Any, text: str) -> None:
    send(page, text)
    done(page)


def slide(page: Any, name: str, value: float) -> None:
    move = "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }"
    page.locator(f"[name={name}]").evaluate(move, value)


def replies(page: Any) -> list[str]:
    return page.locator(".message.assistant .text").all_inner_texts()


def test_a_reply_streams_and_is_kept(fake: FakeServer, open_page: Open) -> None:
    fake.replies = [["One", "<gate>", " two"]]
    page = open_page(fake.url)
    send(page, "Count")
    page.get_by_text("One", exact=True).wait_for()  # it shows before the reply is complete
    assert page.locator(".message.busy").count() == 1 and page.locator("#send").is_hidden()
    fake.gate.set()
    done(page)
    assert replies(page) == ["One two"] and page.locator(".message.busy").count() == 0
    assert page.locator("#said").inner_text() in ("", "Reply: One two")
    page.wait_for_selector("#said:has-text('Reply: One two')")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert replies(page) == ["One two"] and page.locator(".conversations .open").all_inner_texts() == ["Count"]
    ask(page, "And on")
    assert [m["content"] for m in fake.asked[-1]["messages"]] == ["Count", "One two", "And on"]


def test_stop_ends_the_reply_and_the_server_sees_it(fake: FakeServer, open_page: Open) -> None:
    fake.replies = [["Some", "<gate>", " more"]]
    page = open_page(fake.url)
    send(page, "Go")
    page.get_by_text("Some", exact=True).wait_for()
    page.click("#stop")
    done(page)
    assert fake.gone.wait(10), "the server has kept the row"
    assert replies(page) == ["Some"] and page.locator(".note").inner_text() == "Stopped."
    fake.gone.clear()
    send(page, "Again")
    page.locator(".message.busy").get_by_text("Some").wait_for()
    page.keyboard.press("Escape")
    done(page)
    assert fake.gone.wait(10)


def test_regenerate_edit_and_branches(fake: FakeServer, open_page: Open) -> None:
    fake.replies = [["first"], ["second"], ["third"]]
    page = open_page(fake.url)
    ask(page, "Question")
    page.get_by_label("Regenerate this reply").click()
    done(page)
    assert replies(page) == ["second"] and page.locator(".assistant .branch").inner_text() == "2 / 2"
    page.get_by_label("Earlier version").click()
    assert replies(page) == ["first"]
    page.get_by_label("Edit this message").click()
    page.locator(".edit textarea").fill("Another question")
    page.locator(".edit").get_by_text("Send").click()
    done(page)
    assert replies(page) == ["third"] and [m["content"] for m in fake.asked[-1]["messages"]] == ["Another question"]
    page.reload()
    page.wait_for_selector("html[data-ready]")
    page.get_by_label("Earlier version").click()
    assert page.locator(".user .text").inner_text() == "Question" and replies(page)[0] in ("first", "second")


@pytest.mark.parametrize("inside", [False, True])
def test_html_and_scripts_are_shown_as_text(inside: bool, fake: FakeServer, open_page: Open) -> None:
    fake.replies = [[HOSTILE[:60], HOSTILE[60:]]]
    page = open_page(fake.url)
    if inside:
        page.click("#inside-switch")
    ask(page, HOSTILE)
    shown = page.locator(".message.assistant .text").inner_text()
    for part in (
        "<script>window.broken=1",
        'onerror="window.broken=1"',
        "<b>bold</b>",
        "javascript:window.broken=1",
        "&amp;",
    ):
        assert part in shown, part
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".message .text").locator("img, script, a, b, svg").count() == 0
    assert page.evaluate("window.broken") is None
    assert page.locator(".user .text").inner_text().startswith("<img src=x")


def test_light_markdown(fake: FakeServer, open_page: Open) -> None:
    fake.replies = [["# Title\n\nSome **bold** and *italic* and `code`.\n\n- one\n- two\n\n```\na < b\n```\n2 * 3 * 4"]]
    page = open_page(fake.url)
    ask(page, "Show")
    text = page.locator(".message.assistant .text")
    assert text.locator("h3").inner_text() == "Title" and text.locator("strong").inner_text() == "bold"
    assert text.locator("em").all_inner_texts() == ["italic"] and text.locator("p code").inner_text() == "code"
    assert text.locator("li").all_inner_texts() == ["one", "two"] and text.locator("pre").inner_text() == "a < b"


FAILURES = [
    ([500], "failed with 500"),
    ([429], "failed with 429. Try again in 7 s."),
    (["half", "<error>"], "the middle failed"),
    (["half", "<cut>"], "The connection broke before the reply was complete."),
]


@pytest.mark.parametrize(("reply", "message"), FAILURES, ids=["500", "429", "error in the middle", "cut"])
def test_an_error_is_said_and_can_be_tried_again(
    reply: list[Any], message: str, fake: FakeServer, open_page: Open
) -> None:
    fake.replies = [reply, ["good"]]
    page = open_page(fake.url, expect=("Failed to load resource",))
    ask(page, "Try")
    assert page.locator("#problem[role=alert]").inner_text().startswith(message)
    assert replies(page) == (["half"] if reply[0] == "half" else [])
    page.get_by_role("button", name="Try again").click()
    page.locator(".message.assistant").get_by_text("good").wait_for()
    done(page)
    assert replies(page) == ["good"] and page.locator("#problem").is_hidden()


def test_a_server_that_is_gone_and_one_that_wants_a_key(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url, expect=("Failed to load resource",))
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Anyone")
    assert "does not answer" in page.locator("#problem").inner_text()
    page.unroute("**/v1/chat/completions")
    fake.replies = [[401], ["in"]]
    ask(page, "Now")
    page.get_by_text("Enter a key").click()
    assert page.evaluate("document.activeElement.name") == "key"
    page.keyboard.type("secret")
    page.keyboard.press("Tab")
    ask(page, "Again")
    assert replies(page)[-1] == "in" and fake.asked[-1]["authorization"] == "Bearer secret"
    assert "secret" not in page.evaluate("JSON.stringify({...localStorage})")


def test_what_no_longer_fits_the_context_is_left_out(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url, expect=("Failed to load resource",))
    ask(page, "one")
    fake.codes[400] = {"message": "130 tokens, the context has 128", "code": "context_length_exceeded"}
    fake.replies = [[400], ["fits"]]
    ask(page, "two")
    assert replies(page)[-1] == "fits" and [m["content"] for m in fake.asked[-1]["messages"]] == ["two"]
    assert "2 oldest messages" in page.locator(".note").inner_text()
    fake.replies = [[400]]
    page.click("#new")
    ask(page, "a single long one")
    assert "130 tokens, the context has 128" in page.locator("#problem").inner_text()


def test_settings_are_sent_and_kept(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url)
    page.click("#settings-switch")
    for name, value in (
        ("system", "Be brief."),
        ("top_k", "40"),
        ("max_tokens", "12"),
        ("seed", "7"),
        ("drafts", "2"),
        ("repetition_penalty", "1.1"),
        ("stop", "END\nHALT"),
    ):
        page.fill(f"[name={name}]", value)
    slide(page, "temperature", 0.3)
    for _ in range(2):
        ask(page, "Hi")
        sent = fake.asked[-1]
        assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
        expected = {
            "temperature": 0.3,
            "top_k": 40,
            "max_tokens": 12,
            "seed": 7,
            "repetition_penalty": 1.1,
            "top_p": 1,
            "min_p": 0,
            "stop": ["END", "HALT"],
            "stream": True,
        }
        assert {key: sent[key] for key in expected} == expected
        assert sent["tinyforge"] == {"look_inside": False, "top": 5, "drafts": 2}
        page.reload()
        page.wait_for_selector("html[data-ready]")
    page.click("#settings-switch")
    page.fill("[name=top_k]", "-3")  # out of range: not taken
    page.click("#settings-close")
    ask(page, "Hi")
    assert fake.asked[-1]["top_k"] == 40


def test_the_models_own_settings_until_the_user_changes_one(fake: FakeServer, open_page: Open) -> None:
    """Also those that another model sets later; the one that was changed is kept."""
    page = open_page(fake.url)

    def sent() -> dict[str, Any]:
        ask(page, "Hi")
        names = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "repetition_penalty")
        return {name: fake.asked[-1][name] for name in names if name in fake.asked[-1]}

    plain = {"temperature": 0.8, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert sent() == plain
    fake.about["sampling"] = {"temperature": 1.0, "min_p": 0.05, "max_tokens": 60}
    page.reload()
    page.wait_for_selector("html[data-ready]")
    own = {**plain, "temperature": 1, "min_p": 0.05, "max_tokens": 60}
    assert sent() == own
    page.click("#settings-switch")
    assert page.locator("label:has([name=temperature]) output").inner_text() == "1.00"
    slide(page, "temperature", 0.8)  # what another model's default is
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert sent() == {**own, "temperature": 0.8}
    fake.about["sampling"] = {"temperature": 0.6, "top_k": 20}
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert sent() == {**plain, "top_k": 20}
    page.click("#settings-switch")
    page.click("#defaults")
    assert sent() == {**plain, "temperature": 0.6, "top_k": 20}


def test_a_look_inside(fake: FakeServer, open_page: Open) -> None:
    fake.replies = [["left", " right"]]
    page = open_page(fake.url, width=1500)
    page.click("#inside-switch")
    ask(page, "Which side is it")
    assert fake.asked[-1]["tinyforge"]["look_inside"] is True
    tokens = page.locator(".tok")
    assert tokens.all_text_contents() == ["left", " right"]
    assert page.locator(".tok.drafted").all_text_contents() == [" right"]
    tokens.nth(1).click()
    panel = page.locator("#token")
    assert "60.0 %" in panel.inner_text() and "draft head 1" in panel.inner_text() and "refused" in panel.inner_text()
    assert panel.locator(".cand").count() == 4
    assert "4 of 5" in page.locator("#passes").inner_text() and "5 passes" in page.locator("#passes").inner_text()
    page.locator("#heat:not([hidden])").wait_for()
    assert page.locator("#layer option").count() == 2 and page.locator("#head option").count() == 3
    page.wait_for_selector("#heat-said:has-text('the head attended to')")
    with page.expect_request("**/v1/attention") as asked:
        page.select_option("#head", "2")
    assert asked.value.post_data_json["head"] == 2
    assert asked.value.post_data_json["messages"][-1] == {"role": "assistant", "content": "left right"}
    tokens.nth(1).focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.textContent") == "left" and "Token 1 of 2" in panel.inner_text()
    page.locator("#heat").focus()
    page.keyboard.press("ArrowUp")
    page.wait_for_selector("#heat-said:has-text('of its attention to')")
    page.click("#inside-close")
    assert page.locator(".tok").count() == 0 and replies(page) == ["left right"]


def test_a_look_inside_a_reply_that_is_there(fake: FakeServer, open_page: Open) -> None:
    """The server scores its tokens: of replies made before the panel was open, and of those of a reloaded page."""
    fake.replies = [["unlikely words"]]
    page = open_page(fake.url, width=1440)
    ask(page, "one")
    ask(page, "two")
    page.click("#inside-switch")
    page.wait_for_selector(".tok")
    assert page.locator(".tok").all_inner_texts() == ["unlikely", " words"]
    scored = fake.asked[-1]
    assert scored["tinyforge"]["score"] and [m["role"] for m in scored["messages"]] == ["user", "assistant"] * 2
    page.get_by_label("Look inside this reply").first.click()
    page.locator(".tok").nth(3).wait_for()  # wait_for_function evaluates texts, which the page's policy forbids
    assert page.locator(".tok").count() == 4
    page.reload()
    page.wait_for_selector(".tok")
    page.locator(".tok").nth(1).click()
    assert "Token 2 of 2" in page.locator("#token").inner_text() and page.locator("#passes").is_hidden()
    page.wait_for_selector("#heat-said:has-text('the head attended to')")
    assert page.locator("#rows span").count() > 3 and page.locator("#columns span").first.is_visible()
    bar, heat = page.locator("#rows i").bounding_box(), page.locator("#heat").bounding_box()
    assert bar["y"] > heat["y"] and abs(bar["y"] + bar["height"] - heat["y"] - heat["height"]) < 1
    # The shades of a word's tokens touch.
    left, right = (page.locator(".tok").nth(i).bounding_box() for i in range(2))
    assert abs(left["x"] + left["width"] - right["x"]) < 0.5
    # Both panels leave room for the conversation.
    page.click("#settings-switch")
    assert page.locator("#inside").is_visible() and page.locator("#log").bounding_box()["width"] > 600


def test_a_reply_that_cannot_be_scored(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url, expect=("Failed to load resource",))
    ask(page, "one")
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "too long"}})
    )
    page.click("#inside-switch")
    page.wait_for_selector("#inside-hint:has-text('too long')")
    assert replies(page) == ["Hello there"]


def test_paragraphs_of_stories_and_lines_of_poems(fake: FakeServer, open_page: Open) -> None:
    prose = "One day a very small dog went to the park to play with a red ball."
    fake.replies = [[f"{prose}\n{prose}\n\n{prose}"], ["roses are red\nviolets are blue"]]
    page = open_page(fake.url)
    ask(page, "story")
    assert page.locator(".assistant .text p").all_inner_texts() == [prose] * 3
    tops = [page.locator(".assistant .text p").nth(i).bounding_box() for i in range(2)]
    assert tops[1]["y"] - tops[0]["y"] - tops[0]["height"] > 8
    ask(page, "poem")
    assert page.locator(".assistant").last.locator("p").all_inner_texts() == ["roses are red\nviolets are blue"]


def test_the_keyboard_alone_and_the_theme(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    done(page)
    assert fake.asked[-1]["messages"][-1]["content"] == "line one\nline two"
    for expected in ("light", "dark"):
        page.locator("#theme").press("Enter")
        assert page.locator("html").get_attribute("data-theme") == expected
    page.reload()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.locator("#settings-switch").press("Enter")
    page.keyboard.press("Escape")
    assert page.locator("#settings").is_hidden() and page.evaluate("document.activeElement.id") == "settings-switch"


def test_on_a_phone(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url, width=360, height=740)
    ask(page, "a" * 300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#history").is_hidden()
    page.get_by_role("button", name="Conversations", exact=True).click()
    page.locator("#history").wait_for(state="visible")
    page.click("#new")
    page.locator("#history").wait_for(state="hidden")
    page.click("#inside-switch")
    ask(page, "with the panel open")
    page.locator(".tok").nth(1).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.set_viewport_size({"width": 390, "height": 844})
    log, box, panel = (page.locator(name).bounding_box() for name in ("#log", "#composer", "#inside"))
    assert log["height"] > 200 and panel["height"] > 300 and box["y"] + box["height"] <= panel["y"] + 1
    page.locator("#draft").focus()
    for _ in range(100):
        if page.locator("#log").bounding_box()["height"] > 350:
            break
        page.wait_for_timeout(20)
    assert page.locator("#log").bounding_box()["height"] > 350


def test_conversations_are_listed_opened_and_deleted(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url)
    page.on("dialog", lambda dialog: dialog.accept())
    ask(page, "older")
    page.click("#new")
    ask(page, "newer")
    titles = page.locator(".conversations .open")
    assert titles.all_inner_texts() == ["newer", "older"]
    titles.nth(1).click()
    assert page.locator(".user .text").inner_text() == "older"
    page.get_by_label("Delete older").click()
    assert titles.all_inner_texts() == ["newer"] and page.locator("#welcome").is_visible()
    # What another program has left in the storage is no conversation.
    for name, text in (("tinyforge-talk-x", '{"nodes": 7}'), ("tinyforge-talk-y", "7"), ("tinyforge-settings", "[")):
        page.evaluate("([name, text]) => localStorage.setItem(name, text)", [name, text])
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert titles.all_inner_texts() == ["newer"]


def test_a_full_storage_drops_the_oldest_and_says_so(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url)
    for text in ("first", "second"):
        page.click("#new")
        ask(page, text)
    page.evaluate("""() => {
        const set = Storage.prototype.setItem;
        Storage.prototype.setItem = function (name, value) {
            const talks = Object.keys(this).filter((n) => n.startsWith("tinyforge-talk-") && n !== name);
            if (name.startsWith("tinyforge-talk-") && talks.length > 1)
                throw new DOMException("full", "QuotaExceededError");
            set.call(this, name, value);
        };
    }""")
    page.click("#new")
    ask(page, "third")
    assert page.locator(".conversations .open").all_inner_texts() == ["third", "second"]
    assert "1 of the oldest conversations were removed" in page.locator("#problem").inner_text()


def test_a_base_model_and_one_without_attention(fake: FakeServer, open_page: Open) -> None:
    fake.about |= {
        "chat": False,
        "template": "plain",
        "system_prompt": False,
        "attention": False,
        "layers": 0,
        "heads": 0,
        "most_drafts": 0,
    }
    page = open_page(fake.url)
    assert "continues it" in page.locator("#welcome").inner_text()
    page.click("#settings-switch")
    assert page.locator("[name=system]").is_disabled() and page.locator("#drafts-field").is_hidden()
    page.click("#settings-close")
    page.click("#inside-switch")
    ask(page, "Once")
    assert page.locator("#passes").is_visible() and page.locator("#attention").is_hidden()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_no_serious_fault(
    dark: bool, width: int, fake: FakeServer, open_page: Open, serious: Callable[[Any], list[str]]
) -> None:
    fake.replies = [["# Title\n\n`code`", " and\n\n```\nmore\n```"], [500]]
    page = open_page(fake.url, width=width, dark=dark, expect=("Failed to load resource",))
    assert serious(page) == []
    ask(page, "Something")
    assert serious(page) == []
    page.click("#inside-switch")
    page.get_by_label("Regenerate this reply").click()
    done(page)
    fake.replies = [["left", " right"]]
    page.locator("#problem button").first.click()
    page.locator(".tok").first.wait_for()
    done(page)
    page.locator(".tok").first.click()
    page.locator("#heat:not([hidden])").wait_for()
    assert serious(page) == []
    page.click("#inside-close")
    page.click("#settings-switch")
    assert serious(page) == []


def test_with_the_real_server_and_model(open_page: Open, tmp_path: Path) -> None:
    """The shipped model answers, drafts are accepted, and its attention is drawn."""
    if importlib.util.find_spec("tinyforge.serve.__main__") is None:
        pytest.skip("tinyforge.serve has no server here")
    command = [sys.executable, "-m", "tinyforge.serve", "--checkpoint", "small", "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            page = open_page(url + "/", width=1500)
            assert page.locator(".tries button").first.inner_text() == "How much is 13 plus 2?"
            page.click("#settings-switch")
            page.fill("[name=drafts]", "3")
            slide(page, "temperature", 0)
            page.click("#settings-close")
            page.click("#inside-switch")
            ask(page, "How much is 13 plus 2?")
            assert "".join(page.locator(".tok").all_text_contents()).strip() == "13 14 15, so 15"
            assert page.locator(".tok.drafted").count() > 0
            page.locator(".tok").nth(1).click()
            assert page.locator("#token .cand").count() == 6
            page.wait_for_selector("#heat-said:has-text('the head attended to')")
        finally:
            process.terminate()
            process.wait(20)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_pictures_of_readme_have_the_pages_words(dark: bool, browser: Any) -> None:
    from PIL import Image

    screenshots = runpy.run_path(str(ROOT / "docs/pictures/screenshots.py"))
    _, words = screenshots["chat"](browser, dark)
    with Image.open(ROOT / f"docs/pictures/chat{'-dark' if dark else ''}.png") as picture:
        assert picture.text["Words"] == words, "run python docs/pictures/screenshots.py"
    assert "Look inside" in words and "token that attends" in words
