"""The chunking benchmarks on a tiny model: they must run, and report what can be known beforehand."""

import json
from pathlib import Path

import pytest

from benchmarks import ab, rtc
from benchmarks.workload import Load
from engine.config import ModelConfig


@pytest.fixture(scope="module")
def model() -> rtc.Model:
    config = ModelConfig(
        family="pi05",
        vocab_size=31,
        hidden_size=14,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_size=6,
        intermediate_size=10,
        max_position_embeddings=512,
        norm="layer",
        gated=False,
    )
    return rtc.Model.random(config)


def test_every_chunk_length_answers_alike(model: rtc.Model, capsys: pytest.CaptureFixture[str]) -> None:
    rtc.compare("tiny", model, [1, 8], Load(2, 32, 20), repeats=1)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["decode_chunk"] for line in lines] == [1, 8]
    assert all(line["same_tokens"] for line in lines)
    assert lines[0]["speedup"] == 1
    assert lines[0]["perplexity"] == lines[1]["perplexity"]
    assert lines[1]["peak_bytes"] > 4 * 31 * 14


def test_the_report_compares_each_option_with_plain_decoding(model: rtc.Model, tmp_path: Path) -> None:
    prompts = [tuple(range(1, 31)), tuple(range(30, 0, -1))]
    options = ab.options_of([1, 8], [4], 2, ["int8"], 3)
    names = [option.name for option in options]
    assert names == [
        "plain",
        "chunk 8",
        "chunk 8, overlap 2",
        "window 4",
        "window adaptive",
        "cache int8",
        "one sample",
        "best of 3 samples",
    ]
    outcomes = {outcome.option: outcome for outcome in ab.compare(model, options, prompts, 24)}
    plain = outcomes["plain"]
    for same in ("plain", "chunk 8", "chunk 8, overlap 2", "window adaptive"):
        assert (outcomes[same].agreement, outcomes[same].same_share) == (1, 1)
        assert outcomes[same].perplexity == plain.perplexity
    # 54 positions are 4 pages; a window of 4 holds 3 with the prompt's own chunk.
    assert outcomes["cache int8"].peak_cache_bytes < 0.6 * plain.peak_cache_bytes
    assert outcomes["best of 3 samples"].perplexity <= outcomes["one sample"].perplexity
    rows = ab.table(list(outcomes.values())).splitlines()
    assert len(rows) == 2 + len(names)
    assert len({row.count("|") for row in rows}) == 1
    ab.plot(list(outcomes.values()), tmp_path / "report.png", "a title")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_come_from_either_kind_of_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([[1, 2], [3]]))
    assert ab.read_prompts(path, None) == [(1, 2), (3,)]
    path.write_text(json.dumps({"completions": [{"prompt_ids": [5, 6]}, {"prompt_ids": [7]}]}))
    assert ab.read_prompts(path, 1) == [(5, 6)]
    path.write_text("[]")
    with pytest.raises(SystemExit, match="expected lists of token ids"):
        ab.read_prompts(path, None)
