import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import InvalidRequestError
from serve_app.text.stop import StopStringMatcher


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Of the first occurrences, the one that ends first; of those that end together, the one that begins first."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


def run(chunks: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopStringMatcher(stops, include_in_output=include)
    emitted: list[str] = []
    for chunk in chunks:
        text, stop = matcher.push(chunk)
        emitted.append(text)
        if stop is not None:
            return emitted, stop
    emitted.append(matcher.finish())
    return emitted, None


@given(
    chunks=st.lists(st.text(alphabet="ab", max_size=6), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
)
@example(chunks=["aabaaabaaaab"], stops=["aabaaaab"], include=False)
@example(chunks=["abc"], stops=["c", "abc", "bc"], include=False)
def test_any_chunking_agrees_with_a_search_in_the_whole_text(
    chunks: list[str], stops: list[str], include: bool
) -> None:
    emitted, stop = run(chunks, stops, include)
    assert ("".join(emitted), stop) == oracle("".join(chunks), stops, include)


@given(
    chunks=st.lists(st.text(alphabet="ab", max_size=6), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_exactly_what_may_begin_a_stop_string_is_held_back(chunks: list[str], stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    text, emitted = "", ""
    for chunk in chunks:
        piece, stop = matcher.push(chunk)
        text, emitted = text + chunk, emitted + piece
        if stop is not None:
            return
        held = max(n for s in stops for n in range(len(s)) if text.endswith(s[:n]))
        assert emitted == text[: len(text) - held]


def test_a_stop_string_may_span_pushes() -> None:
    assert run(["the E", "N", "D.", "more"], ["END"]) == (["the ", "", ""], "END")


def test_text_held_back_is_released_when_it_goes_on_otherwise() -> None:
    assert run(["the E", "N", "T", "E"], ["END"]) == (["the ", "", "ENT", "", "E"], None)


def test_the_stop_string_is_passed_on_where_asked() -> None:
    assert run(["a\n", "\nb"], ["\n\n"], include=True) == (["a", "\n\n"], "\n\n")


def test_nothing_follows_a_stop_string() -> None:
    matcher = StopStringMatcher(["x"])
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("c") == ("", "x")
    assert matcher.finish() == ""


def test_without_stop_strings_all_text_passes_at_once() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty") as raised:
        StopStringMatcher(["a", ""])
    assert raised.value.param == "stop"
