"""Examples: a prefix a sentence, the same for the same seed, from where the result says they are."""

import json

import numpy as np
import pytest

from ffmem import build_index
from ffmem.corpus.parts import cut_parts
from ffmem.errors import CorpusError, FfmemError
from ffmem.experiments.examples import sample_examples
from tests.tiny import some_sentences


def drawn(model, index, *args, **options):
    return sample_examples(model, index, *args, quiet=True, **options)


def test_every_example_is_a_prefix_of_a_different_sentence_and_knows_what_follows(made, tmp_path):
    model, index, _ = made("gpt2")
    lines = [f"the king {'left ' * number}." for number in range(1, 30)]
    path = tmp_path / "eval.txt"
    path.write_text("\n".join(lines), "utf-8")
    examples = drawn(model, index, path, count=20)
    assert len(examples) == 20
    sentences = {text: model.tokenizer(text)["input_ids"] for text in lines}
    for example in examples.examples:
        fitting = [ids for text, ids in sentences.items() if text.startswith(example.text)]
        ids = example.ids.tolist()
        assert any(
            found[: len(ids)] == ids and (found[len(ids)] if len(found) > len(ids) else None) == example.next
            for found in fitting
        )


def test_the_same_seed_draws_the_same_examples_and_another_seed_others(made):
    model, index, _ = made("gpt2")

    def texts(seed):
        return [example.text for example in drawn(model, index, count=10, seed=seed).examples]

    assert texts(0) == texts(0) != texts(1)


def test_all_sentences_have_about_the_same_chance(made, tmp_path):
    model, index, _ = made("gpt2")
    path = tmp_path / "eval.txt"
    path.write_text("the king left .\n" * 50 + "the sea .\n" * 50, "utf-8")
    first = sum(
        "king" in example.text or len(example.ids) == 1
        for seed in range(20)
        for example in drawn(model, index, path, count=10, seed=seed).examples
    )
    assert 0.35 < first / 200 < 0.85  # half of them, and a third of the other half is "the" alone


def test_drawing_shard_by_shard_gives_what_drawing_at_once_gives(made, monkeypatch):
    model, index, text = made("gpt2")
    whole = [example.text for example in drawn(model, index, text, count=15).examples]
    monkeypatch.setattr("ffmem.corpus.shards.FIRST", 40)
    monkeypatch.setattr("ffmem.corpus.record.CHUNK", 60)
    assert [example.text for example in drawn(model, index, text, count=15).examples] == whole


def test_progress_counts_the_sentences_of_all_parts(made, monkeypatch):
    model, index, _ = made("gpt2")
    notes = []
    monkeypatch.setattr("ffmem.progress.Reporter.update", lambda _, share, note: notes.append(note))
    monkeypatch.setattr("ffmem.corpus.corpus.cut_parts", lambda sources, _: cut_parts(sources, 100))
    drawn(model, index, some_sentences(30, seed=2), count=5)
    assert len(notes) > 5
    assert notes[-1] == "30 sentences read"


def test_lengths_of_prefixes_are_spread_over_the_sentence(made, tmp_path):
    model, index, _ = made("gpt2")
    path = tmp_path / "eval.txt"
    path.write_text("the king and the queen left the city .\n" * 300, "utf-8")
    lengths = [len(example.ids) for example in drawn(model, index, path, count=300).examples]
    assert set(lengths) == set(range(1, 10))
    assert all(15 < count < 60 for count in np.bincount(lengths)[1:])


def test_fewer_sentences_than_asked_for_are_all_taken_and_counted(made, tmp_path):
    model, index, _ = made("gpt2")
    path = tmp_path / "eval.txt"
    path.write_text("the king left .\n", "utf-8")
    assert drawn(model, index, path, count=50).settings == {
        "examples": 1,
        "examples_asked": 50,
        "examples_from": str(path),
    }


def test_without_an_eval_corpus_the_indexed_one_is_read_and_that_is_said(made):
    model, index, text = made("gpt2")
    assert drawn(model, index, count=5).drawn_from == f"{text} (the indexed corpus itself)"


def test_a_corpus_that_cannot_be_read_again_gives_the_sentences_of_the_run(gpt2, tmp_path):
    sentences = some_sentences(30)
    index = build_index(gpt2, sentences, out=tmp_path / "run", quiet=True)
    examples = drawn(gpt2, index, count=5)
    assert "the run kept for its triggers" in examples.drawn_from
    assert all(any(text.startswith(example.text) for text in sentences) for example in examples.examples)


def test_an_empty_eval_corpus_is_an_error(made, tmp_path):
    model, index, _ = made("gpt2")
    path = tmp_path / "eval.txt"
    path.write_text("\n", "utf-8")
    with pytest.raises(CorpusError, match="expected sentences to draw examples from, found none in"):
        drawn(model, index, path)


def test_no_example_is_an_error(made):
    model, index, _ = made("gpt2")
    with pytest.raises(FfmemError, match="expected examples of at least 1, found 0"):
        drawn(model, index, count=0)


def test_batches_hold_every_example_once_behind_the_first_token(made):
    model, index, _ = made("gpt2")
    examples = drawn(model, index, count=30)
    seen = []
    for numbers, ids in examples.batches(7, 40):
        assert (ids[:, 0] == 7).all()
        for row, number in enumerate(numbers):
            assert ids[row, 1 : 1 + len(examples[number].ids)].tolist() == examples[number].ids.tolist()
        seen += numbers
    assert sorted(seen) == list(range(len(examples)))


def test_another_text_is_read_as_the_run_s_was(made, tmp_path):
    model, _, _ = made("gpt2")
    marked = "The king @-@ sea , was old ."
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"body": marked}) + "\n") * 5, "utf-8")
    settings = {"column": "body", "max_record": 100, "quiet": True}
    for wikitext, found in (("plain", "The king-sea, was old."), ("keep", marked)):
        index = build_index(model, rows, out=tmp_path / wikitext, wikitext=wikitext, **settings)
        for eval in (rows, None, [{"body": marked}] * 5):
            examples = drawn(model, index, eval, count=5)
            assert len(examples) == 5
            assert all(found.startswith(example.text) for example in examples.examples)
        with pytest.raises(CorpusError, match="at most 100 bytes"):
            drawn(model, index, [{"body": marked * 5}])


def test_the_commands_open_another_text_as_the_run_s_was(made, tmp_path, monkeypatch):
    from ffmem.cli.app import main

    model, _, _ = made("gpt2")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "the king left ."}\n', "utf-8")
    build_index(model, rows, out=tmp_path / "run", column="body", quiet=True)
    opened = []

    def fake(*, run, eval, **options):
        opened.append((eval[0].column, run.path))
        raise CorpusError("enough")

    monkeypatch.setattr("ffmem.experiments.run.each_experiment", fake)
    monkeypatch.setattr("ffmem.live.causal.causal", fake)
    for verb in (["experiments"], ["causal", "L1D0"]):
        with pytest.raises(SystemExit):
            main([verb[0], str(tmp_path / "run"), *verb[1:], "--eval", str(rows), "-q"])
    assert opened == [("body", tmp_path / "run")] * 2


def test_examples_of_a_sample_s_run_are_from_the_sample(made, tmp_path):
    model, _, text = made("gpt2")
    index = build_index(model, text, out=tmp_path / "run", unit="line", sample=6, seed=2, quiet=True)
    kept = set(index.table("sentences").column("text").to_pylist())
    assert len(kept) == 6
    examples = drawn(model, index, count=1000)
    assert len(examples) == 6
    assert all(any(text.startswith(example.text) for text in kept) for example in examples.examples)
