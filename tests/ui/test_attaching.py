"""`@path`: which words of a message name files, and what is sent in their place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chatting import babbler, session
from command import run
from fake_terminal import FakeTerminal
from sirchat.errors import UsageError
from sirchat.ui.attaching import (
    attach_mentions,
    escape_mentions,
    split_leading_path,
)
from typed_chat import TypedChat

NOTES = "```notes.txt\nbuy milk\n```"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "notes.txt").write_text("buy milk\n", encoding="utf-8")
    (tmp_path / "a b.md").write_text("spaced", encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "Makefile").write_text("all:", encoding="utf-8")
    return tmp_path


def sent(text: str) -> tuple[str, list[str]]:
    """The message that is sent, and the notes."""
    notes: list[str] = []
    return attach_mentions(text, notes.append), notes


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("@notes.txt what is to do?", f"{NOTES}\n\nnotes.txt what is to do?"),
        ("sum up @notes.txt.", f"{NOTES}\n\nsum up notes.txt."),
        ("is it in @notes.txt?!", f"{NOTES}\n\nis it in notes.txt?!"),
        ("look\n@notes.txt\nplease", f"{NOTES}\n\nlook\nnotes.txt\nplease"),
        ("@notes.txt", NOTES),
        (" @notes.txt ", NOTES),
        ("@~/notes.txt and?", NOTES.replace("n", "~/n", 1) + "\n\n~/notes.txt and?"),
        ("@./notes.txt", NOTES.replace("n", "./n", 1)),
        ('@"a b.md" why', "```a b.md\nspaced\n```\n\na b.md why"),
        ('@"a b.md"', "```a b.md\nspaced\n```"),
        ("@'a b.md' why", "```a b.md\nspaced\n```\n\na b.md why"),
        (r"why @a\ b.md?", "```a b.md\nspaced\n```\n\nwhy a b.md?"),
        ("@notes.txt or @notes.txt", f"{NOTES}\n\nnotes.txt or notes.txt"),
        ("@notes.txt @Makefile", f"{NOTES}\n\n```Makefile\nall:\n```"),
        ("@notes.txt @anna", f"{NOTES}\n\nnotes.txt @anna"),
        # any other word stays as it is typed
        *((word, word) for word in ("hello @anna", "@docs", "a@notes.txt", "me@example.org", "@")),
        *((word, word) for word in ("(@notes.txt)", "@ notes.txt", "x@", '@"', "@...")),
        ("@anna, @bob!", "@anna, @bob!"),
    ],
)
def test_a_word_that_names_a_file_brings_its_text(typed: str, message: str) -> None:
    assert sent(typed) == (message, [])


@pytest.mark.parametrize("word", ["@note.txt", "@docs/none", '@"a c.md"', "@/no/where", "@a.b"])
def test_what_looks_like_a_path_and_is_missing_is_pointed_out(word: str) -> None:
    message, (note,) = sent(f"see {word}, ok")
    assert message == f"see {word}, ok"
    assert "there is no file" in note
    assert "so the name is sent as plain text" in note


def test_a_backslash_before_a_files_name_makes_it_a_mere_sign() -> None:
    assert sent(r"\@notes.txt and \@anna, \@array") == (r"@notes.txt and \@anna, \@array", [])
    assert sent(r"a\@b") == (r"a\@b", [])


@pytest.mark.parametrize(
    "text",
    ["@notes.txt @anna, @notes.txt", '@"a b.md"', "a\n@./docs/ b", "x@notes.txt", r"\@x", "@*.txt"],
)
def test_what_is_escaped_is_sent_as_it_was(text: str) -> None:
    assert sent(escape_mentions(text))[0] == text


def test_at_the_prompt_a_line_that_sent_a_file_can_be_erased(
    terminal: FakeTerminal, own_home: Path
) -> None:
    with TypedChat(terminal, babbler(), max_new_tokens=2) as chat:
        refusal = " ".join(chat.ask("see @docs/ please").split())
        assert "there is no file with text in docs/" in refusal
        assert chat.session.seen == 0
        chat.ask("@notes.txt who is it, in secret?")
        assert chat.said().startswith(NOTES)
        chat.ask("/erase last")
        assert "1 typed line erased" in chat.ask("/erase --yes")
    assert "in secret" not in (own_home / "state" / "history").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("@x.pdf", "x.pdf is a PDF, not text (pdftotext writes its text)"),
        ("@x.png", "x.png is an image, not text"),
        ("@x.docx", "x.docx is an archive or an office document, not text"),
        ("@./pics", "there is no file with text in ./pics"),
        ("@docs/", "there is no file with text in docs/"),
        ("@/dev/zero", "/dev/zero is "),
        ("@bin.dat", "bin.dat is not text: it contains NUL bytes"),
        ("@many/", "many/ has more than 100 files (name a part, such as 'src/*.py')"),
        ("@big/", "big/ has 1,048,578 bytes; allowed: up to 1,048,576 (name a part"),
    ],
)
def test_what_can_not_be_read_is_called_by_its_name(folder: Path, words: str, told: str) -> None:
    sources(folder)
    (folder / "x.pdf").write_bytes(b"%PDF-1.7\n%\xe2\xe3\n1 0 obj")
    (folder / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (folder / "x.docx").write_bytes(b"PK\x03\x04\x14\0")
    (folder / "bin.dat").write_bytes(b"\0")
    (folder / "pics").mkdir()
    (folder / "pics" / "pic.jpg").write_bytes(b"\xff\xd8\xff\xe0\0\x10JFIF")
    for name, count, size in (("many", 101, 1), ("big", 2, 2**19 + 1)):
        (folder / name).mkdir()
        for i in range(count):
            (folder / name / str(i)).write_text("x" * size, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        sent(f"see {words}")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_address_is_said_not_to_be_fetched() -> None:
    assert sent("see @https://a.example/b.html") == (
        "see @https://a.example/b.html",
        ["nothing is fetched, so the name is sent as plain text"],
    )


def sources(folder: Path) -> None:
    """A folder with files at two depths, of which one is blank and two are hidden."""
    for name in ("a.py", "sub/b.py", "sub/c.txt", "sub/blank.py", ".env", ".git/d.py"):
        path = folder / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n" if "blank" in name else f"in {path.name}", encoding="utf-8")


@pytest.mark.parametrize(
    ("named", "files"),
    [
        ("./src", ["a.py", "sub/b.py", "sub/c.txt"]),
        ("~/src/", ["a.py", "sub/b.py", "sub/c.txt"]),
        ("src/*.py", ["a.py"]),
        ("src/**/*.py", ["a.py", "sub/b.py"]),
        ("src/sub/[bc].*", ["sub/b.py", "sub/c.txt"]),
        ("s[r]c/**/*.py", ["a.py", "sub/b.py"]),
        ("*rc/s**/*.py", ["sub/b.py"]),
        ("[1]/src/**/*.py", ["a.py", "sub/b.py"]),
    ],
)
@pytest.mark.parametrize("form", ["@{}", '@"{}"', "@'{}'"])
def test_a_folder_and_a_pattern_bring_their_text_files(
    folder: Path, named: str, files: list[str], form: str
) -> None:
    sources(folder)
    sources(folder / "[1]")
    text = attach_mentions(f"Look at {form.format(named)}, please.", print)
    names = re.findall(r"(?m)^```(.+)$", text)
    assert [name.rpartition("src/")[2] for name in names] == files
    for name in names:
        assert f"```{name}\nin {Path(name).name}\n```" in text
    assert text.endswith(f"\n\nLook at {named}, please.")


@pytest.mark.parametrize("word", ["@*", "@?", "@*.none", "@src/*.rs", "@[a]", "@**", "@a*"])
def test_signs_that_match_no_file_or_are_no_path_are_plain_text(folder: Path, word: str) -> None:
    sources(folder)
    assert sent(f"see {word} here")[0] == f"see {word} here"


def test_a_file_that_speaks_of_files_brings_no_other(folder: Path) -> None:
    (folder / "a.txt").write_text("@notes.txt and so on", encoding="utf-8")
    assert sent("@a.txt")[0] == "```a.txt\n@notes.txt and so on\n```"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("notes.txt", ("notes.txt", "")),
        ("notes.txt  and   so", ("notes.txt", "and   so")),
        ('"notes.txt" so', ("notes.txt", "so")),
        (r"a\ b.md so", ("a b.md", "so")),
        ("'a b.md'", ("a b.md", "")),
        ('"a b.md', ("a b.md", "")),
    ],
)
def test_a_name_of_a_file_is_typed_as_a_shell_takes_it(
    folder: Path, text: str, parts: tuple[str, str]
) -> None:
    assert split_leading_path(text) == parts


def test_text_from_a_pipe_reads_no_file() -> None:
    done = run("replay", "-", "--json", "--max-new-tokens", "2", text="see @notes.txt\n")
    assert done.returncode == 0
    assert "@notes.txt" in done.stdout
    assert "buy milk" not in done.stdout


def test_a_name_that_is_no_text_is_read_like_any_message(folder: Path) -> None:
    name = "a\udcff.txt"
    (folder / name).write_text("x", encoding="utf-8")
    message, _ = sent(f"@{name}")
    list(session(max_new_tokens=2).read_user(message))
    assert message == "```a\ufffd.txt\nx\n```"


def test_a_name_is_taken_before_a_pattern_and_links_to_folders_are_not_followed(
    folder: Path,
) -> None:
    for name in ("App.js", "App.jsx", "deep/one.txt", "deep/two.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode() + b"\0" * name.endswith("png"))
    for name in "xy":
        (folder / "deep" / name).symlink_to("..", target_is_directory=True)
    assert attach_mentions("What is in @App.js?", print).startswith("```App.js\n")
    for mention in ("@./deep", "@deep/**/*.txt", "@**/one.txt"):
        assert attach_mentions(mention, print).endswith("deep/one.txt\ndeep/one.txt\n```")
    assert "```" not in attach_mentions("see @App.j? and @./?pp.js", print)
