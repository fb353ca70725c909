"""The page at `/`, in Chromium: what users see and do, and that it talks to its own server only."""

import urllib.parse

import chromium
import fake_engine
import http_server
import pytest

TEXT = fake_engine.TEXT
MARKUP = "<img src='//other.invalid/x' onerror='document.title = 1'><b>bold</b><script>document.title = 2</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium.page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def visit(browser, serve):
    """Starts a server and opens its page, which has asked for nothing else in the end."""
    servers = []

    def start(*, ready=True, server_options=None, **options):
        server = serve(server_options=server_options, **options)
        servers.append(server)
        browser.open(f"{server.url}/")
        if ready:
            browser.wait("said !== undefined")
        return browser, server

    yield start
    hosts = {urllib.parse.urlsplit(url).netloc for url in browser.requests}
    assert hosts == {urllib.parse.urlsplit(servers[-1].url).netloc}
    assert not browser.violations


def send(page, text, key="Enter", modifiers=0):
    page.run("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press(key, modifiers)


def say(page, text):
    """Sends a text and waits for the whole answer."""
    send(page, text)
    page.wait("!running")


def contents(page, selector):
    return page.run(f"[...document.querySelectorAll({selector!r})].map((node) => node.textContent)")


def prompt_of(handle):
    return fake_engine.make_tokenizer().decode(handle.prompt)


def test_an_answer_streams_in_colors(visit):
    page, server = visit(endless=True, delay=0.02)
    send(page, "hello")
    page.wait("document.querySelectorAll('.turn .token').length > 12")
    assert page.run("Boolean(running) && document.querySelector('#send').hidden")
    page.press("Escape")
    page.wait("!running")
    text = page.text(".text:not(.thinking .text)")
    assert text.startswith(TEXT.rstrip()[:20])
    classes = page.run("[...document.querySelectorAll('.turn .token')].slice(0, 7).map((node) => node.className)")
    assert classes == [f"token {name}" for name in ("own", "d1", "d2", "own", "d1", "d2", "own")]
    assert "".join(contents(page, ".turn .token")) == page.run("said.at(-1).content")
    stats = page.text(".stats")
    assert "tokens/s" in stats and "accept length" in stats and stats.endswith("stopped")
    http_server.wait_for(lambda: server.engine.handles[0].cancelled)


def test_a_whole_answer_has_the_accept_length_of_the_server(visit):
    page, _ = visit()
    say(page, "hello")
    assert contents(page, ".turn .text") == ["", TEXT] and "".join(contents(page, ".turn .token")) == TEXT
    assert "accept length 2.00" in page.text(".stats")


def test_a_chat_of_several_turns(visit):
    page, server = visit()
    page.run("document.querySelector('[name=system]').value = 'Be brief.'")
    page.run("document.querySelector('[name=temperature]').value = '0.5'")
    say(page, "first")
    send(page, "second", "Enter", chromium.SHIFT)
    assert len(server.engine.handles) == 1
    page.type("line")
    page.press("Enter")
    page.wait("!running && said.length === 4")
    prompt = prompt_of(server.engine.handles[1])
    assert prompt == f"<system>Be brief.<user>first<assistant>{TEXT}<user>second\nline<assistant>"
    assert server.engine.handles[1].options["sampling"].temperature == 0.5
    page.click("#new")
    say(page, "third")
    assert prompt_of(server.engine.handles[2]) == "<system>Be brief.<user>third<assistant>"
    assert contents(page, ".user") == ["third"]


def test_a_model_without_a_chat_template_continues_the_text(visit):
    page, server = visit(template=None)
    assert "no chat template" in page.text("#empty")
    say(page, "def ")
    say(page, "x")
    assert [prompt_of(handle) for handle in server.engine.handles] == ["def ", f"def {TEXT}x"]
    assert server.engine.handles[0].options["max_new_tokens"] == 256 - len(server.engine.handles[0].prompt)
    assert contents(page, ".turn .text") == ["", TEXT] * 2


def test_thinking_is_apart_from_the_answer(visit):
    template = fake_engine.TEMPLATE + "{# <think> </think> #}"
    page, _ = visit(text=f"<think>first{TEXT}</think>\n\nthen", template=template)
    say(page, "hello")
    assert contents(page, ".turn .text") == [f"first{TEXT}".rstrip(), "then"]
    assert contents(page, ".turn .text .token")[-1] and page.run("said.at(-1).content") == "then"
    assert "".join(contents(page, ".thinking .token")) == f"first{TEXT}".rstrip()


def test_markup_of_a_model_is_text(visit):
    page, _ = visit(text=MARKUP)
    say(page, MARKUP)
    assert contents(page, ".user, .answer > .text") == [MARKUP, MARKUP]
    assert not page.run("document.querySelectorAll('#talk :is(img, b, script)').length")
    assert page.run("document.title") == "fake · jspec"


def test_the_same_prompt_with_and_without_drafts(visit):
    page, server = visit(delay=0.005)
    page.run("document.querySelector('[name=depth]').value = 1")
    send(page, "hello", "Enter", chromium.CTRL)
    page.wait("document.querySelector('.verdict')")
    page.wait("!running")
    first, second = server.engine.handles
    assert (first.options["speculation"].depth, second.options["speculation"].depth) == (1, 0)
    assert first.options["seed"] == second.options["seed"] and first.prompt == second.prompt
    assert contents(page, ".pair > .answer > .text") == [TEXT, TEXT]
    assert page.text(".verdict").startswith("The texts are the same. With drafts it is ")
    # The chat goes on with one of them, and Stop ends both.
    page.run("document.querySelector('[name=depth]').value = ''")
    server.engine.delay = 0.5
    send(page, "again", "Enter", chromium.CTRL)
    page.wait("running && document.querySelectorAll('.pair').length === 2")
    assert page.run("said.length") == 2
    http_server.wait_for(lambda: len(server.engine.handles) == 3)
    assert server.engine.handles[2].options["speculation"] is None
    page.click("#stop")
    page.wait("!running")
    assert len(server.engine.handles) == 3 and page.run("document.querySelectorAll('.verdict').length") == 1


def test_log_probabilities_by_pointer_and_by_keyboard(visit):
    page, _ = visit()
    page.click("#logprobs")
    say(page, "hello")
    page.point(".answer > .text .token")
    page.wait("!document.querySelector('#tip').hidden")
    first = contents(page, ".token")[0]
    tip = page.text("#tip")
    assert first in tip and "target’s own, log-probability -0.500" in tip and "60.7%" in tip
    assert page.run("document.querySelectorAll('#tip tr').length") == 5
    page.run("document.querySelector('.answer > .text').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert "accepted draft, depth 1" in page.text("#tip") and contents(page, ".current")[0]
    page.press("Escape")
    assert page.run("document.querySelector('#tip').hidden")


def test_errors_are_sentences(visit):
    page, server = visit()
    page.run("document.querySelector('[name=max_tokens]').value = 5000")
    say(page, "hello")
    count = 256 - len(fake_engine.make_tokenizer().chat([{"role": "user", "content": "hello"}]))
    sentence = f"max_tokens=5000 must be at most {count} after a prompt of {256 - count} tokens."
    assert page.text(".error") == f"The server refuses this: {sentence}"
    # The text is there to be sent again.
    assert page.run("document.querySelector('#prompt').value") == "hello" and page.run("said.length") == 0
    page.run("document.querySelector('[name=max_tokens]').value = ''")
    page.press("Enter")
    page.wait("!running && said.length")
    server.end()
    server.join()
    say(page, "again")
    assert contents(page, ".error")[1] == "The server cannot be reached. Does it still run?"


def test_an_error_in_mid_stream_is_a_sentence(visit):
    page, _ = visit(broken_after=9)
    say(page, "hello")
    assert page.text(".error") == "The server failed: the engine failed: the device is gone."
    assert page.run("said.at(-1).content") and not page.run("document.querySelector('.busy')")


def test_it_asks_for_the_key(visit):
    page, server = visit(ready=False, server_options={"api_keys": ["sécret"]})
    for key, wrong in (("other", True), ("sécret", False)):
        page.wait("document.querySelector('#ask').open")
        assert page.run("document.activeElement.id") == "key"
        page.type(key)
        page.press("Enter")
        if wrong:
            page.wait("!document.querySelector('#key-error').hidden")
    page.wait("said !== undefined && !document.querySelector('#ask').open")
    say(page, "hello")
    assert contents(page, ".answer > .text") == [TEXT]
    assert page.run("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    page.click("#forget")
    page.wait("document.querySelector('#ask').open && !sessionStorage.length")


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_screen_does_not_scroll_sideways(visit, dark):
    page, _ = visit(text="x" * 300 + TEXT)
    page.resize(320, 568, dark=dark)
    say(page, "y" * 300)
    for _ in range(2):
        assert page.run("document.documentElement.scrollWidth") == 320
        assert page.run("[...document.querySelectorAll('#talk *')].every((node) => node.scrollWidth <= 320)")
        page.click("#open")
    assert page.run("document.querySelector('#settings').checkVisibility()") is False
    assert page.run("matchMedia('(prefers-color-scheme: dark)').matches") is dark


def test_the_page_itself(serve):
    server = serve(server_options={"api_keys": ["key"]})
    answer = server.http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert "http:" not in answer.text and "https:" not in answer.text and "innerHTML" not in answer.text
    assert serve(server_options={"has_page": False}).http.get("/").status_code == 404
